"""archive: a filled log into the lake, raw and typed, beside Kafka → from_json → noop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import data, realfiles
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from bench.spark_floors import read_and_parse
from everstate.archive import ArchiveReader
from everstate.changes import Change, ChangeCodec, EntityType, Kind
from everstate.changes.ids import derived_change_id
from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.archiving.archiver import Archiver

COUNT = 1_000_000


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    filled = session.filled(count)
    sizes: list[float] = []

    def floor() -> float:
        return read_and_parse(session.spark, filled.bootstrap_servers, changes_topic(filled), count)

    def ours() -> float:
        took, stored = archived(session, filled, data.PURCHASE, count)
        sizes.append(stored / count)
        return count / took

    values, beneath = session.alternate(floor, ours, warm=4)
    rows = [
        result(
            "archive",
            "Kafka → Delta, raw + typed, warm",
            "changes/s",
            values,
            floors=beneath,
            floor_is="Spark Kafka → from_json → noop",
            reach=Reach(ratio_min=0.48),
        ),
        result("archive", "size in the lake", "bytes/change", sizes[-session.repeat :]),
    ]
    return rows + [_real(session, each) for each in realfiles.found(session.data_dir)]


def archived(
    session: Session, filled: Config, entity_type: EntityType, count: int, lake: str | None = None
) -> tuple[float, float]:
    """Seconds for a whole log into a new archive, and the archive's bytes.

    ``lake``: URL below which the archive is; ``None``: a folder.
    """
    config = session.fresh(filled)
    if lake is not None:
        name = config.archive_path.rpartition("/")[2]
        config = config.replaced("archive", path=f"{lake}/{name}")
    with archiving(session, config, entity_type) as archiver:
        began = time.perf_counter()
        rows = archiver.catch_up()
        took = time.perf_counter() - began
    assert rows == count, f"{rows:,} of {count:,} changes archived"
    session.drop(config)
    return took, sum(file.bytes for file in ArchiveReader(config, entity_type.name).files())


@contextmanager
def archiving(session: Session, config: Config, entity_type: EntityType) -> Iterator[Archiver]:
    """An archiver of one entity type, for the time of the block."""
    with Offsets(config) as offsets, Topics(config) as topics:
        yield Archiver(session.spark, config, entity_type, offsets=offsets, topics=topics)


def _real(session: Session, file: realfiles.RealFile) -> Result:
    states = file.states(session.size(250_000))
    config, entity_type = session.fresh(), file.entity_type
    with Topics(config) as topics:
        topics.ensure([entity_type.name])
    topic, codec = TopicNames(config.log.prefix).changes(entity_type.name), ChangeCodec(entity_type)
    versions: dict[str, int] = {}
    with Producer(config) as producer:
        for number, state in enumerate(states):
            key = entity_type.key_of(state)
            versions[key] = versions.get(key, 0) + 1
            before = states[number - 1] if versions[key] > 1 else None
            key_bytes, value, headers = codec.encode(
                Change(
                    id=derived_change_id(file.path.name, key, versions[key]),
                    entity=entity_type.name,
                    schema_version=1,
                    key=key,
                    version=versions[key],
                    kind=Kind.CREATED if before is None else Kind.UPDATED,
                    occurred_at=data.EPOCH,
                    recorded_at=data.EPOCH,
                    provenance=data.PROVENANCE,
                    current=state,
                    original=before,
                )
            )
            producer.send_raw(topic, key_bytes, value, headers)
    count = len(states)
    values = [
        count / archived(session, config, entity_type, count)[0] for _ in range(session.repeat)
    ]
    session.drop(config)
    return result("archive", f"{file.path.name}, {count:,} changes", "changes/s", values)
