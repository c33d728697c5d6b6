"""A store of views in memory, with transactions: for the contract and for simulations.

It takes the same batches as a real store and gives the same guarantees. Each call may let other
actors run first (``between``), by which a simulation interleaves transactions; a transaction that
would have to wait for a lock raises :class:`LockTaken` instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Final

import pyarrow as pa

from everstate.errors import HeldOverflow, PositionMoved, ViewFailed
from everstate.views.batch import Batch
from everstate.views.core import Applied, Failure, Held, Refused
from everstate.views.gate import GateRow, HeldRow, Ints, Keys
from everstate.views.misfits import MisfitCount
from everstate.views.tables import (
    CORE_FINGERPRINT,
    Core,
    KeptTable,
    Merge,
    Sum,
    planned_column,
)
from everstate.views.trailing import Exceptions
from kit.changes import state_text

_GONE: Final = object()


class LockTaken(Exception):
    """Another transaction holds a lock for which this one would wait."""


@dataclass
class MemoryDatabase:
    """Committed rows: table → key → row. Rows are never changed, only replaced."""

    rows: dict[str, dict[Any, Any]] = field(default_factory=dict)
    locks: dict[Any, object] = field(default_factory=dict)
    commits: int = 0
    """Number of committed transactions; identifies the moment of a snapshot."""
    written: Counter[str] = field(default_factory=Counter)
    """Number of transactions that have written to a table."""

    def table(self, name: str) -> dict[Any, Any]:
        """Rows of a table by key."""
        return self.rows.setdefault(name, {})

    def copied(self) -> dict[str, dict[Any, Any]]:
        """A copy of all present rows: a snapshot, or a backup."""
        return {name: copy(rows) for name, rows in self.rows.items()}


class MemoryTransaction:
    """Reads committed rows and its own writes; READ COMMITTED, with row locks."""

    def __init__(self, database: MemoryDatabase) -> None:
        self.database = database
        self.written: dict[str, dict[Any, Any]] = {}
        self._locked: list[Any] = []

    def get(self, table: str, key: Any) -> Any:
        """A row, ``None`` when there is none."""
        mine = self.written.get(table, {})
        found = mine[key] if key in mine else self.database.table(table).get(key, _GONE)
        return None if found is _GONE else found

    def items(self, table: str) -> list[tuple[Any, Any]]:
        """All rows of a table with their keys."""
        both = {**self.database.table(table), **self.written.get(table, {})}
        return [(key, row) for key, row in both.items() if row is not _GONE]

    def put(self, table: str, key: Any, row: Any) -> None:
        """Write a row."""
        self.written.setdefault(table, {})[key] = row

    def delete(self, table: str, key: Any) -> None:
        """Delete a row."""
        self.put(table, key, _GONE)

    def lock(self, key: Any) -> None:
        """Lock a row until the end; raises LockTaken when another transaction holds it."""
        if self.database.locks.setdefault(key, self) is not self:
            raise LockTaken(str(key))
        self._locked.append(key)

    def is_free(self, key: Any) -> bool:
        """Whether no other transaction holds a row's lock."""
        return self.database.locks.get(key, self) is self

    def savepoint(self) -> dict[str, dict[Any, Any]]:
        """The writes so far, for :meth:`rollback_to`."""
        return {name: copy(rows) for name, rows in self.written.items()}

    def rollback_to(self, savepoint: dict[str, dict[Any, Any]]) -> None:
        """Discard later writes."""
        self.written = savepoint

    def commit(self) -> None:
        """Make the writes visible to others."""
        self.database.commits += 1
        for name, rows in self.written.items():
            table = self.database.table(name)
            self.database.written[name] += 1
            for key, row in rows.items():
                if row is _GONE:
                    table.pop(key, None)
                else:
                    table[key] = row
        self.end()

    def end(self) -> None:
        """Release the locks; uncommitted writes are discarded."""
        self.written = {}
        for key in self._locked:
            self.database.locks.pop(key, None)
        self._locked = []


@dataclass(frozen=True)
class HeldChange:
    """A change that is held, or was held and released."""

    offset: int
    change_id: str
    change: pa.Table
    """Empty after the change was trimmed."""
    released_at: int | None


