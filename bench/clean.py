"""clean: raw rows of Debezium become changes, beside bare consume + produce of the same bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import confluent_kafka
import psutil
from confluent_kafka import TopicPartition
from pydantic import BaseModel, create_model

from bench import floors
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.cleaning import cleaning_of

COUNT = 300_000
_KEYS = 50_000
_RATE = 400
_SECONDS = 15.0
_FETCH = 10_000
_UNTOLD = "__debezium_unavailable_value"

Message = tuple[bytes, bytes]
"""Key and value of a raw record."""


class Item(BaseModel):
    """Ten columns, as a shop's table has them."""

    id: int
    name: str
    email: str | None
    street: str | None
    city: str
    country: str
    amount: str
    currency: str
    quantity: int
    note: str | None


_WIDE: dict[str, Any] = {f"column_{number}": (str | None, None) for number in range(59)}
Wide: type[BaseModel] = create_model("Wide", id=(int, ...), **_WIDE)
"""Sixty columns."""


@dataclass(frozen=True)
class Shape:
    """What a bench cleans: so many captures of so many tables of one model."""

    name: str
    tables: int = 1
    model: type[BaseModel] = Item
    captures: int = 1

    def app(self) -> App:
        """The app that cleans them."""
        app = App("bench")
        for number in range(self.captures):
            tables = {}
            for table in range(self.tables):
                entity = f"item_{number}_{table}"
                app.entity(entity, key="id", history=False, source="capture")(self.model)
                tables[f"public.items_{table}"] = Table(entity=entity)
            app.capture(
                f"shop{number}",
                kind="postgresql",
                dsn="postgresql://nobody@localhost/shop",
                tables=tables,
                settings={"unavailable.value.placeholder": _UNTOLD},
            )
        return app


ONE = Shape("one table of 10 columns")
SHAPES = (
    ONE,
    Shape("40 tables", tables=40),
    Shape("rows of 60 columns", model=Wide),
    Shape("3 captures at once", captures=3),
)


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    session.spark  # noqa: B018 (started before anything is measured)
    results = []
    for shape in SHAPES:
        messages = [raw_message(shape, index) for index in range(count)]
        cpu: list[float] = []

        def ours(shape: Shape = shape, messages: Any = messages, cpu: Any = cpu) -> float:
            config = _filled(session, shape, messages)
            rate, seconds = cleaned(session, config, shape, len(messages))
            session.drop(config)
            cpu.append(seconds)
            return rate

        def floor(shape: Shape = shape, messages: Any = messages) -> float:
            config = _filled(session, shape, messages)
            rate = consume_and_produce(config, len(messages))
            session.drop(config)
            return rate

        values, beneath = session.alternate(floor, ours)
        reach = Reach(value_min=30_000) if shape is ONE else None
        results.append(
            result(
                "clean",
                f"raw → .changes + .state, {shape.name}",
                "changes/s",
                values,
                floors=beneath,
                floor_is="bare consume + produce of the same raw messages",
                reach=reach,
            )
        )
        limit = Reach(value_max=55) if shape is ONE else None
        used = cpu[-len(values) :]
        results.append(result("clean", "the same, processor time", "s/million", used, reach=limit))
    late = [_latencies(session) for _ in range(session.repeat)]
    name = f"raw → .changes at {_RATE}/s"
    results.append(
        result("clean", f"{name}, p50", "ms", [one[0] for one in late], reach=Reach(value_max=250))
    )
    results.append(
        result("clean", f"{name}, p99", "ms", [one[1] for one in late], reach=Reach(value_max=600))
    )
    return results


def raw_message(shape: Shape, index: int) -> Message:
    """Key and value of one row as a capture of ours writes it: created, then updated.

    Every tenth update leaves a column out, as PostgreSQL does with values that are kept apart.
    """
    key, turn = index % _KEYS, index // _KEYS
    if shape.model is Item:
        row: dict[str, Any] = {
            "id": key, "name": f"customer {key}", "email": f"c{key}@example.org",
            "street": f"{key}", "city": "Lagos", "country": "NG", "amount": f"{key}.{turn:02}",
            "currency": "NGN", "quantity": turn, "note": "a note that is longer than the rest " * 3,
        }  # fmt: skip
        if turn and key % 10 == 0:
            row["note"] = _UNTOLD
    else:
        row = {"id": key, **{name: f"{name} {turn} of row {key}" for name in _WIDE}}
    # Rows of a transaction have the moment of its commit.
    at, lsn = 1_770_000_000_000 + index // 10, 10_000 + index * 8
    source = {
        "version": "3.7.0.Final", "connector": "postgresql", "name": "everstate.raw.shop",
        "ts_ms": at, "snapshot": None, "db": "shop", "sequence": f'["{lsn - 4}","{lsn}"]',
        "ts_us": at * 1000, "ts_ns": at * 1_000_000, "schema": "public",
        "table": f"items_{index % shape.tables}", "txId": index // 10, "lsn": lsn, "xmin": None,
        "origin": None, "origin_lsn": None,
    }  # fmt: skip
    block = {"id": f"{index // 10}:{lsn}", "total_order": index % 10 + 1}
    value = {
        "before": None, "after": row, "source": source,
        "transaction": {**block, "data_collection_order": 1}, "op": "u" if turn else "c",
        "ts_ms": at, "ts_us": at * 1000, "ts_ns": at * 1_000_000,
    }  # fmt: skip
    plain = (",", ":")
    return json.dumps({"id": key}).encode(), json.dumps(value, separators=plain).encode()


