"""Fills the table of a version that no reader sees, from Spark's tasks.

Each task stages its rows and inserts them in one transaction; rows that an earlier attempt of the
task has inserted are skipped, so that a task may be retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import pyarrow as pa

from everstate.errors import BuildGivenUp
from everstate.postgres import identifier
from everstate.views.control import Control
from everstate.views.images import cut
from everstate.views.kinds.kind import identifiers
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.session import StoreSession, session
from everstate.views.sums import grouped
from everstate.views.tables import KeptTable

LoadedColumns = dict[str, pa.Array | pa.ChunkedArray]
_ROWS_AT_ONCE: Final = 100_000
"""Rows that a task holds in memory; more are inserted in several transactions."""


@dataclass(frozen=True)
class LoadTask:
    """A task that inserts rows of a batch into a version's table; pickled to the executors."""

    dsn: str
    schema_name: str
    table: KeptTable
    attempt: UUID

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Insert the rows of a task; gives one row with their number. Raises BuildGivenUp."""
        total, waiting = 0, list[pa.RecordBatch]()
        for batch in batches:
            waiting.append(batch)
            if sum(each.num_rows for each in waiting) >= _ROWS_AT_ONCE:
                total += self._add(waiting)
                waiting = []
        total += self._add(waiting)
        yield pa.RecordBatch.from_pydict({"rows": pa.array([total], pa.int64())})

    def _add(self, batches: Sequence[pa.RecordBatch]) -> int:
        filled = [batch for batch in batches if batch.num_rows]
        if not filled:
            return 0
        rows = pa.Table.from_batches(filled)
        columns: LoadedColumns = {name: rows[name] for name in rows.column_names}
        if self.table.merge == "sum":
            columns |= {name: _grouped(columns[name]) for name in self.table.groups}
        elif self.table.merge == "history":
            columns |= cut(columns.pop("raw_value").to_pylist())._asdict()
        stage_name = writes.stage_name(f"{self.table.name}_load")
        with session(self.dsn) as found:
            like = writes.like(self.schema_name, self.table.name)
            writes.prepare_stage(found, stage_name, like)
            stage = writes.stage_of(stage_name)
            with attempting(found, self.schema_name, self.table, self.attempt):
                writes.copy_rows(found, stage, columns)
                table, names = identifier(self.schema_name, self.table.name), identifiers(columns)
                insert = f"INSERT INTO {table} ({names}) SELECT {names} FROM {stage}"
                found.connection.execute(f"{insert} ON CONFLICT DO NOTHING".encode())
        added: int = rows.num_rows
        return added


@contextmanager
def attempting(
    found: StoreSession, schema_name: str, table: KeptTable, attempt: UUID
) -> Iterator[None]:
    """A transaction that holds an attempt to build a version; raises BuildGivenUp."""
    with found.connection.transaction():
        control = Control(found.connection, schema_name)
        if not control.is_attempt(table.view, table.version, attempt):
            raise BuildGivenUp(table.view, table.version)
        yield


def _grouped(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A group's values in the form in which the keeper writes them."""
    return grouped(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)
