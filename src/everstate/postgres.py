"""PostgreSQL for rooms that are no store: connections, names in statements, and its errors.

The driver is imported here, by the stores and the control tables, and by the ways in that read a
database of PostgreSQL; everybody else sees errors of `everstate.errors`.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import set_json_loads
from psycopg.types.string import TextLoader

from everstate.errors import (
    InUse,
    InvalidQuery,
    MissingColumn,
    MissingTable,
    NoViews,
    StatementRefused,
    Unavailable,
    ValueRefused,
)
from everstate.telemetry import without_secret

Connection: TypeAlias = psycopg.Connection[Any]
ReadCursor: TypeAlias = psycopg.Cursor[Any]
Decode: TypeAlias = Callable[[bytes | str], Any]
"""Reads a value of JSON from its text."""

_CONNECT_S: Final = 10
"""Seconds that a server may take to answer, unless the connection string has another value."""
# Connection lost or refused, the server was shut down, or it lacks a resource.
_AWAY: Final = ("08", "57", "53")
_REFUSALS: Final[tuple[tuple[tuple[type[psycopg.Error], ...], type[StatementRefused]], ...]] = (
    ((psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName), MissingTable),
    ((psycopg.errors.UndefinedColumn,), MissingColumn),
    (
        (
            psycopg.errors.LockNotAvailable,
            psycopg.errors.SerializationFailure,
            psycopg.errors.DependentObjectsStillExist,
        ),
        InUse,
    ),
    ((psycopg.DataError,), ValueRefused),
)
# Errors of the server, and of a session that it ends; no statement is to blame.
_OF_THE_SERVER: Final = (
    psycopg.OperationalError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)


def connect(dsn: str, **settings: Any) -> Connection:
    """A new connection in autocommit mode, for one thread; raises psycopg's errors.

    Its time zone is always UTC, whatever the server, the database or the role has set: in a zone
    west of it the first times of year 1 would be in year 0, which Python does not have. Statements
    are sent in UTF-8.
    """
    given = conninfo_to_dict(dsn)
    if "connect_timeout" not in given:
        settings["connect_timeout"] = _CONNECT_S
    options = settings.get("options", given.get("options") or "")
    settings["options"] = f"{options} -c TimeZone=UTC".strip()
    settings["client_encoding"] = "utf8"
    return psycopg.connect(dsn, autocommit=True, **settings)


def is_away(cause: psycopg.Error) -> bool:
    """Whether an error means that the connection cannot be used any more."""
    state = cause.sqlstate or ""
    return not state or state[:2] in _AWAY


@contextmanager
def views_errors(dsn: str) -> Iterator[None]:
    """Translate errors of the views' server in the block to Unavailable."""
    try:
        yield
    except _OF_THE_SERVER as cause:
        raise unavailable(dsn, cause) from cause


@contextmanager
def connect_views(dsn: str, **settings: Any) -> Iterator[Connection]:
    """A new connection to the views' database in autocommit mode for the block.

    Raises Unavailable and StatementRefused, also from inside.
    """
    with refusals(), views_errors(dsn), connect(dsn, **settings) as connection:
        yield connection


def unavailable(dsn: str, cause: psycopg.Error) -> Unavailable:
    """The error for a server that does not answer, or that cannot serve the statement now."""
    problem = "does not answer" if is_away(cause) else "cannot answer now"
    error = Unavailable(
        f"the views' database {problem} ({without_secret(dsn)}): {first_line(cause)}",
        advice="`everstate status` shows the servers. `everstate up` starts a local one, and not "
        "your own.",
    )
    error.server = "the views' database (PostgreSQL)"
    return error


def first_line(cause: BaseException) -> str:
    """The first line of an error, or its type."""
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


@contextmanager
def refusals() -> Iterator[None]:
    """Translate what PostgreSQL refuses in the block to StatementRefused, or a class below it.

    Errors of the server pass through, a deadlock and a statement that takes too long among them:
    :func:`views_errors` translates them.
    """
    try:
        yield
    except psycopg.Error as cause:
        kind = _kind_of(cause)
        if kind is None:
            raise
        raise kind(first_line(cause)) from cause


def refusal(cause: psycopg.Error, reason: str) -> StatementRefused:
    """The error for what PostgreSQL refuses; ``reason`` is its message."""
    return (_kind_of(cause) or StatementRefused)(reason)


def _kind_of(cause: psycopg.Error) -> type[StatementRefused] | None:
    for causes, kind in _REFUSALS:
        if isinstance(cause, causes):
            return kind
    is_refused = isinstance(cause, psycopg.DatabaseError) and not isinstance(cause, _OF_THE_SERVER)
    return StatementRefused if is_refused else None


