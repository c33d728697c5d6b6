"""Connections to the views' database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everstate.postgres import Connection, connect, refusals, views_errors


@contextmanager
def connect_views(dsn: str, **settings: Any) -> Iterator[Connection]:
    """A new connection in autocommit mode for the block.

    Raises Unavailable and StatementRefused, also from inside.
    """
    with refusals(), views_errors(dsn), connect(dsn, **settings) as connection:
        yield connection