class RefusesView(Exception):
    """A view's table refuses a change, or its lock was not available in time."""


class Opened:
    """Common base of transactions of cores and of trailing views."""

    def __init__(self, store: MemoryStore, core: Core, partition: int) -> None:
        self.store, self.core, self.partition = store, core, partition
        self.transaction = MemoryTransaction(store.database)

    def position_of(self, view: str, version: int) -> tuple[int, str] | None:
        """Next offset and fingerprint of a view's position."""
        found: tuple[int, str] | None = self.transaction.get(
            "position", (view, version, self.partition)
        )
        return found

    def swap(self, view: str, version: int, fingerprint: str, start: int, end: int) -> bool:
        """Compare and swap a position, which stays locked until the end (C11, V10)."""
        place = (view, version, self.partition)
        self.transaction.lock(("position", *place))
        if self.position_of(view, version) != (start, fingerprint):
            return False
        self.transaction.put("position", place, (end, fingerprint))
        return True

    def merge(self, table: KeptTable, batch: Batch) -> None:
        """Merge a batch into a view's table; raises RefusesView."""
        reason = self.store.refuses(table, self.partition, batch)
        if reason is not None:
            raise RefusesView(reason)
        MERGES[table.merge](self, table, batch)


class MemoryCore(Opened):
    """One transaction of a core; see :class:`everstate.views.core.CoreTransaction`."""

    def take(self, start: int, end: int) -> bool:
        """Compare and swap the core's position (C11)."""
        self.store.between("take")
        return self.swap(self.core.view, self.core.version, CORE_FINGERPRINT, start, end)

    def _held(self) -> list[tuple[tuple[str, int], HeldChange]]:
        return [
            ((key, version), row)
            for (partition, key, version), row in self.transaction.items("held")
            if partition == self.partition and row.released_at is None
        ]

    def held_keys(self) -> set[str]:
        """Keys with held changes."""
        self.store.between("held_keys")
        return {key for (key, _), _ in self._held()}

    def held(self, keys: Iterable[str]) -> dict[str, dict[int, HeldRow]]:
        """Held changes of some keys."""
        wanted, found = set(keys), dict[str, dict[int, HeldRow]]()
        for (key, version), row in self._held():
            if key in wanted:
                found.setdefault(key, {})[version] = HeldRow(row.change_id, row.change)
        return found

    def held_at(self, offsets: Iterable[int]) -> list[tuple[tuple[str, int], pa.Table]]:
        """Held changes that were read at some offsets."""
        wanted = set(offsets)
        return [(key, row.change) for key, row in self._held() if row.offset in wanted]

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        """Gate rows of keys whose first change has not the next version, or an earlier time."""
        self.store.between("gates")
        times = keys.changes["occurred_at"].to_pylist()
        found = {}
        for key, version, row in zip(
            keys.names.to_pylist(), first.tolist(), keys.firsts.tolist(), strict=True
        ):
            gate = self.transaction.get(self.core.table, key)
            newest = 0 if gate is None else gate[0]
            if newest != version - 1 or (gate is not None and gate[2] > times[row]):
                found[key] = GateRow() if gate is None else GateRow(*gate[:3])
        return found

    def ids(self, versions: Iterable[tuple[str, int]]) -> Mapping[tuple[str, int], str]:
        """Ids of applied versions, if there is a history that has them."""
        if self.core.ids is None:
            return {}
        rows = {place: self.transaction.get(self.core.ids.name, place) for place in versions}
        return {place: row[0] for place, row in rows.items() if row is not None}

    def unstorable(self, changes: pa.Table) -> dict[int, str]:
        """Reasons of readable changes that no table can hold."""
        offsets = changes["offset"].to_pylist()
        return {
            offset: reason
            for offset in offsets
            if (reason := self.store.unstorable(self.partition, offset)) is not None
        }

    def write_latest(self, batch: Batch) -> None:
        """Write the newest change of each key to `latest`."""
        changes = batch.changes.take(batch.lasts)
        for offset in changes["offset"].to_pylist():
            if (reason := self.store.unstorable(self.partition, offset)) is not None:
                raise Refused(offset, reason)
        write_latest(self, self.core.table, changes, batch.as_of.take(batch.lasts))

    def write_next(self, batch: Batch) -> Mapping[str, datetime] | None:
        """Like `write_latest`, only if the first change of every key follows the stored one."""
        keys = batch.keys
        first = keys.versions[keys.firsts]
        gates = self.gates(keys, first)
        following = dict(zip(keys.names.to_pylist(), (first - 1).tolist(), strict=True))
        if any(gate.version != following[key] for key, gate in gates.items()):
            return None
        floors = {key: gate.as_of for key, gate in gates.items() if gate.as_of is not None}
        try:
            self.write_latest(batch.after(floors))
        except Refused:
            return None
        return floors

    def ride(
        self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
    ) -> list[Failure]:
        """Advance the riders whose position is ``start`` and write them; failing ones stay."""
        failures = []
        for rider in riders:
            self.store.between("ride")
            place = ("position", rider.view, rider.version, self.partition)
            if not self.transaction.is_free(place):
                continue
            before = self.transaction.savepoint()
            try:
                moved = self.swap(rider.view, rider.version, rider.fingerprint, start, end)
                if moved and batch.changes.num_rows:
                    self.merge(rider, batch)
            except RefusesView as refusal:
                self.transaction.rollback_to(before)
                failures.append(Failure(rider.view, rider.version, str(refusal)))
        return failures

    def hold(self, held: Sequence[Held]) -> None:
        """Store held changes; raises HeldOverflow."""
        for each in held:
            key, version, offset, change_id = (
                each.change[name][0].as_py() for name in ("key", "version", "offset", "id")
            )
            row = HeldChange(offset, change_id, each.change, each.released_at)
            self.transaction.put("held", (self.partition, key, version), row)
        rows = [row for _, row in self.transaction.items("held") if row.released_at is None]
        if held and len(rows) > self.core.held_max:
            raise HeldOverflow(self.core.entity, len(rows), self.core.held_max)

    def release(self, released: Sequence[tuple[str, int, int]]) -> None:
        """Record which offsets released held changes."""
        for key, version, by in released:
            place = (self.partition, key, version)
            row = self.transaction.get("held", place)
            change = HeldChange(row.offset, row.change_id, row.change, by)
            self.transaction.put("held", place, change)

    def forget(self, versions: Sequence[tuple[str, int]]) -> None:
        """Drop held changes that are dead."""
        for key, version in versions:
            self.transaction.delete("held", (self.partition, key, version))

    def dead_letter(self, changes: pa.Table, reasons: Sequence[tuple[int, str]]) -> None:
        """Dead-letter records that cannot be read or applied."""
        for row, reason in reasons:
            offset = changes["offset"][row].as_py()
            self.transaction.put("dead", (self.partition, offset), reason)

    def note_duplicates(self, runs: Sequence[tuple[int, int]]) -> None:
        """Record ranges of duplicates."""
        for first, last in runs:
            self.transaction.put("duplicate", (self.partition, first), last)

    def note_misfits(self, found: Sequence[MisfitCount]) -> None:
        """Add to the counts of values that do not fit the model."""
        for name, version, count, first, last in found:
            place = (self.partition, name, version)
            known = self.transaction.get("misfit", place) or (0, first, last)
            counts = (known[0] + count, min(known[1], first), max(known[2], last))
            self.transaction.put("misfit", place, counts)

    def count(self, applied: Applied) -> None:
        """Add to the account (law 7)."""
        self.store.between("count")
        waiting = applied.held - applied.released
        gained = (applied.applied, applied.duplicate, waiting, applied.dead)
        before = self.transaction.get("counters", self.partition) or (0, 0, 0, 0)
        counts = tuple(old + new for old, new in zip(before, gained, strict=True))
        self.transaction.put("counters", self.partition, counts)

    def commit(self, end: int) -> None:
        """Commit."""
        self.store.between("commit")
        self.transaction.commit()


