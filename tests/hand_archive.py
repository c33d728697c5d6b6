"""An archive written by hand, without Spark: records, commits and sums, not its typed columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pydantic import BaseModel

from everstate.archive import CommitNote, CommittedRange, app_id, table_path
from everstate.archive.layout import TABLE_PROPERTIES
from everstate.archive.sums import summed
from everstate.config import Config
from everstate.log.record import Record


class Seat(BaseModel):
    """The entity of what tests archive by hand."""

    seat_id: str
    price: int


SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.string()),
        ("recorded_at", pa.timestamp("us", tz="UTC")),
        ("generation", pa.int32()),
        ("occurred_at", pa.timestamp("us", tz="UTC")),
        ("provenance", pa.struct([(n, pa.string()) for n in ("serviceName", "actor")])),
        ("raw_key", pa.binary()),
        ("raw_value", pa.binary()),
        ("raw_headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestamp_type", pa.int32()),
    ]
)


@dataclass
class HandArchive:
    """The archive of one entity type; each append is one commit with one file a partition."""

    config: Config
    entity: str
    topic: tuple[str, str] = ("cluster", "topic")
    """Cluster id and topic id."""
    position: dict[int, int] = field(default_factory=dict)
    epoch: int = -1

    def begin(self, begins: Mapping[int, int]) -> None:
        """The first commit: an empty table that says where it begins."""
        self._commit([], {p: (at, at) for p, at in begins.items()})

    def append(self, records: Iterable[Record], ends: Mapping[int, int]) -> None:
        """Take over records, up to an offset of each partition."""
        ranges = {p: (self.position.get(p, 0), end) for p, end in ends.items()}
        self._commit(list(records), ranges)

    def mix(self, files: int = 3) -> None:
        """Write all records anew, ordered by key, as a clustering compaction does."""
        path = table_path(self.config, self.entity)
        table = DeltaTable(path).to_pyarrow_table().sort_by("key")
        rows = max(1, -(-table.num_rows // files))
        with summed(path):
            write_deltalake(path, table.slice(0, rows), mode="overwrite")
            for start in range(rows, table.num_rows, rows):
                write_deltalake(path, table.slice(start, rows), mode="append")

    def _commit(self, records: list[Record], ranges: Mapping[int, tuple[int, int]]) -> None:
        self.epoch += 1
        self.position |= {p: end for p, (_, end) in ranges.items()}
        note = CommitNote(
            entity=self.entity,
            epoch=self.epoch,
            writer="by hand",
            ranges=tuple(CommittedRange(1, p, *span) for p, span in sorted(ranges.items())),
            positions={1: dict(self.position)},
            topics={1: self.topic},
        )
        for number, partition in enumerate(sorted({r.partition for r in records}) or [-1]):
            rows = [_row(record) for record in records if record.partition == partition]
            transaction = Transaction(app_id(self.entity), self.epoch)
            path = table_path(self.config, self.entity)
            with summed(path):
                write_deltalake(
                    path,
                    pa.Table.from_pylist(rows, SCHEMA),
                    mode="append",
                    configuration=TABLE_PROPERTIES if self.epoch == 0 and number == 0 else None,
                    commit_properties=CommitProperties(
                        custom_metadata={"userMetadata": note.to_json()},
                        app_transactions=[transaction],
                    ),
                )


def _row(record: Record) -> dict[str, object]:
    return {
        **_typed(record.value or b""),
        "partition": record.partition,
        "offset": record.offset,
        "generation": 1,
        "raw_key": record.key,
        "raw_value": record.value,
        "raw_headers": [{"key": name, "value": value} for name, value in record.headers],
        "timestamp": 1_000 * record.timestamp_ms,
        "timestamp_type": record.timestamp_type,
    }


def _typed(value: bytes) -> dict[str, object]:
    """What Spark makes of a message; nothing of one that it cannot read."""
    try:
        message = json.loads(value)
        recorded = datetime.fromisoformat(message["recordedAt"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    occurred = datetime.fromisoformat(message.get("occurredAt", message["recordedAt"]))
    return {
        "key": message["key"],
        "recorded_at": recorded,
        "occurred_at": occurred,
        "provenance": message.get("provenance"),
    }
