"""The tables of cores and views in PostgreSQL, and which version of a view readers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.views.control import Control
from everstate.views.kinds import LatestPlan, ViewPlan
from everstate.views.stores.postgres import tables
from everstate.views.stores.postgres.publishing import (
    columns_of,
    drop_reader,
    holders,
    point_reader,
)
from everstate.views.stores.postgres.refreshing import BESIDE, drop_triggers
from everstate.views.tables import physical


def install_core(control: Control, entity_type: EntityType) -> None:
    """Create the table of `latest` of an entity type; idempotent, and waits for no reader."""
    plan = LatestPlan.of(entity_type.name)
    tables.install(control.connection, control.schema_name, plan, 1, {})


def point_core(control: Control, entity_type: EntityType) -> None:
    """Let readers see `latest`; inside a transaction. Raises what `point_reader` raises."""
    shown = columns_of(control.connection, control.schema_name, entity_type.name)
    for name, query in tables.latest_readers(control.schema_name, entity_type, shown).items():
        point_reader(control.connection, control.schema_name, name, query)


class Readers:
    """Names of views and fields of states; see :class:`everstate.views.kinds.kind.Names`."""

    def __init__(self, schema_name: str, version: int) -> None:
        self._schema, self._version = schema_name, version

    def table(self, name: str) -> sql.Identifier:
        """A version's own table."""
        return sql.Identifier(self._schema, physical(name, self._version))

    def view(self, name: str) -> sql.Identifier:
        """The relation that readers see under a name."""
        return sql.Identifier(self._schema, name)

    def field(self, path: Sequence[str], kind: pa.DataType) -> sql.Composed:
        """A typed field of a state."""
        return tables.typed_field(path, kind)


class ViewTables:
    """Tables of versions of views, through the connection of a `Control`."""

    def __init__(self, control: Control) -> None:
        self._connection, self._schema = control.connection, control.schema_name

    def install(self, plan: ViewPlan, version: int, types: Mapping[str, pa.DataType]) -> None:
        """Create a version's table; ``types`` as in `ViewPlan.layout`. Raises InvalidView."""
        tables.install(self._connection, self._schema, plan, version, types)

    def check(self, plan: ViewPlan, types: Mapping[str, pa.DataType]) -> None:
        """Raise InvalidView when no table can be created for it, without creating one."""
        tables.definitions(plan, plan.layout(types))

    def point(self, plan: ViewPlan, version: int) -> None:
        """Point a view's name to a version; inside a transaction. See `point_reader`."""
        query = plan.read(Readers(self._schema, version))
        point_reader(self._connection, self._schema, plan.name, query)

    def empty(self, name: str, version: int) -> None:
        """Empty a version's table that no reader sees."""
        table = sql.Identifier(self._schema, physical(name, version))
        self._connection.execute(sql.SQL("TRUNCATE {}").format(table))

    def drop(self, name: str, version: int) -> None:
        """Drop the table of a version that no reader sees, and the tables beside it."""
        named = physical(name, version)
        for end in ("", *BESIDE):
            table = sql.Identifier(self._schema, f"{named}{end}")
            self._connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))
        drop_triggers(self._connection, self._schema, named)

    def drop_reader(self, name: str) -> None:
        """Drop a name that readers use; raises PublishRefused."""
        drop_reader(self._connection, self._schema, name)

    def holders(self, name: str) -> list[str]:
        """Other sessions that hold a lock on a name, the oldest first."""
        return holders(self._connection, self._schema, name)

    def kept(self, plan: ViewPlan, version: int) -> sql.Composed:
        """Query of the rows of a version's table, in the columns of its batch."""
        return plan.compared(Readers(self._schema, version))

    def unlimited(self, plan: ViewPlan, version: int) -> sql.Composed:
        """Query of the rows that readers see of a version, without LIMIT."""
        return plan.unlimited_read(Readers(self._schema, version))

    def different_rows(self, plan: ViewPlan, version: int, other: int) -> int:
        """How many rows differ between two versions; both are read in one statement."""
        one, two = (plan.read(Readers(self._schema, each)) for each in (version, other))
        query = sql.SQL(
            "SELECT count(*) FROM ((({0}) EXCEPT ALL ({1})) UNION ALL (({1}) EXCEPT ALL ({0}))) "
            "AS different"
        ).format(one, two)
        row = self._connection.execute(query).fetchone()
        return 0 if row is None else int(row[0])
