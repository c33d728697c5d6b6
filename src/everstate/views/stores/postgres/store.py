"""The tables of cores and views in PostgreSQL, and which version of a view readers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.views.control import Control
from everstate.views.stores.postgres import tables
from everstate.views.stores.postgres.publishing import drop_reader, point_reader
from everstate.views.stores.postgres.session import close as close_store
from everstate.views.stores.postgres.transaction import PostgresStore
from everstate.views.tables import KeptTable, physical

if TYPE_CHECKING:
    from everstate.views.plan import ViewPlan

__all__ = [
    "PostgresStore",
    "ViewTables",
    "close_store",
    "core_tables",
    "kept_query",
    "view_tables",
]


def core_tables(control: Control, entity_type: EntityType) -> None:
    """Make `latest` of an entity type and what readers see of it; inside a transaction."""
    tables.install_latest(control.connection, control.schema_name, entity_type.name)
    for name, query in tables.entity_readers(control.schema_name, entity_type).items():
        point_reader(control.connection, control.schema_name, name, query)


class ViewTables:
    """Tables of versions of views, through the connection of a `Control`."""

    def __init__(self, control: Control) -> None:
        self._connection, self._schema = control.connection, control.schema_name

    def install(
        self, name: str, version: int, plan: ViewPlan | None, types: Mapping[str, pa.DataType]
    ) -> None:
        """Make a version's table; ``plan`` is ``None`` for a history. Raises InvalidView."""
        if plan is None:
            entity = name.removesuffix("_history")
            tables.install_history(self._connection, self._schema, entity, version)
        else:
            tables.install(self._connection, self._schema, plan, types, version)

    def point(self, name: str, version: int, plan: ViewPlan | None) -> None:
        """Let readers of a name see a version; inside a transaction. See `point_reader`."""
        if plan is None:
            query = tables.history_reader(self._schema, name.removesuffix("_history"), version)
        else:
            query = tables.reader(self._schema, plan, version)
        point_reader(self._connection, self._schema, name, query)

    def empty(self, name: str, version: int) -> None:
        """Empty a version's table that no reader sees."""
        tables.empty_table(self._connection, self._schema, name, version)

    def drop(self, name: str, version: int) -> None:
        """Drop a version's table that no reader sees."""
        tables.drop_table(self._connection, self._schema, name, version)

    def drop_reader(self, name: str) -> None:
        """Take a name away from readers; raises PublishRefused."""
        drop_reader(self._connection, self._schema, name)

    def different_rows(
        self, name: str, version: int, other: KeptTable, plan: ViewPlan | None
    ) -> int:
        """How many rows two versions do not share; both read in one statement, at one moment."""
        if plan is None:
            one, two = (
                tables.history_reader(self._schema, name.removesuffix("_history"), number)
                for number in (version, other.version)
            )
        else:
            one, two = (
                tables.kept(self._schema, plan, number) for number in (version, other.version)
            )
        query = sql.SQL(
            "SELECT count(*) FROM ((({0}) EXCEPT ALL ({1})) UNION ALL (({1}) EXCEPT ALL ({0}))) "
            "AS different"
        ).format(one, two)
        row = self._connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])


def view_tables(control: Control) -> ViewTables:
    """Tables of versions of views."""
    return ViewTables(control)


def kept_query(
    control: Control,
    name: str,
    version: int,
    columns: Sequence[str] = (),
    *,
    plan: ViewPlan | None = None,
) -> sql.Composed:
    """Query of what a version's table holds: ``columns``, or what the plan's batch gives."""
    if plan is None:
        names = sql.SQL(", ").join(sql.Identifier(column) for column in columns)
        table = control.table(physical(name, version))
        return sql.SQL("SELECT {} FROM {}").format(names, table)
    return tables.kept(control.schema_name, plan, version)
