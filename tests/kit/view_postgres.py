"""The PostgreSQL store of views for the contract and fault tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import psycopg
from psycopg import sql

from everstate.changes import EntityType
from everstate.log.positions import Range
from everstate.views.control import Control
from everstate.views.kinds import HistoryPlan, LatestPlan, ViewPlan
from everstate.views.stores import (
    PostgresViewStore,
    ViewTables,
    close_store,
    install_core,
    point_core,
)
from everstate.views.tables import Core, KeptTable, Row
from everstate.views.trailing import Exceptions
from everstate.views.versions import registered
from kit.view_contract import KeptOrders
from kit.view_oracle import OracleTables, in_order
from kit.view_orders import ORDER, TYPES, VIEWS


def core_tables(control: Control, entity_type: EntityType) -> None:
    """Create `latest` of an entity type and its readers' names; inside a transaction."""
    install_core(control, entity_type)
    point_core(control, entity_type)


PLANS = (HistoryPlan.of("order"), *VIEWS)


@dataclass
class PostgresKeptOrders(KeptOrders):
    """The contract's views in a database; ``store`` may be a test double with a defect."""

    dsn: str
    connection: psycopg.Connection[Any]
    store: type[PostgresViewStore] = PostgresViewStore
    schema_name: ClassVar[str] = "kept"

    @classmethod
    @contextmanager
    def installed(cls, dsn: str) -> Iterator[PostgresKeptOrders]:
        """Install control tables and views; closes this thread's sessions afterwards."""
        with psycopg.connect(dsn, autocommit=True, options="-c TimeZone=UTC") as connection:
            connection.execute(f"SET search_path = {cls.schema_name}")
            control = Control(connection, cls.schema_name)
            control.install()
            tables = ViewTables(control)
            with connection.transaction():
                core_tables(control, ORDER)
                for plan in PLANS:
                    tables.install(plan, 1, TYPES.get(plan.name, {}))
                    tables.point(plan, 1)
            try:
                yield cls(dsn, connection)
            finally:
                close_store(dsn)

    @property
    def control(self) -> Control:
        """The control tables."""
        return Control(self.connection, self.schema_name)

    def reset(self, partitions: int) -> None:
        """Empty views, positions at 0."""
        for table in self._tables():
            self.connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(table)))
        control = self.control
        control.open_core("order", range(partitions))
        offsets = dict.fromkeys(range(partitions), 0)
        for plan in (LatestPlan.of("order"), *PLANS):
            control.add_version(registered(plan, 1, published=True))
            control.open_positions(plan.name, 1, "order", plan.fingerprint, offsets)

    def _tables(self) -> Sequence[str]:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        return [name for (name,) in self.connection.execute(query, (self.schema_name,))]

    @property
    def under_test(self) -> PostgresViewStore:
        """A store for this thread."""
        return self.store(self.dsn, self.schema_name)

    def tables(self) -> OracleTables:
        """Rows that readers see, read with plain SQL."""
        rounded = "region, orders, total, round(quantity, 8), counted"
        seen = "key, version, kind, as_of, state"
        counted = "sum(applied)::int, sum(duplicate)::int, sum(held)::int, sum(dead)::int"
        account = self.query(f"SELECT {counted} FROM counters WHERE entity = 'order'")[0]
        return OracleTables(
            in_order(self.query(f"SELECT {seen} FROM order_latest")),
            in_order(self.query(f"SELECT {seen} FROM order_history")),
            in_order(self.query(f"SELECT {rounded} FROM by_region")),
            self.query("SELECT orders, quantity FROM totals"),
            in_order(self.query("SELECT region, amount, _key FROM open_orders")),
            *account,
        )

    def advance(self, core: Core, ranges: Mapping[int, Range]) -> None:
        """Advance the core, and the views that ride with it, over ranges without records."""
        self.control.advance(core, ranges)

    def exceptions(self, partition: int, start: int, end: int) -> Exceptions:
        """The exceptions that the core recorded in a range."""
        return self.control.exceptions(self.core(), partition, start, end)

    def trim(self, below: Mapping[int, int]) -> int:
        """Drop notes before these offsets."""
        return self.control.trim("order", 1, dict(below))

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
    """Create what a keeper creates for an entity type without views, at a position; idempotent."""
    control, name = Control(connection, schema_name), entity_type.name
    control.install()
    tables = ViewTables(control)
    plans: list[ViewPlan] = [LatestPlan.of(name)]
    with connection.transaction():
        core_tables(control, entity_type)
        if history:
            plans.append(HistoryPlan.of(name))
            tables.install(plans[-1], 1, {})
            tables.point(plans[-1], 1)
        for plan in plans:
            control.add_version(registered(plan, 1, published=True))
            control.open_positions(plan.name, 1, name, plan.fingerprint, vector or {})
    return control
