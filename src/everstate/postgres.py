"""Connections to PostgreSQL: how they are opened, kept for the next use, and known to be lost."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from everstate.errors import Unavailable

Connection: TypeAlias = psycopg.Connection[Any]

_CONNECT_S: Final = 10
"""Seconds that a server may take to answer, unless the connection string has another value."""
# Connection lost or refused, the server was shut down, or it lacks a resource.
_AWAY: Final = ("08", "57", "53")


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
                if connection.info.transaction_status is TransactionStatus.IDLE:
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


def _has_input(connection: Connection) -> bool:
    """Whether the server sent something: over an idle connection only that it closes it."""
    # `select` takes no file numbers beyond 1,023, which a server with many clients has.
    looking = select.poll()
    looking.register(connection, select.POLLIN)
    return bool(looking.poll(0))
