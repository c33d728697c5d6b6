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
        "emitters",
        "identity",
        "import_progress",
        "outbox",
        "outbox_parked",
        "outbox_pending",
        "outbox_published",
        "published_to",
        "outbox_unpublished",
        "relay",
        "relay_blocked",
        "registered",
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

ANSWERED: Final = sql.SQL("""
-- Requests that were answered, by caller and Idempotency-Key: written in the transaction of the
-- write itself, so that an answer is here exactly when the write is.
CREATE TABLE IF NOT EXISTS everstate_store.answered (
    id text COLLATE "C" PRIMARY KEY,
    fingerprint text NOT NULL,
    answer text,
    answered_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS answered_at ON everstate_store.answered (answered_at)
""")


IMPORT_PROGRESS: Final = sql.SQL("""
-- Imports of files that have not come to their end: written in the transaction of each chunk, so
-- that an import whose process ended goes on with the first row that was not committed.
CREATE TABLE IF NOT EXISTS everstate_store.import_progress (
    id text COLLATE "C" PRIMARY KEY,
    entity text NOT NULL,
    next_row bigint NOT NULL,
    rows bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
)
""")


def table_of(entity: str) -> sql.Identifier:
    """Table of an entity type's newest states.

    A deleted entity keeps its row, with a null state, so that its versions continue (C7). Raises
    InvalidEntityType when the name is reserved for a table of the store.
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
    """The SQL of the functions that services call; it may be run again at any time."""
    return files(__package__).joinpath("functions.sql").read_bytes()


def install(
    connection: psycopg.Connection[Any],
    entity_types: Iterable[EntityType],
    *,
    answers: bool = False,
    imports: bool = False,
) -> None:
    """Create the missing parts of the store's schema, in one transaction; idempotent.

    ``answers``: also the table of kept answers, which only a store's own writes need. ``imports``:
    also the table of unfinished imports of files.

    Needs the right to create a schema in the database, but only while something is missing: a
    relay or a service with fewer rights can call it once everything is installed.
    """
    tables = {each.name: ENTITY_TABLE.format(table=table_of(each.name)) for each in entity_types}
    if answers:
        tables["answered"] = ANSWERED.format()
    if imports:
        tables["import_progress"] = IMPORT_PROGRESS.format()
    with connection.transaction():
        if _is_installed(connection) and not missing_tables(connection, tables):
            return
        # IF NOT EXISTS alone fails when two processes install at once.
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [INSTALL_LOCK])
        # Suppress the notices "already exists, skipping".
        connection.execute("SET LOCAL client_min_messages = error")
        if not _is_installed(connection):
            connection.execute(script())
        for name in missing_tables(connection, tables):
            connection.execute(tables[name])


def _is_installed(connection: psycopg.Connection[Any]) -> bool:
    """Whether the script has run; CREATE INDEX IF NOT EXISTS would wait for all open writers."""
    query = """
        SELECT to_regclass('everstate_store.outbox_unpublished') IS NOT NULL
            AND to_regproc('everstate_store.emit_event') IS NOT NULL
            AND to_regclass('everstate_store.published_to') IS NOT NULL
    """
    found = connection.execute(query).fetchone()
    return found is not None and bool(found[0])


def missing_tables(connection: psycopg.Connection[Any], names: Iterable[str]) -> list[str]:
    """Names of entity types without a table."""
    query = """
        SELECT name FROM unnest(%s::text[]) AS name
        WHERE to_regclass(format('everstate_store.%%I', name)) IS NULL
    """
    return [name for (name,) in connection.execute(query, [list(names)]).fetchall()]