class MemoryTrailing(Opened):
    """One transaction of a trailing view; see :class:`everstate.views.trailing`."""

    def __init__(self, store: MemoryStore, core: Core, table: KeptTable, partition: int) -> None:
        super().__init__(store, core, partition)
        self.table = table

    def core_position(self, *, hold: bool) -> int:
        """The core's position; ``hold``: locks it until this transaction ends (V7)."""
        self.store.between("core_position")
        found = self.position_of(self.core.view, self.core.version)
        if found is None or found[1] != CORE_FINGERPRINT:
            raise PositionMoved(f"{self.core.view} has no position of this plan.")
        if hold:
            self.transaction.lock(("position", self.core.view, self.core.version, self.partition))
        return found[0]

    def take(self, start: int, end: int) -> bool:
        """Compare and swap the view's position (V10); it has not caught up before this."""
        self.store.between("take")
        table = self.table
        self.transaction.delete("met", (table.view, table.version))
        return self.swap(table.view, table.version, table.fingerprint, start, end)

    def exceptions(self, start: int, end: int) -> Exceptions:
        """The exceptions that the core recorded in a range."""
        self.store.between("exceptions")
        return exceptions_in(self.transaction, self.partition, start, end)

    def floors(self, batch: Batch) -> Mapping[str, datetime]:
        """As-of times before the range; only a history has them."""
        found: dict[str, datetime] = {}
        if self.table.merge == "history":
            names = set(batch.keys.names.to_pylist())
            for (key, _), row in self.transaction.items(self.table.name):
                if key in names:
                    found[key] = max(row[2], found.get(key, row[2]))
        return found

    def write(self, batch: Batch) -> None:
        """Merge the batch into the view's table."""
        self.store.between("write")
        try:
            self.merge(self.table, batch)
        except RefusesView as refusal:
            raise ViewFailed(self.table.view, str(refusal)) from refusal

    def commit(self, end: int) -> None:
        """Commit."""
        self.store.between("commit")
        self.transaction.commit()


