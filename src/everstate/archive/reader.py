"""Reading an archive without Spark: position, files, counts, one key's changes, one offset."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from pyarrow.fs import FileSystem

from everstate.archive.commits import ArchiveLog, Position
from everstate.archive.files import ArchiveFile, files_of
from everstate.archive.layout import archive_errors, table_path
from everstate.archive.ledger import Ledger, LedgerRow, last_commit, ledger_rows
from everstate.archive.lookup import KeyRecords, records_of_key
from everstate.archive.ordered import RECORD_COLUMNS, OrderedRecords, Where
from everstate.archive.sums import CHECKED_PARQUET, filesystem_of, table_of
from everstate.config import Config

_NO_END: Final = 2**63 - 1
_PLACE: Final = ("generation", "partition", "offset")


class ArchiveReader:
    """The archive of one entity type, read directly from the lake files; uses the newest version.

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

    def begins(self, generation: int) -> dict[int, int]:
        """First offset of each partition in the archive; it has all records from there on.

        Cost: the ledger, and the commits that it does not have yet.
        """
        rows = self._ledger.rows()
        known = max((row.commit_version for row in rows), default=-1)
        rows += self._added_since(known)
        begins: dict[int, int] = {}
        for row in rows:
            if row.generation == generation:
                begins[row.partition] = min(row.start, begins.get(row.partition, row.start))
        return begins

    def files(self, version: int | None = None) -> list[ArchiveFile]:
        """The data files of the newest version, or of an earlier one, by path, with their counts.

        Cost: reads the table's log, and no data file.
        """
        with archive_errors(f"reading the archive of {self.entity}"):
            table = self._table()
            if version is not None:
                table.load_as_version(version)
            return files_of(table)

    def changes_of(
        self, key: str, columns: Sequence[str] = (*_PLACE, *RECORD_COLUMNS)
    ) -> KeyRecords:
        """Readable records of one key in log order, including duplicates and conflicts.

        Cost: opens the files whose statistics may hold the key: few of the files from a clustering
        compaction, and all of those written since.
        """
        began = time.monotonic()
        with archive_errors(f"reading the archive of {self.entity}"):
            files = self.files()
            may = [file for file in files if file.may_hold_key(key)]
            wanted = list(dict.fromkeys((*columns, *_PLACE)))
            parts = records_of_key(_filesystem(self.path), may, key, wanted)
            empty = self._schema(wanted).empty_table()
            found = pa.concat_tables([*parts, empty], promote_options="permissive")
        place = [("generation", "ascending"), ("offset", "ascending")]
        ordered = found.sort_by(place).select(list(dict.fromkeys(columns)))
        return KeyRecords(ordered, len(may), len(files), time.monotonic() - began)

    def records(
        self,
        generation: int,
        spans: Mapping[int, tuple[int, int]],
        columns: Sequence[str] = RECORD_COLUMNS,
        where: Where | None = None,
    ) -> Iterator[pa.Table]:
        """Records of offset ranges, in order, partition by partition, at most 10,000 at a time.

        ``spans``: partition → first and next offset; ``columns`` must include `partition` and
        `offset`. Memory is bounded; offsets that compaction has mixed are sorted on local disk.
        Close the iterator when it is not read to its end.
        """
        with archive_errors(f"reading the archive of {self.entity}"):
            filesystem, files = _filesystem(self.path), self.files()
            ordered = OrderedRecords(filesystem, files, generation, spans, columns, where)
            with closing(ordered):
                yield from ordered.read()

    def has_since(
        self, positions: Mapping[tuple[int, int], int], column: str, moment: datetime
    ) -> bool:
        """Whether a change after these positions may have a time up to a moment.

        ``positions``: (generation, partition) → next offset; ``column``: `occurred_at` or
        `recorded_at`. Unreadable records count too. Cost: three columns of the files with offsets
        after the positions.
        """
        with archive_errors(f"reading the archive of {self.entity}"):
            files = self.files()
            for (generation, partition), start in positions.items():
                mine = [file.path for file in files if file.may_hold(partition, start, _NO_END)]
                if not mine:
                    continue
                schema = self._schema([*_PLACE, column])
                rows = _dataset(self.path, mine, schema)
                known = ds.field(column)
                behind = ds.field("offset") >= start
                here = (ds.field("generation") == generation) & (ds.field("partition") == partition)
                early = (known <= pa.scalar(moment)) | known.is_null()
                if rows.head(1, columns=["offset"], filter=here & behind & early).num_rows:
                    return True
            return False

    def values(self) -> Iterator[bytes]:
        """Value bytes of every readable change, in no order; streamed, 10,000 at a time."""
        readable = ds.field("recorded_at").is_valid()
        with archive_errors(f"reading the archive of {self.entity}"):
            files = [file.path for file in self.files()]
            schema = self._schema(["raw_value", "recorded_at"])
            batches = _dataset(self.path, files, schema).to_batches(
                columns=["raw_value"], filter=readable, batch_size=10_000
            )  # fmt: skip
            for batch in batches:
                yield from (value for value in batch.column(0).to_pylist() if value is not None)

    def locate(self, generation: int, partition: int, offset: int) -> tuple[str, LedgerRow] | None:
        """The file that has one offset now, and the range of the commit that added it.

        ``None``: it is not archived (yet), or not a record.
        """
        here = (ds.field("generation") == generation) & (ds.field("partition") == partition)
        condition = here & (ds.field("offset") == offset)
        with archive_errors(f"reading the archive of {self.entity}"):
            files = [
                file.path for file in self.files() if file.may_hold(partition, offset, offset + 1)
            ]
            dataset = _dataset(self.path, files, self._schema(_PLACE))
            file = next(
                (
                    fragment.path
                    for fragment in dataset.get_fragments(filter=condition)
                    if fragment.count_rows(filter=condition)
                ),
                None,
            )
        row = self._brought_by(generation, partition, offset)
        return None if file is None or row is None else (file, row)

    def _brought_by(self, generation: int, partition: int, offset: int) -> LedgerRow | None:
        known = self._ledger.brought(generation, partition, offset)
        if known is not None:
            return known
        for row in self._added_since(self._ledger.newest()):
            here = row.generation == generation and row.partition == partition
            if here and row.start <= offset < row.end:
                return row
        return None

    def _added_since(self, newest: int) -> Iterator[LedgerRow]:
        """The ranges of commits that the ledger does not have; ``newest``: its newest commit."""
        return (row for commit in self._log.commits(newest) for row in ledger_rows(commit))

    def _table(self) -> DeltaTable:
        return table_of(self.path)

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        whole = pa.schema(self._table().schema().to_arrow())
        return pa.schema([whole.field(name) for name in names])


def _filesystem(path: str) -> FileSystem:
    return filesystem_of(path, by_spark=True)


def _dataset(path: str, files: list[str], schema: pa.Schema) -> ds.Dataset:
    return ds.dataset(files, schema=schema, filesystem=_filesystem(path), format=CHECKED_PARQUET)
