"""The tables of cores and views in PostgreSQL, and which version of a view readers see."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from everstate.changes import EntityType
from everstate.postgres import identifier
from everstate.views.control import Control
from everstate.views.kinds import LatestPlan, ViewPlan
from everstate.views.stores.postgres import tables
from everstate.views.stores.postgres.publishing import ReaderName
from everstate.views.stores.postgres.refreshing import BESIDE, drop_triggers
from everstate.views.stores.postgres.tables import Readers
from everstate.views.tables import physical


def install_core(control: Control, entity_type: EntityType) -> None:
    """Create the table of `latest` of an entity type; idempotent, and waits for no reader."""
    ViewTables(control).install(LatestPlan.of(entity_type.name), 1, {})


def point_core(control: Control, entity_type: EntityType) -> None:
    """Let readers see `latest`; inside a transaction. Raises what `ReaderName.point` raises."""
    shown = ReaderName(control.connection, control.schema_name, entity_type.name).columns()
    for name, query in tables.latest_readers(control.schema_name, entity_type, shown).items():
        ReaderName(control.connection, control.schema_name, name).point(query)


class ViewTables:
    """Tables of versions of views, through the connection of a `Control`."""

    def __init__(self, control: Control) -> None:
        self._connection, self._schema = control.connection, control.schema_name

    def install(self, plan: ViewPlan, version: int, types: Mapping[str, pa.DataType]) -> None:
        """Create a version's table; ``types`` as in `ViewPlan.layout`. Raises InvalidView."""
        for statement in tables.table_statements(self._schema, plan, version, types):
            self._connection.execute(statement.encode())

    def point(self, plan: ViewPlan, version: int) -> None:
        """Point a view's name to a version; inside a transaction. See `ReaderName.point`."""
        query = plan.read(Readers(self._schema, version))
        ReaderName(self._connection, self._schema, plan.name).point(query)

    def empty(self, name: str, version: int) -> None:
        """Empty a version's table that no reader sees."""
        table = identifier(self._schema, physical(name, version))
        self._connection.execute(f"TRUNCATE {table}".encode())

    def drop(self, name: str, version: int) -> None:
        """Drop the table of a version that no reader sees, and the tables beside it."""
        named = physical(name, version)
        for end in ("", *BESIDE):
            table = identifier(self._schema, f"{named}{end}")
            self._connection.execute(f"DROP TABLE IF EXISTS {table}".encode())
        drop_triggers(self._connection, self._schema, named)

    def drop_reader(self, name: str) -> None:
        """Drop a name that readers use; raises PublishRefused."""
        ReaderName(self._connection, self._schema, name).drop()

    def holders(self, name: str) -> list[str]:
        """Other sessions that hold a lock on a name, the oldest first."""
        return ReaderName(self._connection, self._schema, name).holders()

    def kept(self, plan: ViewPlan, version: int) -> str:
        """Query of the rows of a version's table, in the columns of its batch."""
        return plan.compared(Readers(self._schema, version))

    def unlimited(self, plan: ViewPlan, version: int) -> str:
        """Query of the rows that readers see of a version, without LIMIT."""
        return plan.read(Readers(self._schema, version), limited=False)

    def different_rows(self, plan: ViewPlan, version: int, other: int) -> int:
        """How many rows differ between two versions; both are read in one statement."""
        one, two = (plan.read(Readers(self._schema, each)) for each in (version, other))
        query = (
            f"SELECT count(*) FROM ((({one}) EXCEPT ALL ({two})) UNION ALL "
            f"(({two}) EXCEPT ALL ({one}))) AS different"
        )
        row = self._connection.execute(query.encode()).fetchone()
        return 0 if row is None else int(row[0])
