"""Connections to the views' database, with a time limit, and the translation of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from everstate.errors import Unavailable
from everstate.telemetry import without_secret

CONNECT_S: Final = 10
"""Seconds that a server may take to answer, unless the connection string has another value."""
READING: Final = "-c default_transaction_read_only=on -c statement_timeout=300000 -c TimeZone=UTC"
"""Options of a connection that only reads."""
# Connection lost or refused, the server was shut down, or it lacks a resource.
_AWAY: Final = ("08", "57", "53")


def connect_views(dsn: str, **settings: Any) -> psycopg.Connection[Any]:
    """A new connection in autocommit mode; raises psycopg's errors, see :func:`views_errors`.

    Its time zone is always UTC, whatever the server, the database or the role has set: in a zone
    west of it the first times of year 1 would be in year 0, which Python does not have.
    """
    given = conninfo_to_dict(dsn)
    if "connect_timeout" not in given:
        settings["connect_timeout"] = CONNECT_S
    options = settings.get("options", given.get("options") or "")
    settings["options"] = f"{options} -c TimeZone=UTC".strip()
    return psycopg.connect(dsn, autocommit=True, **settings)


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


def is_away(cause: psycopg.Error) -> bool:
    """Whether an error means that the connection cannot be used any more."""
    state = cause.sqlstate or ""
    return not state or state[:2] in _AWAY