def settings_of(dsn: str) -> dict[str, str]:
    """The settings of a connection string; raises ValueError for one that cannot be read."""
    try:
        return {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    except psycopg.ProgrammingError:
        # The driver's message may show a part of the password.
        raise ValueError("it is no connection string of libpq") from None


def libpq_variables() -> dict[str, str]:
    """Setting of a connection string → the environment variable in which clients of libpq read it.

    Settings without one are left out.
    """
    return {
        option.keyword.decode(): option.envvar.decode()
        for option in pq.Conninfo.get_defaults()
        if option.envvar is not None
    }


def identifier(*names: str) -> str:
    """A name in SQL's quotes; of several, the last one within those before it."""
    return ".".join('"{}"'.format(name.replace('"', '""')) for name in names)


def literal(value: str | Sequence[str]) -> str:
    """A text, or an array of texts, in SQL's quotes."""
    return sql.Literal(value if isinstance(value, str) else list(value)).as_string()


def read_json_by(connection: Connection, decode: Decode, as_text: Iterable[str] = ()) -> None:
    """Let a connection give JSON as ``decode`` reads it, and values of some types as their text."""
    set_json_loads(decode, connection)
    for name in as_text:
        connection.adapters.register_loader(name, TextLoader)


@contextmanager
def one_snapshot(connection: Connection) -> Iterator[None]:
    """A transaction whose statements all see the database as of its first one."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield


@dataclass(frozen=True, slots=True)
class SharedSnapshot:
    """A snapshot of the database, which tasks in other processes can read in while it is held."""

    dsn: str
    number: str

    @contextmanager
    def joined(self) -> Iterator[Connection]:
        """A connection in a transaction of this snapshot; raises Unavailable."""
        with views_errors(self.dsn), connect(self.dsn) as connection, one_snapshot(connection):
            connection.execute(f"SET TRANSACTION SNAPSHOT {literal(self.number)}".encode())
            yield connection


@contextmanager
def shared_snapshot(dsn: str, **settings: Any) -> Iterator[tuple[Connection, SharedSnapshot]]:
    """Hold a snapshot: the connection of its transaction, and what others need to read in it.

    Raises Unavailable.
    """
    with views_errors(dsn), connect(dsn, **settings) as connection, one_snapshot(connection):
        row = connection.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        yield connection, SharedSnapshot(dsn, row[0])


class Connections:
    """Connections of one process, kept for the next use until :meth:`close`; threads may share it.

    A server that is down is reported at once, and used again as soon as it is back.
    """

    def __init__(
        self,
        opened: Callable[[], Connection],
        connections_max: int,
        wait_s: float | None = None,
    ) -> None:
        """``wait_s``: how long a use waits while all are in use; ``None``: without an end."""
        self._opened, self._max, self._wait_s = opened, connections_max, wait_s
        self._idle: list[Connection] = []
        self._free = threading.BoundedSemaphore(connections_max)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """A connection for the block; one that is left within a transaction is closed.

        Raises Unavailable when none is free in time, and psycopg's errors.
        """
        if not self._free.acquire(timeout=self._wait_s):
            raise Unavailable(
                f"no connection to PostgreSQL within {self._wait_s:g} s: all {self._max} of this "
                "process are in use.",
                advice="Send the request again; with many readers, start another `serve`.",
            )
        try:
            connection = self._kept() or self._opened()
            try:
                yield connection
            finally:
                if connection.info.transaction_status is pq.TransactionStatus.IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()
        finally:
            self._free.release()

    def close(self) -> None:
        """Close what is not in use; the next use opens new ones."""
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                return None
            if not connection.closed and not _has_input(connection):
                return connection
            connection.close()


class PreparedStatements:
    """Runs single statements of readers, which stay prepared, for any number of threads; close it.

    A thread uses a connection that is idle, or opens another. Raises Unavailable when the
    server does not answer; connects again once after a connection was lost.
    """

    def __init__(self, dsn: Callable[[], str], opened: Callable[[str], Connection]) -> None:
        """``dsn`` is asked when a connection is opened."""
        self._dsn, self._opened = dsn, opened
        self._idle: list[ReadCursor] = []

    def rows(self, query: bytes, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a statement."""
        cursor = self._run(query, parameters)
        try:
            return cursor.fetchall()
        finally:
            self._idle.append(cursor)

    def row(self, query: bytes, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """First row of a statement, or None."""
        cursor = self._run(query, parameters)
        try:
            return cursor.fetchone()
        finally:
            self._idle.append(cursor)

    def table(
        self, query: bytes, parameters: Sequence[Any] = ()
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Column names of a statement, and all its rows."""
        cursor = self.execute(query, parameters)
        return tuple(column.name for column in cursor.description or ()), cursor.fetchall()

    def execute(self, query: bytes, parameters: Any = ()) -> ReadCursor:
        """Run a statement; its rows are in memory when it returns."""
        cursor = self._run(query, parameters)
        self._idle.append(cursor.connection.cursor())
        return cursor

    def close(self) -> None:
        """Close the connections; the next statement opens a new one."""
        while self._idle:
            self._idle.pop().connection.close()

    def _run(self, query: bytes, parameters: Any) -> ReadCursor:
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
            raise _refused_query(cause) from cause
        return self._run_first(query, parameters)

    def _run_first(self, query: bytes, parameters: Any) -> ReadCursor:
        """Run a statement over a new connection."""
        with views_errors(self._dsn()):
            cursor = self._opened(self._dsn()).cursor()
            try:
                return cursor.execute(query, parameters, prepare=True, binary=True)
            except psycopg.OperationalError:
                cursor.connection.close()
                raise
            except psycopg.Error as cause:
                self._idle.append(cursor)
                raise _refused_query(cause) from cause


def _refused_query(cause: psycopg.Error) -> NoViews | InvalidQuery:
    if isinstance(cause, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
        return NoViews()
    return InvalidQuery(f"the views' database refused the query: {first_line(cause)}.")


def has_ended(connection: Connection) -> bool:
    """Whether a connection's transaction was committed or rolled back, or is lost with it."""
    return connection.pgconn.transaction_status in (
        pq.TransactionStatus.IDLE,
        pq.TransactionStatus.UNKNOWN,
    )


def _has_input(connection: Connection) -> bool:
    """Whether the server sent something: over an idle connection only that it closes it."""
    # `select` takes no file numbers beyond 1,023, which a server with many clients has.
    looking = select.poll()
    looking.register(connection, select.POLLIN)
    return bool(looking.poll(0))
