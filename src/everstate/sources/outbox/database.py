"""Connections to the store, retries, and what PostgreSQL says as errors of ours."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure
from psycopg_pool import ConnectionPool, PoolTimeout

from everstate.errors import Unavailable
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


def open_pool(dsn: str, connections_max: int, name: str) -> ConnectionPool[Connection]:
    """Pool of autocommit connections; the first is opened by the first use."""
    return ConnectionPool(
        dsn,
        kwargs={
            "autocommit": True,
            "options": SETTINGS,
            "application_name": name,
            "connect_timeout": _CONNECT_S,
        },
        min_size=0,
        max_size=connections_max,
        name=name,
        open=True,
    )


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
    """Turn a lost or refused connection of the block into Unavailable."""
    try:
        yield
    except (DeadlockDetected, SerializationFailure):
        raise
    except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout) as cause:
        reason = without_secret(str(cause)).strip().partition("\n")[0]
        raise Unavailable(
            f"{doing}: PostgreSQL at {without_secret(dsn)} does not answer ({reason})."
        ) from cause


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
                raise Unavailable(
                    f"{doing}: lost {tried} times against other transactions; nothing was written."
                ) from cause
            time.sleep(random.uniform(0, _PAUSE_S * 2**tried))
    raise AssertionError("the loop returns or raises")
