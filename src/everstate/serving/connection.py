"""Read-only connections to the views' database, for many readers of one process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import psycopg
from psycopg import errors as pg
from psycopg.sql import Composed
from psycopg.types.json import set_json_loads

from everstate.changes.json_numbers import decode
from everstate.errors import InvalidQuery, NotFound, NoViews
from everstate.postgres import Connection, Connections, connect
from everstate.views.control import ViewStatuses
from everstate.views.database import unavailable, views_errors
from everstate.views.tables import Row

Query = Composed | bytes

CONNECTIONS_MAX: Final = 8
WAIT_S: Final = 10.0
"""Seconds that a reader waits for a token by default."""
_WAIT_S: Final = 15.0
_OPTIONS: Final = "-c default_transaction_read_only=on -c statement_timeout=300000"
_pools: dict[str, Connections] = {}
_making = threading.Lock()


@contextmanager
def pooled(dsn: str) -> Iterator[Connection]:
    """A read-only connection in autocommit mode; it is returned at the end of the block.

    All readers of the process share a few: hundreds that begin at once wait, instead of using all
    connections that the server allows. So hold it for one statement or one transaction.
    Raises Unavailable when none is free for 15 s, or the server does not answer.
    """
    with _making:
        if dsn not in _pools:
            _pools[dsn] = Connections(partial(_opened, dsn), CONNECTIONS_MAX, _WAIT_S)
        pool = _pools[dsn]
    with views_errors(dsn), pool.lend() as connection:
        yield connection


def close_pools() -> None:
    """Close all connections that :func:`pooled` keeps; the next reader opens new ones."""
    with _making:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


atexit.register(close_pools)


class ReadConnection:
    """Runs single statements, which stay prepared, for any number of threads; close it.

    A thread uses a connection that is idle, or opens another. Raises Unavailable when the server
    does not answer; connects again once after a connection was lost.
    """

    def __init__(self, dsn: Callable[[], str]) -> None:
        """``dsn`` is asked when a connection is opened."""
        self._dsn = dsn
        self._idle: list[psycopg.Cursor[Row]] = []

    def rows(self, query: Query, parameters: Sequence[Any] = ()) -> list[Row]:
        """All rows of a statement."""
        cursor = self._run(query, parameters)
        try:
            return cursor.fetchall()
        finally:
            self._idle.append(cursor)

    def row(self, query: Query, parameters: Sequence[Any] = ()) -> Row | None:
        """First row of a statement, or None."""
        cursor = self._run(query, parameters)
        try:
            return cursor.fetchone()
        finally:
            self._idle.append(cursor)

    def table(
        self, query: Query, parameters: Sequence[Any] = ()
    ) -> tuple[tuple[str, ...], list[Row]]:
        """Column names of a statement, and all its rows."""
        cursor = self.execute(query, parameters)
        return tuple(column.name for column in cursor.description or ()), cursor.fetchall()

    def standings(self, schema_name: str) -> ViewStatuses:
        """The control tables with the state of the views, for reading."""
        # `ViewStatuses` uses only `execute`, which this connection has.
        return ViewStatuses(cast("Connection", self), schema_name)

    def execute(self, query: Query, parameters: Any = ()) -> psycopg.Cursor[Row]:
        """Run a statement; its rows are in memory when it returns."""
        cursor = self._run(query, parameters)
        self._idle.append(cursor.connection.cursor())
        return cursor

    def close(self) -> None:
        """Close the connections; the next statement opens a new one."""
        while self._idle:
            self._idle.pop().connection.close()

    def _run(self, query: Query, parameters: Any) -> psycopg.Cursor[Row]:
        try:
            cursor = self._idle.pop()
        except IndexError:
            return self._run_first(query, parameters)
        try:
            return cursor.execute(query, parameters, prepare=True, binary=True)
        except psycopg.OperationalError as cause:
            if not cursor.connection.broken:
                self._idle.append(cursor)
                raise unavailable(self._dsn(), cause) from cause
            # The server closed it, and then most likely the others too.
            self.close()
        except psycopg.Error as cause:
            self._idle.append(cursor)
            raise _translated(cause) from cause
        return self._run_first(query, parameters)

    def _run_first(self, query: Query, parameters: Any) -> psycopg.Cursor[Row]:
        """Run a statement over a new connection."""
        with views_errors(self._dsn()):
            cursor = _opened(self._dsn()).cursor()
            try:
                return cursor.execute(query, parameters, prepare=True, binary=True)
            except psycopg.OperationalError:
                cursor.connection.close()
                raise
            except psycopg.Error as cause:
                self._idle.append(cursor)
                raise _translated(cause) from cause


def _opened(dsn: str) -> Connection:
    made = connect(dsn, options=_OPTIONS, application_name="everstate reader")
    set_json_loads(decode, made)
    return made


def _translated(cause: psycopg.Error) -> NotFound | InvalidQuery:
    if isinstance(cause, pg.UndefinedTable | pg.InvalidSchemaName):
        return NoViews()
    return InvalidQuery(f"the views' database refused the query: {str(cause).splitlines()[0]}.")
