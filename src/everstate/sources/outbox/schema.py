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
PUBLICATION: Final = "everstate_outbox"
RESERVED: Final = frozenset(
    {
        "answered",
        "emitters",
        "identity",
        "outbox",
        "outbox_parked",
        "outbox_pending",
        "outbox_published",
        "published_to",
        "outbox_unpublished",
        "relay",
        "relay_blocked",
        "registered",
        "relay_refused",
        "relay_slot",
    }
)
INSTALL_LOCK: Final = 0x65766572_73746F72  # "everstor"

ENTITY_TABLE: Final = sql.SQL("""
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


def script() -> bytes:
    """The SQL of the schema and of its functions, without the entity types' tables."""
    return files(__package__).joinpath("schema.sql").read_bytes() + b"\n" + functions()


def functions() -> bytes:
    """The SQL of what services call; it may be run again at any time."""
    return files(__package__).joinpath("functions.sql").read_bytes()


def install(connection: psycopg.Connection[Any], entity_types: Iterable[EntityType]) -> None:
    """Make what is missing of the store's schema, in one transaction; idempotent.

    Needs the right to create a schema in the database, but only while something is missing: a
    relay or a service of fewer rights finds all there.
    """
    tables = {each.name: table_of(each.name) for each in entity_types}
    with connection.transaction():
        if _is_installed(connection) and not _missing(connection, tables):
            return
        # IF NOT EXISTS alone fails when two processes install at once.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [INSTALL_LOCK])
        # The notices "already exists, skipping" say nothing to anybody.
        connection.execute("SET LOCAL client_min_messages = error")
        if not _is_installed(connection):
            connection.execute(script())
        for name in _missing(connection, tables):
            connection.execute(ENTITY_TABLE.format(table=tables[name]))


def _is_installed(connection: psycopg.Connection[Any]) -> bool:
    """Whether the script ran: CREATE INDEX IF NOT EXISTS would wait for every open writer."""
    query = """
        SELECT to_regclass('everstate_store.outbox_unpublished') IS NOT NULL
            AND to_regproc('everstate_store.emit_event') IS NOT NULL
            AND to_regclass('everstate_store.published_to') IS NOT NULL
    """
    found = connection.execute(query).fetchone()
    return found is not None and bool(found[0])


def _missing(connection: psycopg.Connection[Any], names: Iterable[str]) -> list[str]:
    """Entity types whose table is not there."""
    query = """
        SELECT name FROM unnest(%s::text[]) AS name
        WHERE to_regclass(format('everstate_store.%%I', name)) IS NULL
    """
    return [name for (name,) in connection.execute(query, [list(names)]).fetchall()]
