"""Read-only connections to the views' database, for many readers of one process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, cast

from everstate.changes.json_numbers import decode
from everstate.postgres import (
    Connection,
    Connections,
    PreparedStatements,
    connect,
    read_json_by,
    refusals,
    views_errors,
)
from everstate.views.control import ViewStatuses

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
    Raises Unavailable when none is free for 15 s, or the server does not answer, and
    StatementRefused, also from inside.
    """
    with _making:
        if dsn not in _pools:
            _pools[dsn] = Connections(partial(_opened, dsn), CONNECTIONS_MAX, _WAIT_S)
        pool = _pools[dsn]
    with refusals(), views_errors(dsn), pool.lend() as connection:
        yield connection


def close_pools() -> None:
    """Close all connections that :func:`pooled` keeps; the next reader opens new ones."""
    with _making:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


atexit.register(close_pools)


class ReadConnection(PreparedStatements):
    """Statements of a reader; see :class:`~everstate.postgres.PreparedStatements`."""

    def __init__(self, dsn: Callable[[], str]) -> None:
        """``dsn`` is asked when a connection is opened."""
        super().__init__(dsn, _opened)

    def standings(self, schema_name: str) -> ViewStatuses:
        """The control tables with the state of the views, for reading."""
        # `ViewStatuses` uses only `execute`, which this connection has.
        return ViewStatuses(cast("Connection", self), schema_name)


def _opened(dsn: str) -> Connection:
    made = connect(dsn, options=_OPTIONS, application_name="everstate reader")
    read_json_by(made, decode)
    return made