class MemoryStore:
    """Cores and views in memory."""

    core_class: ClassVar[type[MemoryCore]] = MemoryCore
    trailing_class: ClassVar[type[MemoryTrailing]] = MemoryTrailing

    def __init__(self, database: MemoryDatabase | None = None) -> None:
        self.database = database or MemoryDatabase()
        self.between: Callable[[str], None] = lambda _call: None
        """Called before each call of a transaction, with its name."""
        self.refuses: Callable[[KeptTable, int, Batch], str | None] = lambda *_: None
        """Returns why a view's table refuses a partition's batch; ``None``: it does not."""
        self.unstorable: Callable[[int, int], str | None] = lambda _partition, _offset: None
        """Returns why no table can hold the change at an offset; ``None``: they can."""

    def images(self, changes: pa.Table, column: str) -> list[Any]:
        """The row deltas of a planned column: a mapping for each change, or None."""
        found: list[Any] = changes[column].to_pylist()
        return found

    @contextmanager
    def transaction(self, core: Core, partition: int) -> Iterator[MemoryCore]:
        """A transaction of a core."""
        opened = self.core_class(self, core, partition)
        try:
            yield opened
        finally:
            opened.transaction.end()

    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[MemoryTrailing]:
        """A transaction of a trailing view."""
        opened = self.opened_trailing(core, table, partition)
        try:
            yield opened
        finally:
            opened.transaction.end()

    def opened_trailing(self, core: Core, table: KeptTable, partition: int) -> MemoryTrailing:
        """A transaction of a trailing view that has begun."""
        return self.trailing_class(self, core, table, partition)

    def position(self, core: Core, partition: int) -> int | None:
        """The core's position in a partition."""
        found = self.database.table("position").get((core.view, core.version, partition))
        return None if found is None or found[1] != CORE_FINGERPRINT else int(found[0])


def exceptions_in(
    transaction: MemoryTransaction, partition: int, start: int, end: int
) -> Exceptions:
    """The exceptions that a core recorded in a range."""
    held = [row for (p, _, _), row in transaction.items("held") if p == partition]
    return Exceptions(
        frozenset(
            offset
            for (p, offset), _ in transaction.items("dead")
            if p == partition and start <= offset < end
        ),
        tuple(
            (first, last)
            for (p, first), last in transaction.items("duplicate")
            if p == partition and last >= start and first < end
        ),
        frozenset(row.offset for row in held if start <= row.offset < end),
        {
            row.offset: row.released_at
            for row in held
            if row.released_at is not None and start <= row.released_at < end
        },
    )


