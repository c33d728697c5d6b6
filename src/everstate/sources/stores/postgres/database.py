"""Connections to the store, retries, and translation of PostgreSQL's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure

from everstate import postgres
from everstate.errors import InvalidChange, Unavailable
from everstate.telemetry import without_secret

T = TypeVar("T")
OutboxConnection = postgres.Connection

_TRIES_MAX: Final = 8
_PAUSE_S: Final = 0.02

# The temporary table of a call has no statistics, and a wrong estimate must not cause a scan of a
# whole entity table: every join here uses a unique index.
SETTINGS: Final = "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_seqscan=off -c jit=off"


class InsertedMeanwhile(Exception):
    """Another writer inserted one of the keys between lock and write; the attempt is repeated."""


def connect(dsn: str, name: str) -> OutboxConnection:
    """One autocommit connection, for one thread."""
    return postgres.connect(dsn, options=SETTINGS, application_name=name)


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