def end_of(index: int) -> Message:
    """The end of the transaction that a row is the last one of."""
    name = json.dumps({"id": f"{index // 10}:{index}"}).encode()
    value = {"status": "END", "id": f"{index // 10}:{index}", "event_count": 10}
    return name, json.dumps(value).encode()


def cleaned(session: Session, config: Config, shape: Shape, count: int) -> tuple[float, float]:
    """Changes a second from the first read to the last commit, and processor seconds a million."""
    app = shape.app()
    cleaners = [
        Cleaner(config, cleaning_of(config, app, name), session=lambda: session.spark)
        for name in app.captures
    ]
    threads = [threading.Thread(target=one.catch_up, args=(600.0,)) for one in cleaners]
    for one in cleaners:
        one.open()
    used, began = _processor_s(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, used = time.perf_counter() - began, _processor_s() - used
    for one in cleaners:
        one.close()
    names, found = TopicNames(config.log.prefix), 0
    with Consumer(config) as consumer:
        for entity in app.entities:
            found += sum(1 for _ in consumer.read_topic(names.changes(entity)))
    assert found == count, (found, count)
    return count / took, used / count * 1_000_000


def _processor_s() -> float:
    """What this process has used, with Spark's JVM and its workers."""
    me = psutil.Process()
    mine = [p for p in me.children() if any("SparkSubmit" in each for each in p.cmdline())]
    workers = [each for one in mine for each in one.children(recursive=True)]
    used = 0.0
    for one in (me, *mine, *workers):
        times = one.cpu_times()
        used += times.user + times.system
        if one in workers:  # with those of its own that have ended
            used += times.children_user + times.children_system
    return used


def consume_and_produce(config: Config, count: int) -> float:
    """The floor: the bare client reads the raw log and writes the same bytes to another topic."""
    names = TopicNames(config.log.prefix)
    with Topics(config) as topics:
        raw = sorted(name for name in topics.existing() if name.startswith(names.raw_prefix("")))
        out = next(n for n in topics.existing() if n.startswith(names.changes("item_0_0")))
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "floor",
            "enable.auto.commit": False,
        }
    )
    producer = floors.connected(config, out)
    consumer.assign([TopicPartition(topic, 0, 0) for topic in raw])
    places = [TopicPartition(topic, 0) for topic in raw]
    # Rows, and the ends of their transactions.
    records = sum(consumer.get_watermark_offsets(place, 10)[1] for place in places)
    began = time.perf_counter()
    seen = 0
    while seen < records:
        for message in consumer.consume(_FETCH, 0.05):
            if message.error() is None:
                producer.produce(out, message.value(), message.key())
                seen += 1
        producer.poll(0)
    producer.flush()
    took = time.perf_counter() - began
    consumer.close()
    return count / took


def _latencies(session: Session) -> tuple[float, float]:
    messages = [raw_message(ONE, index) for index in range(int(_RATE * _SECONDS))]
    config = _filled(session, ONE, [])
    late = latencies_ms(config, messages, lambda: session.spark)
    session.drop(config)
    return median(late), sorted(late)[int(len(late) * 0.99)]


def latencies_ms(
    config: Config, messages: Sequence[Message], session: Callable[[], Any]
) -> list[float]:
    """From producing a raw row to reading its change, while rows come at an even rate."""
    names = TopicNames(config.log.prefix)
    raw = names.raw_prefix("shop0")
    sent: dict[int, float] = {}
    stop = threading.Event()
    cleaner = Cleaner(config, cleaning_of(config, ONE.app(), "shop0"), session=session)
    cleaner.open()
    thread = threading.Thread(target=cleaner.run, args=(stop,), daemon=True)
    thread.start()
    late: list[float] = []
    with Consumer(config) as consumer, Producer(config) as producer:
        changes = consumer.tail([names.changes("item_0_0")], idle_s=5.0)

        def read() -> None:
            for record in changes:
                key = record.key
                assert key is not None
                late.append((time.perf_counter() - sent[int(key)]) * 1000)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        began = time.perf_counter()
        for index, (key, value) in enumerate(messages):
            due = began + index / _RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            sent[index] = time.perf_counter()
            producer.send_raw(raw, key, value)
            if index % 10 == 9:
                # A row waits for the end of its transaction; what is measured begins there.
                at = time.perf_counter()
                sent.update(dict.fromkeys(range(index - 9, index), at))
                producer.send_raw(raw, *end_of(index), [("kind", b"transaction")])
        producer.flush()
        reader.join(60.0)
        assert len(late) == len(messages), f"{len(late)} of {len(messages)} changes came"
    stop.set()
    thread.join(30.0)
    cleaner.close()
    # What came before Java had compiled itself is not how a role follows.
    return late[len(late) // 3 :]


def _filled(session: Session, shape: Shape, messages: Sequence[Message]) -> Config:
    config, app = session.fresh(), shape.app()
    names = TopicNames(config.log.prefix)
    raw = [names.raw_prefix(name) for name in app.captures]
    with Topics(config) as topics:
        topics.ensure(app.entities)
        topics.ensure_raw(raw, partitions=1, settings={})
    with Producer(config) as producer:
        for index, (key, value) in enumerate(messages):
            # Rows of a transaction stay together, and so do those of a key.
            topic = raw[index % _KEYS // 10 % len(raw)]
            producer.send_raw(topic, key, value)
            if index % 10 == 9:
                producer.send_raw(topic, *end_of(index), [("kind", b"transaction")])
    return config
