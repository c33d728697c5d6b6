"""Connections to the views' database, and the translation of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from everstate.errors import Unavailable
from everstate.postgres import Connection, connect, is_away
from everstate.telemetry import without_secret


@contextmanager
def connect_views(dsn: str, **settings: Any) -> Iterator[Connection]:
    """A new connection in autocommit mode for the block; raises Unavailable, also from inside."""
    with views_errors(dsn), connect(dsn, **settings) as connection:
        yield connection


@contextmanager
def views_errors(dsn: str) -> Iterator[None]:
    """Translate OperationalError in the block to Unavailable."""
    try:
        yield
    except psycopg.OperationalError as cause:
        raise unavailable(dsn, cause) from cause


def unavailable(dsn: str, cause: psycopg.OperationalError) -> Unavailable:
    """The error for a server that does not answer, or that cannot serve the statement now."""
    problem = "does not answer" if is_away(cause) else "cannot answer now"
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return Unavailable(
        f"the views' database {problem} ({without_secret(dsn)}): {reason}",
        advice="`everstate status` shows the servers. `everstate up` starts a local one, and not "
        "your own.",
    )
