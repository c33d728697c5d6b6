"""The PostgreSQL store of views as the contract and fault tests drive it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.log.positions import Range
from everstate.testing.view_contract import ORDER, TABLES, TYPES, VIEWS, Row
from everstate.views.control import Control, ViewVersion
from everstate.views.core import Applied, apply_range
from everstate.views.stores import PostgresStore, close_store, core_tables, view_tables
from everstate.views.tables import (
    CORE_FINGERPRINT,
    HISTORY_FINGERPRINT,
    Core,
    HistoryTable,
    KeptTable,
    history_of,
    latest_of,
)
from everstate.views.trailing import trail_range

HISTORY = HistoryTable(history_of("order"), 1)


@dataclass
class KeptViews:
    """The contract's views in a database; ``store`` may be a double with a planted defect."""

    dsn: str
    connection: psycopg.Connection[Any]
    store: type[PostgresStore] = PostgresStore
    schema_name: ClassVar[str] = "kept"

    @classmethod
    @contextmanager
    def installed(cls, dsn: str) -> Iterator[KeptViews]:
        """Install control tables and views; closes this thread's sessions afterwards."""
        with psycopg.connect(dsn, autocommit=True, options="-c TimeZone=UTC") as connection:
            connection.execute(f"SET search_path = {cls.schema_name}")
            control = Control(connection, cls.schema_name)
            control.install()
            tables = view_tables(control)
            with connection.transaction():
                core_tables(control, ORDER)
                tables.install(HISTORY.view, 1, None, {})
                tables.point(HISTORY.view, 1, None)
                for plan in VIEWS:
                    tables.install(plan.name, 1, plan, TYPES[plan.name])
                    tables.point(plan.name, 1, plan)
            try:
                yield cls(dsn, connection)
            finally:
                close_store(dsn)

    @property
    def control(self) -> Control:
        """The control tables."""
        return Control(self.connection, self.schema_name)

    def core(self, riders: Sequence[KeptTable] | None = None, *, held_max: int = 10_000) -> Core:
        """The core, with the history and all views riding, or with some."""
        every = (HISTORY, *TABLES.values())
        mine = every if riders is None else tuple(riders)
        return Core("order", "orders", mine, ids=HISTORY, held_max=held_max)

    def reset(self, partitions: int) -> None:
        """Empty views, positions at 0."""
        for table in self._tables():
            self.connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(table)))
        control = self.control
        latest = latest_of("order")
        control.add_version(ViewVersion(latest, 1, "order", {}, CORE_FINGERPRINT, published=True))
        control.open_core("order", range(partitions))
        offsets = dict.fromkeys(range(partitions), 0)
        for rider in self.core().riders:
            row = ViewVersion(rider.view, 1, "order", {}, rider.fingerprint, published=True)
            control.add_version(row)
            control.open_positions(rider.view, 1, "order", rider.fingerprint, offsets)

    def _tables(self) -> Sequence[str]:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        return [name for (name,) in self.connection.execute(query, (self.schema_name,))]

    def apply(
        self,
        partition: int,
        start: int,
        end: int,
        changes: pa.Table,
        *,
        core: Core | None = None,
    ) -> Applied:
        """Let the core judge a range, in the store under test."""
        store = self.store(self.dsn, self.schema_name)
        core = core or self.core()
        return apply_range(store, core, partition, Range(start, end), changes)

    def trail(
        self,
        table: KeptTable,
        partition: int,
        start: int,
        end: int,
        changes: pa.Table,
        *,
        meets: bool = False,
    ) -> Applied:
        """Let a view that is behind apply a range that the core has judged."""
        store = self.store(self.dsn, self.schema_name)
        given = Range(start, end)
        return trail_range(store, self.core(), table, partition, given, changes, meets=meets)

    def vector(self, table: KeptTable | None = None) -> dict[int, int]:
        """Positions of a view, or of the core."""
        if table is None:
            return self.control.core_vector("order")
        return self.control.vector(table.view, table.version)

    def query(self, select: str) -> list[Row]:
        """Rows of a query."""
        return self.connection.execute(select.encode()).fetchall()


def install_entity(
    connection: psycopg.Connection[Any],
    schema_name: str,
    entity_type: EntityType,
    vector: Mapping[int, int] | None = None,
    *,
    history: bool = True,
) -> Control:
    """What a keeper makes of an entity type without views, at some position; idempotent."""
    control, name = Control(connection, schema_name), entity_type.name
    control.install()
    tables = view_tables(control)
    kept = {latest_of(name): CORE_FINGERPRINT}
    with connection.transaction():
        core_tables(control, entity_type)
        if history:
            kept[history_of(name)] = HISTORY_FINGERPRINT
            tables.install(history_of(name), 1, None, {})
            tables.point(history_of(name), 1, None)
        for view, fingerprint in kept.items():
            control.add_version(ViewVersion(view, 1, name, {}, fingerprint, published=True))
            control.open_positions(view, 1, name, fingerprint, vector or {})
    return control
