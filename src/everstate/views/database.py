"""The one way to the views' database: how long it may take, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from everstate.errors import Unavailable
from everstate.telemetry import without_secret

CONNECT_S: Final = 10
"""How long a server may take to answer, unless the connection string says otherwise."""
# Connection lost or refused, the server shut down, or it has too little of something.
_AWAY: Final = ("08", "57", "53")


def connect_views(dsn: str, **settings: Any) -> psycopg.Connection[Any]:
    """A new connection in autocommit mode; raises psycopg's errors, see :func:`views_errors`."""
    if "connect_timeout" not in conninfo_to_dict(dsn):
        settings["connect_timeout"] = CONNECT_S
    return psycopg.connect(dsn, autocommit=True, **settings)


@contextmanager
def views_errors(dsn: str) -> Iterator[None]:
    """Turn what the database's server cannot do now into Unavailable."""
    try:
        yield
    except psycopg.OperationalError as cause:
        raise unavailable(dsn, cause) from cause


def unavailable(dsn: str, cause: psycopg.OperationalError) -> Unavailable:
    """The error of a server that is away, or that answers that it cannot do it now."""
    said = "does not answer" if is_away(cause) else "cannot do it now"
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return Unavailable(f"the views' database {said} ({without_secret(dsn)}): {reason}")


def is_away(cause: psycopg.Error) -> bool:
    """Whether an error says that the connection is of no more use."""
    state = cause.sqlstate or ""
    return not state or state[:2] in _AWAY
