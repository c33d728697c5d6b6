"""The tables of the store: one for each entity type, one outbox for all."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Final

import psycopg
from psycopg import sql

from everstate.changes import EntityType
from everstate.errors import InvalidEntityType

SCHEMA: Final = "everstate_store"
RESERVED: Final = frozenset(
    {
        "answered",
        "identity",
        "outbox",
        "outbox_pending",
        "outbox_published",
        "relay",
        "relay_blocked",
    }
)
_INSTALL_LOCK: Final = 0x65766572_73746F72  # "everstor"

_ENTITY_TABLE: Final = sql.SQL("""
CREATE TABLE IF NOT EXISTS {table} (
    key text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL CHECK (version > 0),
    state text,
    change_id uuid NOT NULL,
    recorded_at timestamptz NOT NULL
) WITH (fillfactor = 80)
""")


def table_of(entity: str) -> sql.Identifier:
    """Table of an entity type's newest states.

    A deleted entity keeps its row, with a null state: the version goes on from there (C7). Raises
    InvalidEntityType when the name is one of the store's own.
    """
    if entity in RESERVED:
        raise InvalidEntityType(
            f"entity type name {entity!r} is a table of the store's own",
            advice="Choose another name.",
        )
    return sql.Identifier(SCHEMA, entity)


def install(connection: psycopg.Connection[Any], entity_types: Iterable[EntityType]) -> None:
    """Make what is missing of the store's schema, in one transaction; idempotent.

    Needs the right to create a schema in the database.
    """
    script = files(__package__).joinpath("schema.sql").read_bytes()
    with connection.transaction():
        # IF NOT EXISTS alone fails when two processes install at once.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_INSTALL_LOCK])
        # The notices "already exists, skipping" say nothing to anybody.
        connection.execute("SET LOCAL client_min_messages = warning")
        if not _is_installed(connection):
            connection.execute(script)
        for entity_type in entity_types:
            statement = _ENTITY_TABLE.format(table=table_of(entity_type.name))
            connection.execute(statement)


def _is_installed(connection: psycopg.Connection[Any]) -> bool:
    """Whether the script ran: CREATE INDEX IF NOT EXISTS would wait for every open writer."""
    query = "SELECT to_regclass('everstate_store.relay_blocked') IS NOT NULL"
    found = connection.execute(query).fetchone()
    return found is not None and bool(found[0])
