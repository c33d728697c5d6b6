"""The ledger: the offsets that each commit added, kept longer than the table's own log (C26)."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import write_deltalake

from everstate.archive.commits import (
    ArchiveLog,
    Commit,
    CommitNote,
    Position,
    PositionForgotten,
)
from everstate.archive.files import files_of
from everstate.archive.layout import archive_errors, ledger_path, options_of
from everstate.archive.sums import (
    CHECKED_PARQUET,
    check_table,
    filesystem_of,
    is_table,
    summed,
    table_of,
)
from everstate.config import Config
from everstate.errors import NoArchive

logger = logging.getLogger("everstate.archive")

_FILES_MAX: Final = 100

_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("commit_version", pa.int64(), nullable=False),
    pa.field("committed_at", pa.timestamp("us", tz="UTC"), nullable=False),
    pa.field("epoch", pa.int64(), nullable=False),
    pa.field("generation", pa.int32(), nullable=False),
    pa.field("partition", pa.int32(), nullable=False),
    pa.field("start", pa.int64(), nullable=False),
    pa.field("end", pa.int64(), nullable=False),
    pa.field("rows", pa.int64(), nullable=False),
    pa.field("unreadable", pa.int64(), nullable=False),
    pa.field("file", pa.string()),
    pa.field("cluster_id", pa.string()),
    pa.field("topic_id", pa.string()),
]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One range of one commit. ``start == end`` marks where the archive began."""

    commit_version: int
    committed_at: datetime
    epoch: int
    generation: int
    partition: int
    start: int
    end: int
    rows: int
    """Records in the range; fewer than its length when it contains transaction markers."""
    unreadable: int
    file: str | None
    """File that the commit wrote; compaction moves its rows elsewhere."""
    cluster_id: str | None
    topic_id: str | None


class Ledger:
    """The ledger of one entity type's archive: a small lake table beside it.

    :meth:`sync` fills it from the metadata and statistics of commits, so a lost ledger can be
    filled again as long as the table's log has these commits. Two processes may fill it at once:
    they add equal rows, and :meth:`rows` returns each once.
    """

    def __init__(self, config: Config, entity: str) -> None:
        self.entity = entity
        self.path = ledger_path(config, entity)

    def sync(self, log: ArchiveLog) -> int:
        """Append the ranges of commits that it does not have yet; returns how many.

        Logs a warning when the table's log lost commits before they were copied.
        """
        known = self._read(columns=["commit_version", "epoch"])
        newest, epoch = _newest(known, "commit_version"), _newest(known, "epoch")
        rows = [row for commit in log.commits(after=newest) for row in ledger_rows(commit)]
        if rows:
            if rows[0].epoch > epoch + 1:
                logger.warning(
                    "appends %d to %d of %s are no longer in its table's log and were never copied "
                    "to the ledger; `everstate archive verify` shows which offsets it cannot prove",
                    epoch + 1,
                    rows[0].epoch - 1,
                    self.entity,
                )
            with archive_errors(f"writing the ledger of {self.entity}"):
                table = pa.Table.from_pylist(
                    [asdict(row) for row in rows], schema=pa.schema(_FIELDS)
                )
                with summed(self.path):
                    options = options_of(self.path)
                    write_deltalake(self.path, table, mode="append", storage_options=options)
                    names = self.files()
                    if len(names) > _FILES_MAX:
                        # Delta compares no sums when it writes the files' content again.
                        for damage in check_table(self.path, names)[0].values():
                            raise damage
                        table_of(self.path).optimize.compact()
        return len(rows)

    def exists(self) -> bool:
        """Whether it was ever written."""
        with archive_errors(f"looking for the ledger of {self.entity}"):
            return is_table(self.path)

    def files(self) -> list[str]:
        """Its data files, as its log names them."""
        with archive_errors(f"reading the ledger of {self.entity}"):
            return [file.path for file in files_of(table_of(self.path))]

    def newest(self) -> int:
        """Newest commit in the ledger, -1: none. Cost: one narrow column."""
        return _newest(self._read(columns=["commit_version"]), "commit_version")

    def brought(self, generation: int, partition: int, offset: int) -> LedgerRow | None:
        """The range that contains one offset. Cost: the ledger's files that may hold it."""
        place = (ds.field("generation") == generation) & (ds.field("partition") == partition)
        holds = (ds.field("start") <= offset) & (ds.field("end") > offset)
        found = self._read(filter=place & holds)
        return LedgerRow(**found.slice(0, 1).to_pylist()[0]) if found else None

    def rows(self) -> list[LedgerRow]:
        """All ranges in commit order, each once."""
        found = self._read()
        stored = [] if found is None else [LedgerRow(**row) for row in found.to_pylist()]
        once = {(r.commit_version, r.generation, r.partition, r.start): r for r in stored}
        return [once[place] for place in sorted(once)]

    def last(self, epoch: int | None) -> Commit | None:
        """The append with this number as a commit that has the archive's position.

        ``None``: it is not the newest append in the ledger.
        """
        rows = self.rows()
        if not rows or epoch is None or max(row.epoch for row in rows) != epoch:
            return None
        newest = max(rows, key=lambda row: row.commit_version)
        positions: Position = {}
        for row in rows:
            at = positions.setdefault(row.generation, {})
            at[row.partition] = max(row.end, at.get(row.partition, row.end))
        note = CommitNote(
            entity=self.entity,
            epoch=epoch,
            writer="",
            ranges=(),
            positions=positions,
            topics={row.generation: (row.cluster_id or "", row.topic_id or "") for row in rows},
        )
        note_json = note.to_json()
        return Commit(newest.commit_version, newest.committed_at, "WRITE", note_json, ())

    def _read(self, **what: Any) -> pa.Table | None:
        """Part of the ledger's table; ``None`` while it does not exist."""
        with archive_errors(f"reading the ledger of {self.entity}"):
            if not self.exists():
                return None
            return ds.dataset(
                self.files(),
                schema=pa.schema(_FIELDS),
                filesystem=filesystem_of(self.path),
                format=CHECKED_PARQUET,
            ).to_table(**what)


