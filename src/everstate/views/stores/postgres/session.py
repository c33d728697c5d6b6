"""One connection per thread and database, kept between the batches of a worker process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from everstate.postgres import connect, is_away, unavailable

_SETTINGS: Final = (
    "-c DateStyle=ISO -c client_min_messages=warning "
    # An attempt that hangs keeps its position row locked, so that no other attempt could proceed.
    "-c idle_in_transaction_session_timeout=300000 -c temp_buffers=64MB "
    "-c random_page_cost=1.1 -c jit=off"
)

_local = threading.local()


class StoreSession:
    """A connection, and the staging tables that exist in it; one thread at a time."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.connection = connect(dsn, options=_SETTINGS, application_name="everstate views")
        self.staged: dict[str, str] = {}
        atexit.register(self.connection.close)

    def close(self) -> None:
        """Close the connection."""
        atexit.unregister(self.connection.close)
        self.connection.close()


@contextmanager
def session(dsn: str) -> Iterator[StoreSession]:
    """The thread's session with a database; a lost connection is closed and reported.

    Raises Unavailable when the database does not answer or the connection is lost.
    """
    sessions: dict[str, StoreSession] = _local.__dict__.setdefault("sessions", {})
    found = sessions.get(dsn)
    if found is not None and found.connection.closed:
        del sessions[dsn]
        found = None
    try:
        if found is None:
            found = sessions[dsn] = StoreSession(dsn)
        yield found
    except psycopg.OperationalError as cause:
        if found is None or found.connection.closed or is_away(cause):
            close_store(dsn)
            raise unavailable(dsn, cause) from cause
        raise
    except BaseException:
        if found is not None and found.connection.info.transaction_status != 0:
            close_store(dsn)
        raise


def close_store(dsn: str) -> None:
    """Close this thread's session with a database, if it has one."""
    sessions: dict[str, StoreSession] = _local.__dict__.setdefault("sessions", {})
    found = sessions.pop(dsn, None)
    if found is not None:
        found.close()
