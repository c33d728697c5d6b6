"""All control tables of one schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from everstate.config import Config
from everstate.postgres import Connection, connect, connect_views, views_errors
from everstate.views.control.dead_letters import DeadLetterTable
from everstate.views.control.requests import Requests
from everstate.views.control.statuses import ViewStatuses
from everstate.views.control.verdicts import Verdicts


class Control(ViewStatuses, Verdicts, DeadLetterTable, Requests):
    """The control tables of one schema, through one connection; the caller commits.

    In autocommit mode each call is a separate transaction.
    """


@contextmanager
def opened_control(config: Config) -> Iterator[Control]:
    """The control tables through a connection for the block; raises Unavailable."""
    with connect_views(config.views_dsn) as connection:
        yield Control(connection, config.views.schema_name)


class ControlConnection:
    """The control tables through one connection of a thread, opened again after it was lost."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._connection: Connection | None = None

    @contextmanager
    def connected(self) -> Iterator[Control]:
        """The control tables; raises Unavailable for an unreachable server, also from inside."""
        with views_errors(self._config.views_dsn):
            try:
                if self._connection is None or self._connection.closed:
                    self._connection = connect(self._config.views_dsn)
                yield Control(self._connection, self._config.views.schema_name)
            except psycopg.OperationalError:
                self.close()
                raise

    def close(self) -> None:
        """Close the connection; the next `connected` opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