def _newest(found: pa.Table | None, column: str) -> int:
    newest = pc.max(found[column]).as_py() if found is not None else None
    return -1 if newest is None else int(newest)


def last_commit(log: ArchiveLog, ledger: Ledger) -> Commit | None:
    """The newest commit that moved the position; ``None`` before the first.

    Delta deletes commits older than a month from its log. The ledger has copied each of them
    before, so it has the position of a table without appends since then. Raises ArchiveError when
    the ledger's newest append is not the table's: a position is never guessed.
    """
    try:
        return log.last()
    except PositionForgotten:
        found = ledger.last(log.epoch())
        if found is None:
            raise
        return found


def frozen(log: ArchiveLog, ledger: Ledger) -> tuple[int, CommitNote]:
    """A version of the table, and the note of the append whose position it has.

    The newest version, not the append's own: compaction replaces the files of an append, and they
    are deleted seven days later. Rows of later appends are not in it. Raises NoArchive before the
    first append.
    """
    if not log.exists():
        raise NoArchive(log.entity)
    version = log.version()
    last = last_commit(log, ledger)
    assert last is not None, "the table exists"
    assert last.note is not None, "an append has one"
    # An append between the two calls is included, later ones are not.
    return max(version, last.version), last.note


def ledger_rows(commit: Commit) -> list[LedgerRow]:
    """A commit's ranges with the number of records in each, from the statistics of its files."""
    note = commit.note
    if note is None:
        return []
    rows = []
    for span in note.ranges:
        files = [
            file
            for file in commit.added
            if file.partition_min == span.partition
            and file.offset_min is not None
            and span.start <= file.offset_min < span.end
        ]
        cluster_id, topic_id = note.topics.get(span.generation, (None, None))
        rows.append(
            LedgerRow(
                commit_version=commit.version,
                committed_at=commit.committed_at,
                epoch=note.epoch,
                generation=span.generation,
                partition=span.partition,
                start=span.start,
                end=span.end,
                rows=sum(file.rows for file in files),
                unreadable=sum(file.unreadable for file in files),
                file=files[0].path if files else None,
                cluster_id=cluster_id,
                topic_id=topic_id,
            )
        )
    return rows
