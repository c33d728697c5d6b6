"""One reading connection to the views' database, opened at the first statement and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import psycopg
from psycopg import errors as pg
from psycopg.sql import Composed
from psycopg.types.json import set_json_loads

from everstate.changes.json_numbers import decode
from everstate.errors import InvalidQuery, NotFound, NoViews, Unavailable
from everstate.views.control import ViewStatuses
from everstate.views.database import READING, connect_views
from everstate.views.tables import Row

Query = Composed | bytes


class ReadConnection:
    """A read-only connection whose statements stay prepared; reconnects once after it was lost.

    Not for several threads at once: a look-up is one short round trip, so give each thread its
    own connection. Raises Unavailable when the server does not answer.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._cursor: psycopg.Cursor[Row] | None = None

    def rows(self, query: Query, parameters: Sequence[Any] = ()) -> list[Row]:
        """All rows of a statement."""
        return self._run(query, parameters).fetchall()

    def row(self, query: Query, parameters: Sequence[Any] = ()) -> Row | None:
        """First row of a statement, or None."""
        return self._run(query, parameters).fetchone()

    def table(
        self, query: Query, parameters: Sequence[Any] = ()
    ) -> tuple[tuple[str, ...], list[Row]]:
        """Column names of a statement, and all its rows."""
        cursor = self._run(query, parameters)
        return tuple(column.name for column in cursor.description or ()), cursor.fetchall()

    def standings(self, schema_name: str) -> ViewStatuses:
        """The control tables with the state of the views, for reading."""
        # `ViewStatuses` uses only `execute`, which this connection has.
        return ViewStatuses(cast("psycopg.Connection[Any]", self), schema_name)

    def execute(self, query: Query, parameters: Any = ()) -> psycopg.Cursor[Row]:
        """Run a statement."""
        return self._run(query, parameters)

    def close(self) -> None:
        """Close the connection; the next statement opens a new one."""
        if self._cursor is not None:
            self._cursor.connection.close()
            self._cursor = None

    def _run(self, query: Query, parameters: Any) -> psycopg.Cursor[Row]:
        fresh = self._cursor is None
        try:
            return self._opened().execute(query, parameters, prepare=True, binary=True)
        except psycopg.OperationalError as cause:
            if fresh or not self._broken():
                raise _unavailable(cause) from cause
            self.close()
        except psycopg.Error as cause:
            raise _translated(cause) from cause
        try:
            return self._opened().execute(query, parameters, prepare=True, binary=True)
        except psycopg.OperationalError as cause:
            raise _unavailable(cause) from cause

    def _broken(self) -> bool:
        return self._cursor is None or self._cursor.connection.broken

    def _opened(self) -> psycopg.Cursor[Row]:
        if self._cursor is None:
            connection = connect_views(self._dsn, options=READING)
            set_json_loads(decode, connection)
            self._cursor = connection.cursor()
        return self._cursor


def _unavailable(cause: psycopg.Error) -> Unavailable:
    return Unavailable(
        f"the views' database does not answer: {str(cause).splitlines()[0]}.",
        advice="Start it with `everstate up`, or check store.dsn and views.dsn.",
    )


def _translated(cause: psycopg.Error) -> NotFound | InvalidQuery:
    if isinstance(cause, pg.UndefinedTable | pg.InvalidSchemaName):
        return NoViews()
    return InvalidQuery(f"the views' database refused the query: {str(cause).splitlines()[0]}.")
