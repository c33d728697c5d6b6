"""Connections to the views' database that readers of one process share.

Hundreds of readers that begin at once wait for one of a few connections, instead of using all that
the server allows. A connection is held for one statement or one transaction, and keeps no state.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.types.json import set_json_loads
from psycopg_pool import ConnectionPool, PoolTimeout

from everstate.changes.json_numbers import decode
from everstate.errors import Unavailable
from everstate.views.database import CONNECT_S, READING, views_errors

CONNECTIONS_MAX: Final = 8
_WAIT_S: Final = 15.0

_pools: dict[str, ConnectionPool[psycopg.Connection[Any]]] = {}
_making = threading.Lock()


@contextmanager
def pooled(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A read-only connection in autocommit mode; it is returned at the end of the block.

    Raises Unavailable when none is free for 15 s, or the server does not answer.
    """
    with views_errors(dsn):
        try:
            with _pool(dsn).connection(_WAIT_S) as connection:
                yield connection
        except PoolTimeout as cause:
            raise Unavailable(
                f"no connection to the views' database within {_WAIT_S:g} s: the server does not "
                "answer, or all connections are in use.",
                advice="`everstate status` shows the servers. `everstate up` starts a local one, "
                "and not your own.",
            ) from cause


def close_pools() -> None:
    """Close all connections; the next reader opens new ones."""
    with _making:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


def _pool(dsn: str) -> ConnectionPool[psycopg.Connection[Any]]:
    with _making:
        if dsn not in _pools:
            _pools[dsn] = ConnectionPool(
                dsn,
                min_size=0,
                max_size=CONNECTIONS_MAX,
                kwargs={
                    "autocommit": True,
                    "connect_timeout": CONNECT_S,
                    "options": READING,
                    "application_name": "everstate reader",
                },
                configure=lambda made: set_json_loads(decode, made),
                # A connection that the server closed meanwhile is replaced before it is used.
                check=ConnectionPool.check_connection,
                max_idle=60.0,
                reconnect_timeout=_WAIT_S,
                open=True,
                name="everstate readers",
            )
        return _pools[dsn]


atexit.register(close_pools)
