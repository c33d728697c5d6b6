"""The PostgreSQL store of views as the contract and fault tests drive it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import psycopg
import pyarrow as pa
from psycopg import sql

from everstate.log.positions import Range
from everstate.testing.view_contract import ORDER, TYPES, VIEWS, Row
from everstate.views import control
from everstate.views.stores.postgres.apply import Applied, Applier, apply_range
from everstate.views.stores.postgres.group import (
    GroupPlan,
    PlannedView,
    group_plan,
    own_group,
)
from everstate.views.stores.postgres.session import close, session
from everstate.views.stores.postgres.tables import install, install_entity

PLANNED = tuple(PlannedView(plan) for plan in VIEWS)


@dataclass
class KeptViews:
    """The contract's views in a database; ``applier`` may be a double with a planted defect."""

    dsn: str
    connection: psycopg.Connection[Any]
    applier: type[Applier] = Applier
    schema_name: ClassVar[str] = "kept"

    @classmethod
    @contextmanager
    def installed(cls, dsn: str) -> Iterator[KeptViews]:
        """Install control tables and views; closes this thread's sessions afterwards."""
        with psycopg.connect(dsn, autocommit=True, options="-c TimeZone=UTC") as connection:
            connection.execute(f"SET search_path = {cls.schema_name}")
            control.install(connection, cls.schema_name)
            install_entity(connection, cls.schema_name, ORDER)
            for plan in VIEWS:
                install(connection, cls.schema_name, plan, TYPES[plan.name])
            try:
                yield cls(dsn, connection)
            finally:
                close(dsn)

    def group(self, alone: str | None = None, **changed: Any) -> GroupPlan:
        """Plan of the main group, without the views that are alone, or of the view ``alone``."""
        rows = control.views(self.connection, self.schema_name)
        mine = {row.name for row in rows if row.view_group == own_group("order", row.name)}
        kept = [
            view
            for view in PLANNED
            if (view.plan.name == alone if alone else view.plan.name not in mine)
        ]
        group = group_plan(
            ORDER,
            kept,
            topic="orders",
            schema_name=self.schema_name,
            alone=alone,
        )
        found = control.positions(self.connection, self.schema_name, group.view_group)
        return replace(group, epoch=found[0].epoch if found else 0, **changed)

    def reset(self, partitions: int) -> None:
        """Empty views, positions at 0."""
        for table in self._tables():
            self.connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(table)))
        self.connection.execute("DELETE FROM view")
        for plan in VIEWS:
            row = control.ViewRow(plan.name, "order", 1, "order", {}, plan.fingerprint)
            control.register_view(self.connection, self.schema_name, row)
        offsets = dict.fromkeys(range(partitions), 0)
        control.init_positions(self.connection, self.schema_name, "order", "order", offsets)

    def _tables(self) -> Sequence[str]:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        return [name for (name,) in self.connection.execute(query, (self.schema_name,))]

    def apply(self, partition: int, start: int, end: int, changes: pa.Table) -> Applied:
        """Apply a range to the main group with the applier under test."""
        return self.apply_to(self.group(), partition, start, end, changes)

    def apply_to(
        self, group: GroupPlan, partition: int, start: int, end: int, changes: pa.Table
    ) -> Applied:
        """Apply a range to a group."""
        if self.applier is Applier:
            return apply_range(self.dsn, group, partition, Range(start, end), changes)
        with session(self.dsn) as found:
            return self.applier(found, group, partition).run(Range(start, end), changes)

    def query(self, select: str) -> list[Row]:
        """Rows of a query."""
        return self.connection.execute(select.encode()).fetchall()
