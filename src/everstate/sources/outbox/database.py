"""Connections to the store, retries, and what PostgreSQL says as errors of ours."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure
from psycopg.pq import TransactionStatus

from everstate.errors import InvalidChange, Unavailable
from everstate.telemetry import without_secret

T = TypeVar("T")
Connection: TypeAlias = psycopg.Connection[Any]

_CONNECT_S: Final = 10
_TRIES_MAX: Final = 8
_PAUSE_S: Final = 0.01

# The temporary table of a call has no statistics, and a guess must not read a whole table of
# entities: every join here is by a unique index.
SETTINGS: Final = (
    "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_seqscan=off"
    " -c jit=off -c timezone=UTC"
)


class InsertedMeanwhile(Exception):
    """Another writer inserted one of the keys between our lock and our write; try again."""


class Connections:
    """Autocommit connections of one process, kept for the next use; threads may share it.

    A server that is away is told at once, and used again at once when it is back.
    """

    def __init__(self, dsn: str, connections_max: int, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._idle: list[Connection] = []
        self._free = threading.BoundedSemaphore(connections_max)

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """A connection for the block; waits while all are in use."""
        with self._free:
            connection = self._kept() or connect(self._dsn, self._name)
            try:
                yield connection
            finally:
                if connection.info.transaction_status is TransactionStatus.IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()

    def close(self) -> None:
        """Close what is not in use."""
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                return None
            # An idle connection has nothing to say, except that the server is gone.
            if not connection.closed and not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()


def connect(dsn: str, name: str) -> Connection:
    """One autocommit connection, for one thread."""
    return psycopg.connect(
        dsn,
        autocommit=True,
        options=SETTINGS,
        application_name=name,
        connect_timeout=_CONNECT_S,
    )


@contextmanager
def translated(dsn: str, doing: str) -> Iterator[None]:
    """Turn an error of PostgreSQL, not of the statement, into one of ours.

    A lost or refused connection, and a server that is short of something, are Unavailable; what
    the server will never take (a key longer than an index entry) is InvalidChange.
    """
    try:
        yield
    except (DeadlockDetected, SerializationFailure):
        raise
    except (psycopg.OperationalError, psycopg.InterfaceError) as cause:
        reason = without_secret(str(cause)).strip().partition("\n")[0]
        state = cause.sqlstate or ""
        if state.startswith("54"):
            raise InvalidChange("store", None, "size", f"{doing}: {reason}") from cause
        what = "does not answer" if _lost(state) else "refused for now"
        raise Unavailable(
            f"{doing}: PostgreSQL at {without_secret(dsn)} {what} ({reason})."
        ) from cause


def _lost(state: str) -> bool:
    """Whether an error means that the connection is gone: none of the server's, or a shutdown."""
    return not state or state.startswith(("08", "57P"))


def retried(attempt: Callable[[], T], doing: str, *, in_callers_transaction: bool) -> T:
    """Repeat an attempt that lost against another transaction; each one is a whole transaction.

    In a caller's transaction a deadlock or a serialization failure is the caller's to repeat.
    Raises Unavailable when it lost too often.
    """
    lost: tuple[type[Exception], ...] = (InsertedMeanwhile,)
    if not in_callers_transaction:
        lost = (InsertedMeanwhile, DeadlockDetected, SerializationFailure)
    for tried in range(1, _TRIES_MAX + 1):
        try:
            return attempt()
        except lost as cause:
            if tried == _TRIES_MAX:
                said = f"{doing}: lost {tried} times against other transactions"
                said = f"{said}; nothing was written."
                raise Unavailable(said, public=said) from cause
            time.sleep(random.uniform(0, _PAUSE_S * 2**tried))
    raise AssertionError("the loop returns or raises")
