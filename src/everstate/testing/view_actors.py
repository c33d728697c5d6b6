"""Actors of a simulation besides cores and views: another store, readers, and the publisher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from everstate.changes.tokens import Spot
from everstate.serving.in_effect import in_effect
from everstate.testing.view_memory import (
    MemoryDatabase,
    MemoryStore,
    MemoryTransaction,
    exceptions_in,
)
from everstate.testing.view_memory import MemoryTrailing as Trailing
from everstate.testing.view_memory_orders import LATEST, vector_of
from everstate.testing.view_orders import START, TABLES, Log, Logged
from everstate.views.control import KEPT, LIVE, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.publishing import stands_with_core
from everstate.views.tables import Core, KeptTable, Vector
from everstate.views.trailing import Exceptions

FOREIGN: Final = replace(TABLES["by_region"], view="mirror")
"""A trailing view in another store, which restoring the database does not reset."""


class ForeignTrailing(Trailing):
    """A transaction of a view in another store, which has its rows and position.

    The core's notes are in the core's own database.
    """

    def __init__(self, store: Any, core: Core, table: KeptTable, partition: int) -> None:
        super().__init__(store, core, table, partition)
        self.home, self.transaction = self.transaction, MemoryTransaction(store.elsewhere)

    def core_position(self, *, hold: bool) -> int:
        """The core's position, in its own database."""
        self.store.between("core_position")
        return int(self.home.get("position", (LATEST, 1, self.partition))[0])

    def exceptions(self, start: int, end: int) -> Exceptions:
        """The exceptions that the core recorded in its own database."""
        self.store.between("exceptions")
        return exceptions_in(self.home, self.partition, start, end)


class TwoStores(MemoryStore):
    """The store of a simulation; views of the other store have a database of their own."""

    foreign_class: ClassVar[type[Trailing]] = ForeignTrailing

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere = MemoryDatabase()

    def opened_trailing(self, core: Core, table: KeptTable, partition: int) -> Trailing:
        """A transaction of a trailing view, in the store that has its rows."""
        kind = self.foreign_class if table.view == FOREIGN.view else self.trailing_class
        return kind(self, core, table, partition)


class RepeatableReader:
    """A REPEATABLE READ transaction: rows of its start, but view names resolve as of now."""

    def __init__(self, database: MemoryDatabase) -> None:
        self.since, self.rows = database.commits, database.copied()


class Subscriber:
    """Follows the accepted changes from a vector on, and may stop between any two changes."""

    def __init__(self, since: Vector) -> None:
        self.since = dict(since)
        self.spots = {partition: Spot(offset) for partition, offset in since.items()}
        self.given: list[Logged] = []

    def read(self, store: MemoryStore, partition: int, log: Log, end: int, most: int) -> None:
        """Read at most ``most`` of the changes that the core has accepted before an offset."""
        since = self.spots[partition]
        position, exceptions = self.judged(store, partition, since.next_offset, end)
        end = min(end, position)
        if end <= since.next_offset:
            return
        offsets = [o for o in sorted(log.records) if since.next_offset <= o < end]
        offsets += [offset for offset in exceptions.released if offset < since.next_offset]
        records = [log.records[offset] for offset in offsets]
        found = in_effect(records, offsets, since, end, exceptions, lambda record: record.version)
        for spot, record in found[:most]:
            self.given.append(record)
            self.spots[partition] = spot
        if len(found) <= most:
            self.spots[partition] = Spot(end)

    def judged(
        self, store: MemoryStore, partition: int, start: int, end: int
    ) -> tuple[int, Exceptions]:
        """The core's position and the exceptions recorded up to it, as of one moment (V1)."""
        position: int = store.database.table("position")[LATEST, 1, partition][0]
        up_to = max(start, min(end, position))
        return position, exceptions_in(MemoryTransaction(store.database), partition, start, up_to)


class MemoryPublisher:
    """A `views.publishing.Publisher`, the database interface of publishing, in memory."""

    def __init__(self, database: MemoryDatabase, readers: Sequence[RepeatableReader]) -> None:
        self._database, self._readers = database, readers

    def vectors(self, row: ViewVersion) -> tuple[Vector, Vector]:
        """Positions of the core and of a version."""
        rows = self._database.rows
        return vector_of(rows, LATEST, 1), vector_of(rows, row.name, row.version)

    def seen(self, name: str) -> ViewVersion | None:
        """The published version of a view, which readers see."""
        rows = self._database.table("view").values()
        return next((row for row in rows if row.name == name and row.published), None)

    def caught_up(self, row: ViewVersion) -> str | None:
        """A reader whose snapshot is older than the moment when the version caught up."""
        table = self._database.table("met")
        moment = table.setdefault((row.name, row.version), self._database.commits)
        return "a reader" if any(each.since < moment for each in self._readers) else None

    def fell_behind(self, row: ViewVersion) -> None:
        """Delete the moment when the version caught up with the core."""
        self._database.table("met").pop((row.name, row.version), None)

    def different_rows(self, seen: ViewVersion, row: ViewVersion, plan: ViewPlan) -> int:
        """Not used in simulations."""
        return 0

    def set_reason(self, row: ViewVersion, reason: str) -> None:
        """Record why the version is not published."""
        note(self._database, row, reason=reason)

    def point(self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan) -> bool:
        """Make this version the one that readers see."""
        table = self._database.table("view")
        if (row.name, row.version) not in table or not stands_with_core(self, row):
            return False
        now = self.seen(row.name)
        if (now and now.version) != (seen and seen.version):
            return False
        if now is not None:
            note(self._database, now, published=False, status=KEPT)
            self.fell_behind(now)
        note(self._database, row, published=True, published_at=START, status=LIVE, reason=None)
        self._database.commits += 1
        return True


def note(database: MemoryDatabase, row: ViewVersion, **changed: Any) -> None:
    """Update a row of the registry, if it still exists."""
    table = database.table("view")
    if (found := table.get((row.name, row.version))) is not None:
        table[row.name, row.version] = replace(found, **changed)
