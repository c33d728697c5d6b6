"""Reading an archive without Spark: position, files, counts, one key's changes, one offset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable

from everstate.archive.commits import ArchiveLog, Position
from everstate.archive.layout import archive_errors, table_path
from everstate.archive.ledger import Ledger, LedgerRow, last_commit, ledger_rows
from everstate.config import Config


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One data file of the table's newest version, by its statistics."""

    path: str
    bytes: int
    rows: int
    unreadable: int
    partition_min: int | None
    partition_max: int | None
    offset_min: int | None
    offset_max: int | None
    key_min: str | None
    """Text statistics are cut; use them to leave files out, never to find a key."""
    key_max: str | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Records of the table's newest version, from statistics alone."""

    files: int
    bytes: int
    rows: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where one record of the log lies in the archive."""

    file: str
    """File that holds it now; compaction may have moved it."""
    commit_version: int
    """Commit that brought it."""
    committed_at: datetime
    epoch: int


class ArchiveReader:
    """The archive of one entity type, read by the lake format alone; opens the newest version.

    Every method raises ArchiveError when there is no archive yet, or it cannot be read.
    """

    def __init__(self, config: Config, entity: str) -> None:
        self.entity = entity
        self.path = table_path(config, entity)
        self._log = ArchiveLog(config, entity)
        self._ledger = Ledger(config, entity)

    def position(self) -> Position:
        """Next offset of each partition, exclusive; empty before the first commit."""
        commit = last_commit(self._log, self._ledger)
        if commit is None:
            return {}
        note = commit.note
        assert note is not None, "last() gives commits that have one"
        return note.positions

    def files(self) -> list[ArchiveFile]:
        """The data files, by path."""
        with archive_errors(f"reading the archive of {self.entity}"):
            actions = pa.table(self._table().get_add_actions(flatten=True)).to_pylist()
        return sorted((_file(action) for action in actions), key=lambda file: file.path)

    def counts(self) -> Counts:
        """How much there is, from statistics alone."""
        files = self.files()
        return Counts(
            files=len(files),
            bytes=sum(file.bytes for file in files),
            rows=sum(file.rows for file in files),
            unreadable=sum(file.unreadable for file in files),
        )

    def changes_of(self, key: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Readable changes of one key in log order; columns as in the table.

        Cost: reads the files whose statistics may hold the key; few after a clustering
        compaction, all of those written since.
        """
        place = ("generation", "offset")
        wanted = None if columns is None else list(dict.fromkeys((*columns, *place)))
        with archive_errors(f"reading the archive of {self.entity}"):
            table = self._table().to_pyarrow_dataset().to_table(
                columns=wanted, filter=ds.field("key") == key
            )  # fmt: skip
        table = table.sort_by([(name, "ascending") for name in place])
        return table if columns is None else table.select(list(columns))

    def values(self) -> Iterator[bytes]:
        """Value bytes of every readable change, in no order; streamed, 10,000 at a time."""
        readable = ds.field("recorded_at").is_valid()
        with archive_errors(f"reading the archive of {self.entity}"):
            batches = self._table().to_pyarrow_dataset().to_batches(
                columns=["raw_value"], filter=readable, batch_size=10_000
            )  # fmt: skip
            for batch in batches:
                yield from (value for value in batch.column(0).to_pylist() if value is not None)

    def record(self, generation: int, partition: int, offset: int) -> dict[str, Any] | None:
        """The record at one offset with all its columns; ``None`` when it is not there."""
        with archive_errors(f"reading the archive of {self.entity}"):
            rows = self._table().to_pyarrow_dataset().to_table(
                filter=_at(generation, partition, offset)
            )  # fmt: skip
        found: list[dict[str, Any]] = rows.to_pylist()
        return found[0] if found else None

    def locate(self, generation: int, partition: int, offset: int) -> Location | None:
        """File and commit that hold one offset; ``None``: not archived (yet), or never served."""
        condition = _at(generation, partition, offset)
        with archive_errors(f"reading the archive of {self.entity}"):
            dataset = self._table().to_pyarrow_dataset()
            file = next(
                (
                    fragment.path
                    for fragment in dataset.get_fragments(filter=condition)
                    if fragment.count_rows(filter=condition)
                ),
                None,
            )
        row = self._brought_by(generation, partition, offset)
        if file is None or row is None:
            return None
        return Location(file, row.commit_version, row.committed_at, row.epoch)

    def _brought_by(self, generation: int, partition: int, offset: int) -> LedgerRow | None:
        known = self._ledger.brought(generation, partition, offset)
        if known is not None:
            return known
        newest = self._ledger.newest()
        for row in (row for commit in self._log.commits(newest) for row in ledger_rows(commit)):
            here = row.generation == generation and row.partition == partition
            if here and row.start <= offset < row.end:
                return row
        return None

    def _table(self) -> DeltaTable:
        return DeltaTable(self.path)


def _at(generation: int, partition: int, offset: int) -> ds.Expression:
    place = {"partition": partition, "offset": offset, "generation": generation}
    return reduce(and_, (ds.field(name) == value for name, value in place.items()))


def _file(action: dict[str, Any]) -> ArchiveFile:
    return ArchiveFile(
        path=action["path"],
        bytes=action["size_bytes"],
        rows=action["num_records"] or 0,
        unreadable=action.get("null_count.recorded_at") or 0,
        partition_min=action.get("min.partition"),
        partition_max=action.get("max.partition"),
        offset_min=action.get("min.offset"),
        offset_max=action.get("max.offset"),
        key_min=action.get("min.key"),
        key_max=action.get("max.key"),
    )
