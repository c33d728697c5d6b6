"""derive: accepted changes into a topic of JSON Patches, beside a bare copy; and their bytes."""

from __future__ import annotations

import time
from datetime import date

from bench import data
from bench.keep import kept
from bench.project import lean
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.app import App
from everstate.changes import Change, ChangeCodec, Kind, new_change_id
from everstate.changes.derived import patch_of, read_message
from everstate.config import Config
from everstate.demo.flights import app as flights
from everstate.demo.play import play, read_timetable
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.topics import Topics
from everstate.pipeline.derive.deriver import Deriver

COUNT = 250_000


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    filled = session.filled(count)

    def ours() -> float:
        config = session.fresh(filled)
        app = App("bench")
        app.entity(data.ENTITY, key="id", history=False)(data.Purchase)
        declared = app.derive(f"patches_{config.store_dsn[-6:]}", patch_of(data.ENTITY))
        kept(session, config, count, lean)
        deriver = Deriver(config, app, declared)
        deriver.open()
        took = _drained(deriver, count)
        deriver.close()
        session.drop(config)
        return count / took

    def copied() -> float:
        return count / _copied(filled)

    values, floors = session.alternate(copied, ours, warm=1)
    share = _bytes()
    return [
        result(
            "derive",
            f"{count:,} accepted changes → JSON Patches, exactly once",
            "changes/s",
            values,
            floors=floors,
            floor_is="bare consume + transactional produce of the same messages",
        ),
        result(
            "derive",
            "bytes of a patch beside those of the change's value, the demonstration's updates",
            "%",
            [100 * share],
            reach=Reach(value_max=25),
        ),
    ]


def _drained(deriver: Deriver, count: int) -> float:
    """Seconds until so many changes are derived; the first step connects."""
    done, began, deadline = deriver.step(), time.perf_counter(), time.monotonic() + 600
    timed = count - done
    assert timed > 0, "the first step derived everything"
    while done < count:
        assert time.monotonic() < deadline, f"{done:,} of {count:,} changes are derived"
        done += deriver.step()
    return (time.perf_counter() - began) * count / timed


def _copied(config: Config) -> float:
    """Seconds of a copy of the changelog, in transactions of as many records."""
    target = f"{config.log.prefix}.copied"
    source = changes_topic(config)
    with Topics(config) as topics, Offsets(config) as offsets:
        topics.delete([target])
        topics.create(target, topics.partitions(source), {})
        ends = offsets.stable_ends([source])
    producer = Producer(config, transactional_id=target, client_id=target)
    producer.init(30)
    with Consumer(config) as consumer:
        began = time.perf_counter()
        producer.begin()
        done = 0
        for (topic, partition), end in ends.items():
            for record in consumer.read(topic, partition, 0, end):
                producer.send_raw(target, record.key, record.value, list(record.headers), partition)
                done += 1
                if done % 10_000 == 0:
                    producer.commit(30)
                    producer.begin()
        producer.commit(30)
        took = time.perf_counter() - began
    producer.discard()
    return took


def _bytes() -> float:
    """Share of the values' bytes, over the updates of February."""
    entity_type = flights.entity_type("flight")
    codec, form = ChangeCodec(entity_type), patch_of("flight")
    before: dict[str, tuple[int, object]] = {}
    patches = values = 0
    for step in play(read_timetable(date(2013, 2, 1), date(2013, 2, 28))):
        key = entity_type.key_of(step.flight)
        version, original = before.get(key, (0, None))
        before[key] = (version + 1, step.flight)
        if original is None:
            continue
        change = Change(
            id=new_change_id(),
            entity="flight",
            schema_version=1,
            key=key,
            version=version + 1,
            kind=Kind.UPDATED,
            occurred_at=step.occurred_at,
            recorded_at=step.occurred_at,
            provenance=step.provenance,
            current=step.flight,
            original=original,
            event=step.event,
        )
        value = codec.encode(change)[1]
        values += len(value)
        patches += len(form.value(read_message(value), None) or b"")
    return patches / values