def _states(changes: pa.Table) -> list[str | None]:
    """JSON text of the state in each message; None for a deletion."""
    texts = (state_text(raw).decode() for raw in changes["raw_value"].to_pylist())
    return [None if text == "null" else text for text in texts]


def write_latest(opened: Opened, name: str, changes: pa.Table, times: pa.Array) -> None:
    """Write the newest change of each key, where it is newer: version, id, time, kind, state."""
    states = _states(changes)
    columns = (changes[column].to_pylist() for column in ("key", "version", "id", "kind"))
    for key, version, change_id, kind, moment, state in zip(
        *columns, times.to_pylist(), states, strict=True
    ):
        before = opened.transaction.get(name, key)
        if before is None or before[0] < version:
            opened.transaction.put(name, key, (version, change_id, moment, kind, state))


def _rows(opened: Opened, table: KeptTable, batch: Batch) -> None:
    changes = batch.changes.take(batch.lasts)
    images = opened.store.images(changes, planned_column(table, "current"))
    for key, version, image in zip(
        changes["key"].to_pylist(), changes["version"].to_pylist(), images, strict=True
    ):
        before = opened.transaction.get(table.name, key)
        if image is None:
            opened.transaction.delete(table.name, key)
        elif before is None or before[0] < version:
            values = tuple(image[name] for name in table.columns)
            opened.transaction.put(table.name, key, (version, *values))


def _sums(opened: Opened, table: KeptTable, batch: Batch) -> None:
    # In Python: `sum_deltas` has tests of its own, and costs a schedule of small batches most of
    # its time.
    changed: dict[Any, dict[str, Any]] = {}
    for image in table.images:
        sign = -1 if image == "original" else 1
        for row in opened.store.images(batch.changes, planned_column(table, image)):
            if row is None:
                continue
            sums = changed.setdefault(tuple(row[name] for name in table.groups), {})
            for name, kind in table.sums:
                value = row.get(name, 1)
                if value is not None:
                    value = value * sign if kind in ("count", "sum") else value
                    sums[name] = _together(kind, sums.get(name), value)
    for group, added in changed.items():
        place = (*group, opened.partition)
        before = opened.transaction.get(table.name, place) or (None,) * len(table.sums)
        sums_now = tuple(
            _together(kind, old, added.get(name, 0 if kind in ("count", "sum") else None))
            for old, (name, kind) in zip(before, table.sums, strict=True)
        )
        if any(sums_now):
            opened.transaction.put(table.name, place, sums_now)
        elif before != sums_now:
            opened.transaction.delete(table.name, place)


def _together(kind: Sum, old: Any, new: Any) -> Any:
    if old is None or new is None:
        return new if old is None else old
    if kind in ("count", "sum"):
        return old + new
    return max(old, new) if kind == "max" else min(old, new)


def _appended(opened: Opened, table: KeptTable, batch: Batch) -> None:
    images = opened.store.images(batch.changes, planned_column(table, "change"))
    places = (batch.changes[name].to_pylist() for name in ("key", "version"))
    for key, version, image in zip(*places, images, strict=True):
        if image is not None:
            assert opened.transaction.get(table.name, (key, version)) is None, "a version twice"
            opened.transaction.put(table.name, (key, version), tuple(image.values()))


def _changes(opened: Opened, table: KeptTable, batch: Batch) -> None:
    columns = (batch.changes[name].to_pylist() for name in ("key", "version", "id", "kind"))
    for key, version, change_id, kind, moment, state in zip(
        *columns, batch.as_of.to_pylist(), _states(batch.changes), strict=True
    ):
        assert opened.transaction.get(table.name, (key, version)) is None, "a version twice"
        opened.transaction.put(table.name, (key, version), (change_id, kind, moment, state))


MERGES: Final[Mapping[Merge, Callable[[Any, Any, Batch], None]]] = {
    "row": _rows,
    "sum": _sums,
    "append": _appended,
    "history": _changes,
}
