"""Keeps views in a store of rows with versions, with their positions in the control tables.

The position is moved after the rows are written: a kill in between writes them again, and an older
write never wins. No transaction of the control tables is open while the store is called. A task
has the right to write to a version meanwhile, and a proof takes it while it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final, ParamSpec, Protocol, TypeVar, cast
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from everstate.errors import (
    ContradictoryQuery,
    InvalidView,
    PositionMoved,
    StoreSilent,
    ViewFailed,
)
from everstate.errors.base import described
from everstate.log.attempt import TookTooLong, within
from everstate.views.batch import Batch
from everstate.views.kinds.kind import ViewPlan
from everstate.views.policies import taken
from everstate.views.rows import added_rows, newest_rows, period_rows
from everstate.views.stores.store import LoadRows, SearchedStore, ViewStore
from everstate.views.tables import Core, KeptTable, physical
from everstate.views.trailing import Exceptions, TrailingStore, TrailingTransaction

_P = ParamSpec("_P")
_R = TypeVar("_R")
_KEY, _VERSION = "_key", "_version"
_SLICE_ROWS: Final = 5_000
_UNREACHED: Final = frozenset({"ConnectionError", "TimeoutError", "TransportError", "Unavailable"})
"""What clients call the classes of errors in which a server did not answer at all."""
_ROWS: Final = {"row": newest_rows, "append": added_rows, "periods": period_rows}
_SLICES: Final[dict[str, int]] = {}
"""Store → how many rows a call of this process writes to it, after one took too long."""


class HomeStore(TrailingStore, Protocol):
    """The store of the cores, with the positions of all views."""

    def attempting(self, table: KeptTable, attempt: UUID) -> AbstractContextManager[object]:
        """Hold an attempt to build a version; raises BuildGivenUp for another than the present."""

    def writing(self, table: KeptTable, partition: int) -> AbstractContextManager[bool]:
        """Let nobody else write rows of a version to another store; false while another does."""


@dataclass(frozen=True)
class VersionedStore:
    """A store of rows with versions, as a store of views.

    Each attempt to build a version has a table of its own, which is never emptied: a call that was
    given up may be carried out at any time later, and then changes rows that nobody reads.
    """

    name: str
    home: HomeStore
    kept: ViewStore
    attempt: str = ""

    def install(self, plan: ViewPlan, version: int, types: Mapping[str, pa.DataType]) -> None:
        """Create a version without rows; raises InvalidView."""
        table = self._named(plan.ruled_table(version))
        known = {"key": pa.string(), **types}
        outputs = [(output, known[column]) for output, column in table.outputs]
        schema = pa.schema([(_KEY, pa.string()), (_VERSION, pa.int64()), *outputs])
        self._call(plan.name, self.kept.install, table, schema)

    def drop(self, name: str, version: int) -> None:
        """Drop a version."""
        self._call(name, self.kept.drop, physical(name, version, self.attempt))

    def show(self, name: str, version: int) -> None:
        """Let readers see a version; idempotent."""
        self._call(name, self.kept.publish, name, physical(name, version, self.attempt))

    def drop_reader(self, name: str) -> None:
        """Let readers see nothing under a name."""
        self._call(name, self.kept.unpublish, name)

    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[RowsTrailing]:
        """Writes rows to this store, and moves the position at the home; for one task at a time."""
        with self.home.writing(table, partition) as is_alone:
            if not is_alone:
                raise PositionMoved(f"another task or a proof has partition {partition}")
            yield RowsTrailing(self, core, table, partition)

    def loader(self, table: KeptTable, attempt: UUID) -> LoadRows:
        """The task that fills a version."""
        return partial(self._load, table, attempt)

    def _load(
        self, table: KeptTable, attempt: UUID, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Write the rows of a task; gives one row with their number. Raises BuildGivenUp."""
        total = 0
        for batch in batches:
            with self.home.attempting(table, attempt):
                pass  # and hold nothing of it while the store is called
            self.write(table, dict(zip(batch.schema.names, batch.columns, strict=True)))
            total += batch.num_rows
        yield pa.RecordBatch.from_pydict({"rows": pa.array([total], pa.int64())})

    def write(self, table: KeptTable, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> None:
        """Write rows in the columns of a version's table; some may not be `present` any more."""
        columns = dict(columns)
        present = columns.pop("present", None)
        shown = {_KEY: columns["key"], _VERSION: columns["version"]}
        shown |= {output: columns[column] for output, column in table.outputs}
        rows = pa.table(shown)
        gone = rows.slice(0, 0) if present is None else rows.filter(pc.invert(present))
        rows = rows if present is None else rows.filter(present)
        of_gone = [_KEY, _VERSION, *(["valid_from"] if table.merge == "periods" else [])]
        self._write_in_slices(self._named(table), rows, gone.select(of_gone))

    def _write_in_slices(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write some thousand rows a call; half as many in each call after one took too long.

        Twice as many again after full calls that were so quick that those will end in time.
        """
        end, most = max(rows.num_rows, gone.num_rows), _SLICES.get(self.name, _SLICE_ROWS)
        longest_s = 0.0
        for start in range(0, end, most):
            part, begun = (rows.slice(start, most), gone.slice(start, most)), time.monotonic()
            try:
                self._call(table.view, self.kept.write, table, *part)
            except ViewFailed as failed:
                if isinstance(failed.__cause__, TookTooLong):
                    _SLICES[self.name] = max(1, most // 2)
                raise
            longest_s = max(longest_s, time.monotonic() - begun)
        if most <= end and longest_s < self.kept.call_s_max / 4:
            _SLICES[self.name] = min(2 * most, _SLICE_ROWS)

    def read(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a version in the columns of its table, of which ``schema`` has some.

        In the types of ``schema``. A column may be stored under several names: rows come again in
        those that differ. Whoever compares them holds the version's positions.
        """
        names: dict[str, list[str]] = {"key": [_KEY], "version": [_VERSION]}
        for output, column in table.outputs:
            names.setdefault(column, []).append(output)
        shown = pa.schema([field.with_name(n) for field in schema for n in names[field.name]])
        batches = iter(self._call(table.view, self.kept.rows, self._named(table), shown))
        while (batch := self._call(table.view, next, batches, None)) is not None:
            stored = [[batch[name] for name in names[field.name]] for field in schema]
            first = [each[0] for each in stored]
            yield pa.RecordBatch.from_arrays(first, schema=schema)
            for place in range(1, max(map(len, stored))):
                others = [each[min(place, len(each) - 1)] for each in stored]
                if others != first:
                    yield pa.RecordBatch.from_arrays(others, schema=schema)

    def search(
        self, table: KeptTable, schema: pa.Schema, words: str, limit: int, *, fresh: bool
    ) -> pa.Table:
        """The best rows with some words, by a :class:`SearchedStore`; raises ContradictoryQuery."""
        if not hasattr(self.kept, "search"):
            raise ContradictoryQuery(f"{table.view} is in the store {self.name}, without a search.")
        kept = cast(SearchedStore, self.kept)
        call = partial(kept.search, fresh=fresh)
        return self._call(table.view, call, self._named(table), schema, words, limit)

    def _named(self, table: KeptTable) -> KeptTable:
        return replace(table, attempt=self.attempt)

    def _call(
        self, view: str, function: Callable[_P, _R], *given: _P.args, **named: _P.kwargs
    ) -> _R:
        """Call the store; raises its refusals, StoreSilent, and ViewFailed for all other errors."""
        try:
            return within(self.kept.call_s_max, function, *given, **named)
        except (InvalidView, ViewFailed):
            raise
        except TookTooLong as cause:
            reason = f"it did not answer within {self.kept.call_s_max:g} s"
            raise StoreSilent(view, f"the store {self.name} failed: {reason}") from cause
        except Exception as cause:
            # The client's own errors, of a store that is down, full or read-only.
            is_silent = not _UNREACHED.isdisjoint(kind.__name__ for kind in type(cause).__mro__)
            reason = described(cause)
        failed = StoreSilent if is_silent else ViewFailed
        raise failed(view, f"the store {self.name} failed: {reason}")


class RowsTrailing:
    """A transaction of a trailing view: rows, and then its position; see `views.trailing`.

    Each of its calls has a transaction of its own at the home, which ends before rows are written.
    """

    def __init__(self, store: VersionedStore, core: Core, table: KeptTable, partition: int) -> None:
        self.store, self.table = store, table
        self.home = partial(store.home.trailing, core, table, partition)
        self.start = 0

    def core_position(self, *, hold: bool) -> int:
        """The core's position; a core never waits for another store, so it is not held."""
        with self.home() as opened:
            return opened.core_position(hold=False)

    def take(self, start: int, end: int) -> bool:
        """True: :meth:`exceptions` and :meth:`commit` compare the position with ``start``."""
        self.start = start
        return True

    def exceptions(self, start: int, end: int) -> Exceptions:
        """The core's exceptions in a range; raises PositionMoved.

        The position is compared after they are read: the core trims those that it has passed.
        """
        with self.home() as opened:
            found = opened.exceptions(start, end)
            self._take(opened, end)  # which is rolled back
            return found

    def floors(self, batch: Batch) -> Mapping[str, datetime]:
        """None: as-of times are in the history."""
        return {}

    def write(self, batch: Batch) -> None:
        """Write the rows of the changes that the view takes; raises ViewFailed."""
        batch = taken(self.table, batch) if self.table.has_rules else batch
        if batch.changes.num_rows:
            self.store.write(self.table, _ROWS[self.table.merge](self.table, batch))

    def commit(self, end: int) -> None:
        """Compare and swap the position; raises PositionMoved, and then rows are written again."""
        with self.home() as opened:
            self._take(opened, end)
            opened.commit(end)

    def _take(self, opened: TrailingTransaction, end: int) -> None:
        if not opened.take(self.start, end):
            raise PositionMoved(f"{self.table.name} is not at offset {self.start:,} any more")
