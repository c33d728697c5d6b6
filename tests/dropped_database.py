"""A database of a test's own, which goes together with the replication slots that it left."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import psycopg
from psycopg import sql

_WITHIN_S: Final = 20.0


@contextmanager
def own_database(dsn: str) -> Iterator[str]:
    """Make a database of the server at ``dsn``; out: its connection string."""
    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield f"{dsn.rpartition('/')[0]}/{name}"
    finally:
        drop_database(dsn, name)


@contextmanager
def restored_later(dsn: str) -> Iterator[Callable[[], None]]:
    """Back a database up, and give the call that restores it; both end all of its sessions."""
    server, _, name = dsn.rpartition("/")
    backup = f"{name}_backup"
    _copy(dsn, name, backup)

    def restore() -> None:
        drop_database(f"{server}/postgres", name)
        _copy(f"{server}/postgres", backup, name)

    try:
        yield restore
    finally:
        drop_database(dsn, backup)


def _copy(dsn: str, name: str, copy: str) -> None:
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
    made = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*map(sql.Identifier, (copy, name)))
    with psycopg.connect(f"{dsn.rpartition('/')[0]}/postgres", autocommit=True) as connection:
        connection.execute(end, (name,))
        connection.execute(made)


def drop_database(dsn: str, name: str) -> None:
    """Drop a database of the server at ``dsn``, also when somebody still reads its slots.

    ``WITH (FORCE)`` ends sessions, but PostgreSQL refuses to drop a database while a logical slot
    is active. The process of a reader that has just left keeps its slot for a moment.
    """
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    deadline = time.monotonic() + _WITHIN_S
    with psycopg.connect(dsn, autocommit=True) as connection:
        while True:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE database = %s AND active_pid IS NOT NULL",
                (name,),
            )
            try:
                connection.execute(drop)
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return
