"""Views of orders in the store in memory, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from everstate.log.positions import Range
from everstate.views.tables import CORE_FINGERPRINT, Core, KeptTable, Row, latest_of, physical
from everstate.views.trailing import Exceptions
from kit.view_contract import KeptOrders
from kit.view_memory import (
    MemoryDatabase,
    MemoryStore,
    MemoryTransaction,
    exceptions_in,
)
from kit.view_oracle import OracleTables, in_order
from kit.view_orders import HISTORY, TABLES

LATEST = latest_of("order")


class KeptInMemory(KeptOrders):
    """Views of orders, each in version 1."""

    def __init__(self, store: type[MemoryStore] = MemoryStore) -> None:
        self._class = store
        self.reset(1)

    @property
    def under_test(self) -> MemoryStore:
        """The store."""
        return self._store

    def reset(self, partitions: int) -> None:
        """Start again with empty views."""
        self._store = self._class(MemoryDatabase())
        open_positions(self._store.database, LATEST, 1, CORE_FINGERPRINT, range(partitions))
        for table in (HISTORY, *TABLES.values()):
            place = (table.view, table.version, table.fingerprint)
            open_positions(self._store.database, *place, range(partitions))

    def tables(self) -> OracleTables:
        """Rows that readers see, and the account of all records."""
        return tables_of(self._store.database.rows, dict.fromkeys((*TABLES, HISTORY.view), 1))

    def vector(self, table: KeptTable | None = None) -> dict[int, int]:
        """Positions of a view, or of the core."""
        name, version = (LATEST, 1) if table is None else (table.view, table.version)
        return vector_of(self._store.database.rows, name, version)

    def advance(self, core: Core, ranges: Mapping[int, Range]) -> None:
        """Advance the core, and the views that ride with it."""
        advance(self._store.database, core, ranges)

    def exceptions(self, partition: int, start: int, end: int) -> Exceptions:
        """The exceptions that the core recorded in a range."""
        return exceptions_in(MemoryTransaction(self._store.database), partition, start, end)

    def trim(self, below: Mapping[int, int]) -> int:
        """Drop notes before these offsets."""
        return trim(self._store.database, below)


def open_positions(
    database: MemoryDatabase,
    view: str,
    version: int,
    fingerprint: str,
    partitions: range,
    vector: Mapping[int, int] | None = None,
) -> None:
    """Create the positions of a version of a view."""
    for partition in partitions:
        offset = 0 if vector is None else vector[partition]
        database.table("position")[view, version, partition] = (offset, fingerprint)


def vector_of(rows: Mapping[str, Mapping[Any, Any]], view: str, version: int) -> dict[int, int]:
    """Positions of a version of a view."""
    places, found, partition = rows.get("position", {}), dict[int, int](), 0
    while (place := places.get((view, version, partition))) is not None:
        found[partition] = place[0]
        partition += 1
    return found


def advance(database: MemoryDatabase, core: Core, ranges: Mapping[int, Range]) -> None:
    """Advance a core, and riders at the same position, over ranges without records (V8)."""
    positions = database.table("position")
    for partition, span in ranges.items():
        before, _ = positions[core.view, core.version, partition]
        if ("position", core.view, core.version, partition) in database.locks:
            continue
        if not span.start <= before < span.end:
            continue
        moved = [(core.view, core.version, CORE_FINGERPRINT)]
        moved += [(each.view, each.version, each.fingerprint) for each in core.riders]
        for view, version, fingerprint in moved:
            place = (view, version, partition)
            is_free = ("position", *place) not in database.locks
            if is_free and positions.get(place) == (before, fingerprint):
                positions[place] = (span.end, fingerprint)


def trim(database: MemoryDatabase, below: Mapping[int, int]) -> int:
    """Drop the contents of changes that were released before these offsets (V3, V4)."""
    held = database.table("held")
    passed = [
        place
        for place, row in held.items()
        if row.change.num_rows
        and row.released_at is not None
        and row.released_at < below.get(place[0], 0)
    ]
    for place in passed:
        held[place] = replace(held[place], change=held[place].change.slice(0, 0))
    return len(passed)


def tables_of(rows: Mapping[str, Mapping[Any, Any]], versions: Mapping[str, int]) -> OracleTables:
    """Rows that readers see of some versions of the order views, in a state of a database."""
    counts = [tuple(map(int, each)) for each in rows.get("counters", {}).values()]
    account = [sum(each) for each in zip(*counts, strict=True)] or [0, 0, 0, 0]
    latest, history, by_region, totals, open_orders = (
        shown_of(rows, view, versions.get(view, 1)) for view in SHOWN
    )
    return OracleTables(latest, history, by_region, totals, open_orders, *account)


def shown_of(rows: Mapping[str, Mapping[Any, Any]], view: str, version: int) -> list[Row]:
    """Rows that readers see of a version of one of the order views."""
    return SHOWN[view](rows.get(physical(view, version), {}))


def _latest(rows: Mapping[Any, Any]) -> list[Row]:
    return in_order(
        (key, version, kind, moment, _json(state))
        for key, (version, _, moment, kind, state) in rows.items()
    )


def _history(rows: Mapping[Any, Any]) -> list[Row]:
    return in_order(
        (*place, kind, moment, _json(state)) for place, (_, kind, moment, state) in rows.items()
    )


def _by_region(rows: Mapping[Any, Any]) -> list[Row]:
    return in_order(
        (region, n, total if amounts else None, _average(quantity, counted), counted)
        for region, (n, total, amounts, quantity, counted) in _summed(rows).items()
        if n
    )


def _totals(rows: Mapping[Any, Any]) -> list[Row]:
    (n, quantity, counted) = _summed(rows).get(None, (0, 0, 0))
    return [(n, quantity if counted else None)]


def _open_orders(rows: Mapping[Any, Any]) -> list[Row]:
    return in_order((*values, key) for key, (_, *values) in rows.items())


SHOWN: Final[Mapping[str, Callable[[Mapping[Any, Any]], list[Row]]]] = {
    LATEST: _latest,
    HISTORY.view: _history,
    "by_region": _by_region,
    "totals": _totals,
    "open_orders": _open_orders,
}
"""Views of orders, in the order of the oracle's tables."""


def _summed(rows: Mapping[Any, Any]) -> dict[Any, Row]:
    """Sums over shards, by the group (``None`` where there are no groups)."""
    found: dict[Any, Row] = {}
    for (*group, _), sums in rows.items():
        place = group[0] if group else None
        before = found.get(place, (0,) * len(sums))
        found[place] = tuple(old + new for old, new in zip(before, sums, strict=True))
    return found


def _average(total: Any, count: int) -> Decimal | None:
    return round(Decimal(total) / count, 8) if count else None


@lru_cache(maxsize=4096)
def _json(state: str | None) -> Any:
    return None if state is None else json.loads(state)
