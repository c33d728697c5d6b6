"""Replaying a part of an archive: one key, a time range, a provenance; to a topic or a file."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from everstate.archive import ArchiveReader, Where, record_parts
from everstate.archive.ordered import RECORD_COLUMNS
from everstate.changes import PROVENANCE_FIELDS
from everstate.changes.moments import moment_fault
from everstate.config import Config
from everstate.errors import ArchiveError, InvalidQuery
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.pipeline.archiving.targets import prepare

_OF_PREVIEW: Final = ("partition", "offset", "recorded_at")
_OF_LINE: Final = ["partition", "offset", "raw_key", "raw_value"]
_FILES: Final = (".jsonl", ".parquet")
_FLUSH_S: Final = 300.0
_RECORD: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestamp_type", pa.int32()),
        ("raw_key", pa.binary()),
        ("raw_value", pa.binary()),
        ("raw_headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""`RECORD_COLUMNS` with their types, for a file without records."""
WriteTable = Callable[[pa.Table], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records of an archive: those that meet all conditions; without any, all records.

    Without a condition, unreadable records are selected too.
    """

    key: str | None = None
    from_: datetime | None = None
    until: datetime | None = None
    """World time: changes that occurred in ``[from_, until)``."""
    recorded_from: datetime | None = None
    recorded_until: datetime | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Field of the provenance → its value."""

    def __post_init__(self) -> None:
        for name in self.provenance:
            if name not in PROVENANCE_FIELDS:
                raise InvalidQuery(
                    f"a provenance has no field {name!r}.",
                    advice=f"Its fields are {', '.join(PROVENANCE_FIELDS)}.",
                )
        for moment in (self.from_, self.until, self.recorded_from, self.recorded_until):
            if moment is not None and (fault := moment_fault(moment)) is not None:
                raise InvalidQuery(f"{moment.isoformat()}: {fault}.")

    @property
    def where(self) -> Where | None:
        """The condition on columns of the archive; ``None``: there is none."""
        found: list[tuple[str, ds.Expression]] = []
        if self.key is not None:
            found.append(("key", ds.field("key") == self.key))
        for column, first, end in (
            ("occurred_at", self.from_, self.until),
            ("recorded_at", self.recorded_from, self.recorded_until),
        ):
            # In UTC, because Arrow has no offsets with seconds.
            if first is not None:
                found.append((column, ds.field(column) >= pa.scalar(first.astimezone(UTC))))
            if end is not None:
                found.append((column, ds.field(column) < pa.scalar(end.astimezone(UTC))))
        for name, value in self.provenance.items():
            written = pc.field("provenance", PROVENANCE_FIELDS[name])
            found.append(("provenance", written == value))
        if not found:
            return None
        condition = reduce(and_, (condition for _, condition in found))
        return Where(condition, tuple(dict.fromkeys(column for column, _ in found)))


@dataclass(frozen=True, slots=True)
class SelectedPart:
    """The selected records of one partition."""

    partition: int
    records: int
    first_offset: int
    last_offset: int
    first_recorded_at: datetime | None
    last_recorded_at: datetime | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay wrote, and how many seconds it took."""

    entity: str
    to: str
    records: int
    partitions: int
    seconds: float
    restamped: int = 0
    """Records with the timestamp 0, which Kafka's client cannot send: theirs is the time of
    writing."""


def preview(
    config: Config, entity: str, selection: Selection, *, generation: int = 1
) -> list[SelectedPart]:
    """What a replay would write, by partition.

    Cost: reading the columns of the conditions, and three more.
    """
    found: dict[int, SelectedPart] = {}
    for table in _selected(config, entity, selection, generation, _OF_PREVIEW):
        partition = table["partition"][0].as_py()
        offsets, recorded = table["offset"], pc.min_max(table["recorded_at"]).as_py()
        before = found.get(partition)
        moments = [recorded["min"], recorded["max"]]
        if before is not None:
            moments += [before.first_recorded_at, before.last_recorded_at]
        known = [moment for moment in moments if moment is not None]
        found[partition] = SelectedPart(
            partition,
            table.num_rows + (before.records if before else 0),
            before.first_offset if before else offsets[0].as_py(),
            offsets[-1].as_py(),
            min(known, default=None),
            max(known, default=None),
        )
    return [found[partition] for partition in sorted(found)]


def replay_to_topic(
    config: Config,
    entity: str,
    selection: Selection,
    topic: str,
    *,
    generation: int = 1,
    append: bool = False,
    on_written: Callable[[int], object] = lambda _written: None,
) -> Replayed:
    """Write the selected records to a topic, byte for byte, each partition in its order.

    A missing topic is created without a retention limit. In a topic with another number of
    partitions, records are partitioned by their keys. Raises LogError when the topic has records
    already, unless ``append``, and when it is one of the project's own; ArchiveError, Unavailable.
    """
    began, written, restamped = time.monotonic(), 0, 0
    partitions = len(_spans(config, entity, generation))
    same = prepare(config, topic, partitions, append=append) == partitions
    with Producer(config, client_id="everstate-replay") as producer:
        for table in _selected(config, entity, selection, generation, RECORD_COLUMNS):
            for record in out_records(topic, table):
                producer.send(record if same else msgspec.structs.replace(record, partition=None))
                restamped += record.timestamp_ms == 0
            written += table.num_rows
            on_written(written)
        producer.flush(_FLUSH_S)
    seconds = time.monotonic() - began
    return Replayed(entity, topic, written, partitions, seconds, restamped)


def replay_to_file(
    config: Config,
    entity: str,
    selection: Selection,
    file: Path,
    *,
    generation: int = 1,
    on_written: Callable[[int], object] = lambda _written: None,
) -> Replayed:
    """Write the selected records to a new file, complete or not at all; by partition and offset.

    `.jsonl`: one message per line, as compact JSON; for a record that is no JSON its place, its
    key, and its bytes as base64. `.parquet`: records byte for byte, with key, headers and
    timestamp. Raises InvalidQuery for another file suffix, a file that exists or that cannot be
    written, and ArchiveError.
    """
    if file.suffix not in _FILES:
        raise InvalidQuery(f"{file}: the name of the file must end in {' or '.join(_FILES)}.")
    if file.exists():
        raise InvalidQuery(
            f"{file} exists already.", advice="Use another name, or remove the file."
        )
    began, written = time.monotonic(), 0
    partitions = len(_spans(config, entity, generation))
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    opened = _jsonl if file.suffix == ".jsonl" else _parquet
    try:
        with opened(partial) as write:
            for table in _selected(config, entity, selection, generation, RECORD_COLUMNS):
                write(table)
                written += table.num_rows
                on_written(written)
        partial.replace(file)
    except OSError as cause:
        raise InvalidQuery(
            f"{file} cannot be written: {cause.strerror or cause}.",
            advice="Name a file in a folder that exists, that you may write to and that has room.",
        ) from cause
    finally:
        with suppress(OSError):
            partial.unlink()
    return Replayed(entity, str(file), written, partitions, time.monotonic() - began)


def _selected(
    config: Config, entity: str, selection: Selection, generation: int, columns: tuple[str, ...]
) -> Iterator[pa.Table]:
    """Tables of selected records, each of one partition and in the order of offsets."""
    reader, spans = ArchiveReader(config, entity), _spans(config, entity, generation)
    if selection == Selection(key=selection.key) and selection.key is not None:
        found = reader.changes_of(selection.key, ("generation", *columns)).records
        mine = found.filter(pc.equal(found["generation"], generation)).select(list(columns))
        for partition in sorted(pc.unique(mine["partition"]).to_pylist()):
            yield mine.filter(pc.equal(mine["partition"], partition))
        return
    yield from reader.records(generation, spans, columns, selection.where)


def _spans(config: Config, entity: str, generation: int) -> dict[int, tuple[int, int]]:
    position = ArchiveReader(config, entity).position().get(generation)
    if position is None:
        raise ArchiveError(
            f"the archive of {entity} has no generation {generation}.",
            advice="Start one with `everstate run`.",
        )
    return {partition: (0, end) for partition, end in position.items()}


@contextmanager
def _jsonl(path: Path) -> Iterator[WriteTable]:
    with open(path, "wb") as sink:

        def write(records: pa.Table) -> None:
            for row in records.select(_OF_LINE).to_pylist():
                sink.write(_line(row) + b"\n")

        yield write


def _line(row: Mapping[str, Any]) -> bytes:
    key, value = row["raw_key"], row["raw_value"] or b""
    try:
        value.decode()  # The formatter takes bytes that are no UTF-8.
        return msgspec.json.format(value, indent=-1)
    except (ValueError, RecursionError):
        record = {"partition": row["partition"], "offset": row["offset"]}
    try:
        record["key"] = None if key is None else key.decode()
    except UnicodeDecodeError:
        record["keyBytes"] = base64.b64encode(key).decode()
    record["bytes"] = None if row["raw_value"] is None else base64.b64encode(value).decode()
    return msgspec.json.encode({"unreadable": record})


@contextmanager
def _parquet(path: Path) -> Iterator[WriteTable]:
    writers: list[pq.ParquetWriter] = []
    with open(path, "wb") as sink:

        def write(records: pa.Table) -> None:
            if not writers:
                writers.append(
                    pq.ParquetWriter(
                        sink, records.schema, compression="zstd", write_page_checksum=True
                    )
                )
            writers[0].write_table(records)

        try:
            yield write
            if not writers:
                write(_RECORD.empty_table())
        finally:
            for writer in writers:
                writer.close()


def out_records(topic: str, records: pa.RecordBatch | pa.Table) -> Iterator[OutRecord]:
    """Archived records in the form in which they are written again."""
    for partition, _, moment, key, value, headers, _ in record_parts(records):
        yield OutRecord(topic, key, value, list(headers), partition, moment)
