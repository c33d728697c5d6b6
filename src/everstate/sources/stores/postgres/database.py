"""Connections to the store, retries, and translation of PostgreSQL's errors."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure
from psycopg.pq import TransactionStatus

from everstate.errors import InvalidChange, Unavailable
from everstate.telemetry import without_secret

T = TypeVar("T")
OutboxConnection: TypeAlias = psycopg.Connection[Any]

_CONNECT_S: Final = 10
_TRIES_MAX: Final = 8
_PAUSE_S: Final = 0.02

# The temporary table of a call has no statistics, and a wrong estimate must not cause a scan of a
# whole entity table: every join here uses a unique index.
SETTINGS: Final = (
    "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_seqscan=off"
    " -c jit=off -c timezone=UTC"
)


class InsertedMeanwhile(Exception):
    """Another writer inserted one of the keys between lock and write; the attempt is repeated."""


class Connections:
    """Autocommit connections of one process, kept for the next use; threads may share it.

    A server that is down is reported at once, and used again as soon as it is back.
    """

    def __init__(self, dsn: str, connections_max: int, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._idle: list[OutboxConnection] = []
        self._free = threading.BoundedSemaphore(connections_max)

    @contextmanager
    def lend(self) -> Iterator[OutboxConnection]:
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

    def _kept(self) -> OutboxConnection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                return None
            # On an idle connection the server sends nothing, except when it closes it.
            if not connection.closed and not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()


def connect(dsn: str, name: str) -> OutboxConnection:
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
    """Translate PostgreSQL's errors that the statement did not cause into everstate errors.

    A lost or refused connection, and a server that lacks resources, are Unavailable; values that
    the server can never store (a key longer than an index entry) are InvalidChange.
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
    """Whether an error means that the connection is lost: it has no SQLSTATE, or is a shutdown."""
    return not state or state.startswith(("08", "57P"))


def retried(attempt: Callable[[], T], doing: str, *, in_callers_transaction: bool) -> T:
    """Repeat an attempt that failed because of a concurrent one; each is a whole transaction.

    The first repetition comes at once, the others after random pauses, each longer on average.
    In a caller's transaction the caller must repeat it after a deadlock or serialization failure.
    Raises Unavailable after too many failed attempts.
    """
    lost: tuple[type[Exception], ...] = (InsertedMeanwhile,)
    if not in_callers_transaction:
        lost = (InsertedMeanwhile, DeadlockDetected, SerializationFailure)
    # Most writes succeed at once, and do not pay for the loop: 9 µs.
    with suppress(*lost):
        return attempt()
    # Imported here: `everstate get` looks at the store, and repeats nothing.
    import tenacity

    repeated = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(lost),
        stop=tenacity.stop_after_attempt(_TRIES_MAX - 1),
        wait=tenacity.wait_random_exponential(multiplier=_PAUSE_S),
    )
    try:
        return repeated(attempt)
    except tenacity.RetryError as failed:
        reason = (
            f"{doing}: lost {_TRIES_MAX} times against other transactions; nothing was written."
        )
        raise Unavailable(reason, public=reason) from failed.last_attempt.exception()
