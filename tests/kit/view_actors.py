"""Actors of a simulation besides cores and views: another store, readers, and the publisher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import pyarrow as pa

from everstate.changes.tokens import Spot
from everstate.views.control import KEPT, LIVE, ViewVersion
from everstate.views.in_effect import in_effect
from everstate.views.kinds import ViewPlan
from everstate.views.publishing import stands_with_core
from everstate.views.tables import Core, KeptTable, Vector, planned_column
from everstate.views.trailing import Exceptions
from kit.view_memory import (
    MemoryDatabase,
    MemoryStore,
    MemoryTransaction,
    exceptions_in,
)
from kit.view_memory import MemoryTrailing as Trailing
from kit.view_memory_orders import LATEST, vector_of
from kit.view_orders import PLANNED, START, TABLES, Log, Logged, images_of, state_text

FOREIGN: Final = replace(TABLES["by_region"], view="mirror")
"""A trailing view in another store, which restoring the database does not reset."""
MIRRORED: Final = {FOREIGN.view: "by_region", "mirrored_rows": "open_orders"}
"""Views in another store, and the views here that have the same rows."""


UNREAD: Final = ("raw_key", "raw_headers", "recorded_at")
"""Columns of planned changes that a simulation leaves out."""


def _light_row(offset: int, record: Logged) -> dict[str, Any]:
    """One record as `planned_row`, with a message that has only its state."""
    row: dict[str, Any] = {"offset": offset, "raw_value": b"{", "reason": record.reason}
    if record.reason is not None:
        return row
    state = "null" if record.current is None else state_text(record.current)
    row |= {
        "raw_value": f'{{"currentEntityState":{state}}}'.encode(),
        "key": record.key,
        "version": record.version,
        "id": record.change_id,
        "kind": record.kind,
        "occurred_at": record.occurred_at,
        "schema_version": 1,
    }
    return row | images_of(record)


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
        self._images: list[Any] = []

    def light(self, records: Iterable[tuple[int, Logged]]) -> pa.Table:
        """Records as `view_orders.planned`, with numbers instead of row deltas.

        Only with the columns that a simulation reads. Arrow needs most of its time for structs,
        and a schedule copies each change many times.
        """
        rows = [_light_row(offset, record) for offset, record in records]
        columns = {
            name: pa.array([row.get(name) for row in rows], kind)
            for name, kind in PLANNED.items()
            if name not in UNREAD
        }
        for table in TABLES.values():
            for image in table.images:
                name = planned_column(table, image)
                first = len(self._images)
                self._images += (row.get(name) for row in rows)
                found = enumerate(self._images[first:], first)
                numbers = [None if value is None else number for number, value in found]
                columns[name] = pa.array(numbers, pa.int32())
        return pa.table(columns)

    def images(self, changes: pa.Table, column: str) -> list[Any]:
        """The row deltas of a planned column: a mapping for each change, or None."""
        numbers = changes[column].to_pylist()
        return [None if number is None else self._images[number] for number in numbers]

    def opened_trailing(self, core: Core, table: KeptTable, partition: int) -> Trailing:
        """A transaction of a trailing view, in the store that has its rows."""
        kind = self.foreign_class if table.view == FOREIGN.view else self.trailing_class
        return kind(self, core, table, partition)


class RepeatableReader:
    """A REPEATABLE READ transaction: rows of its start, but view names resolve as of now."""

    def __init__(self, database: MemoryDatabase) -> None:
        self.since, self.rows = database.commits, database.copied()
        self.checked: set[tuple[str, int]] = set()
        """Versions whose rows in this snapshot, which does not change, were right."""


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
        note(self._database, row, waits_for=None)

    def different_rows(self, seen: ViewVersion, row: ViewVersion, plan: ViewPlan) -> int:
        """Not used in simulations."""
        return 0

    def set_waits_for(self, row: ViewVersion, waits_for: str) -> None:
        """Record why the version is not published."""
        note(self._database, row, waits_for=waits_for)

    def point(self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan) -> bool:
        """Make this version the one that readers see."""
        table = self._database.table("view")
        if (row.name, row.version) not in table or not stands_with_core(self, row):
            return False
        now = self.seen(row.name)
        if (now and now.version) != (seen and seen.version):
            return False
        if now is not None:
            note(self._database, now, published=False, status=KEPT, undone=None)
            self.fell_behind(now)
        fresh: dict[str, Any] = {"published_at": START, "error": None, "waits_for": None}
        note(self._database, row, published=True, status=LIVE, **fresh)
        self._database.commits += 1
        return True


def note(database: MemoryDatabase, row: ViewVersion, **changed: Any) -> None:
    """Update a row of the registry, if it still exists."""
    table = database.table("view")
    if (found := table.get((row.name, row.version))) is not None:
        table[row.name, row.version] = replace(found, **changed)
