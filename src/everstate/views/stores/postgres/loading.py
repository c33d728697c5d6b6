"""Filling the table of a version that no reader sees, from Spark's tasks.

Each task stages its rows and adds them in one transaction; rows that an earlier attempt of the task
has added are left alone, so that a task may be tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa
from psycopg import sql

from everstate.views.images import cut
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.session import session
from everstate.views.sums import grouped
from everstate.views.tables import HISTORY_COLUMNS, HistoryTable, KeptTable, RowTable, SumTable

BASE_SHARD: Final = -1
"""Shard of the sums that were built: no partition adds to it."""


@dataclass(frozen=True)
class _Load:
    """A task; pickled to the executors."""

    dsn: str
    schema_name: str
    table: KeptTable

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add the rows of a task; one line with their number."""
        filled = [batch for batch in batches if batch.num_rows]
        rows = 0
        if filled:
            columns = self.columns(pa.Table.from_batches(filled))
            rows = len(next(iter(columns.values())))
            self._add(columns)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})

    def columns(self, rows: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Columns of the table, made of the rows that Spark gives."""
        raise AssertionError("each kind has its own")

    def _add(self, columns: dict[str, pa.Array | pa.ChunkedArray]) -> None:
        stage_name = writes.stage_name(f"{self.table.name}_load")
        with session(self.dsn) as found:
            like = writes.like(self.schema_name, self.table.name)
            writes.prepare_stage(found, stage_name, like)
            stage = writes.stage_of(stage_name)
            with found.connection.transaction():
                writes.copy_rows(found, stage, columns)
                names = sql.SQL(", ").join(map(sql.Identifier, columns))
                found.connection.execute(
                    sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT DO NOTHING").format(
                        sql.Identifier(self.schema_name, self.table.name), names, names, stage
                    )
                )


class LoadRows(_Load):
    """Key, version and the columns of a view of rows."""

    def columns(self, rows: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Spark names key and version `__key` and `__version`."""
        assert isinstance(self.table, RowTable)
        names = ["key", "version", *self.table.columns]
        return dict(zip(names, rows.columns, strict=True))


class LoadSums(_Load):
    """Groups and sums of a view of sums."""

    def columns(self, rows: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Everything goes into one shard of its own."""
        assert isinstance(self.table, SumTable)
        groups: Sequence[str] = self.table.groups
        found = {name: rows[name] for name in rows.column_names}
        found |= {name: grouped(rows[name].combine_chunks()) for name in groups}
        found["shard"] = pa.array(np.full(rows.num_rows, BASE_SHARD, dtype=np.int64))
        return found


class LoadHistory(_Load):
    """Every accepted change."""

    COLUMNS: ClassVar = (
        *("key", "version", "id", "kind", "as_of", "occurred_at", "recorded_at"),
        *("schema_version", "generation", "partition", "offset", "raw_value"),
    )

    def columns(self, rows: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        """JSON texts are cut out of the raw messages."""
        assert isinstance(self.table, HistoryTable)
        images = cut(rows["raw_value"].to_pylist())
        found = {
            "change_id" if name == "id" else name: rows[name]
            for name in rows.column_names
            if name != "raw_value"
        }
        found |= {
            "provenance": images.provenance,
            "transaction": images.transaction,
            "event": images.event,
            "state": images.state,
        }
        return {name: found[name] for name in HISTORY_COLUMNS}
