"""A CRUD service with a database of its own, which can be moved step by step while it works.

Where it reads and where it writes stands in one row of its database. Each write holds that row
shared until its commit: a step waits for the writes that are under way, and no write sees half a
step.
"""

from __future__ import annotations

from typing import Any

import psycopg
from guests import Guest, app
from psycopg import sql

from everstate import Config, EntityStore, Provenance, emit, project_config

GUEST = app.entity_type("guest")
DESK = Provenance(api_version="v1", service_name="front-desk", identifier="desk-1")
Connection = psycopg.Connection[Any]

TABLES = """
CREATE TABLE IF NOT EXISTS guest (id text PRIMARY KEY, name text NOT NULL, nights int NOT NULL);
CREATE TABLE IF NOT EXISTS switch (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    step text NOT NULL DEFAULT 'own', reads text NOT NULL DEFAULT 'table',
    writes text NOT NULL DEFAULT 'table'
);
INSERT INTO switch DEFAULT VALUES ON CONFLICT DO NOTHING;
"""


class Service:
    """Guests: saved, removed, and looked up. One instance and one connection a thread."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or project_config()
        self.connection: Connection = psycopg.connect(self.config.store_dsn, autocommit=True)
        self._store = EntityStore(self.config, GUEST, connections_max=1)

    def close(self) -> None:
        """Give up the connections."""
        self._store.close()
        self.connection.close()

    def save(self, guest: Guest) -> None:
        """Create or change a guest."""
        self._write(guest.id, guest)

    def remove(self, key: str) -> None:
        """Forget a guest."""
        self._write(key, None)

    def look_up(self, key: str) -> Guest | None:
        """The guest as known where reads go now; a replica may be a moment behind."""
        (reads,) = self._one("SELECT reads FROM switch")
        if reads == "table":
            return own_row(self.connection, key)
        if reads == "store":
            found = self._store.get(key, connection=self.connection)
            return None if found is None else Guest.model_validate(found.entity)
        query = sql.SQL("SELECT state::jsonb FROM {} WHERE key = %s").format(replica(self.config))
        row = self.connection.execute(query, [key]).fetchone()
        return None if row is None or row[0] is None else Guest.model_validate(row[0])

    def _write(self, key: str, guest: Guest | None) -> None:
        with self.connection.transaction():
            (writes,) = self._one("SELECT writes FROM switch FOR SHARE")
            lock(self.connection, key)
            if writes != "table":
                self._record(writes, key, guest)
            if writes != "store only":
                write_row(self.connection, key, guest)

    def _record(self, writes: str, key: str, guest: Guest | None) -> None:
        """Make the write a change, too; in the same transaction."""
        connection = self.connection
        if writes == "emit":
            before = own_row(connection, key)
            if before is not None or guest is not None:
                emit(connection, GUEST, before=before, after=guest, provenance=DESK, chain="mend")
        elif guest is not None:
            self._store.put(guest, provenance=DESK, connection=connection)
        elif self._store.get(key, connection=connection) is not None:
            self._store.delete(key, provenance=DESK, connection=connection)

    def _one(self, query: str) -> tuple[Any, ...]:
        row = self.connection.execute(query.encode()).fetchone()
        assert row is not None
        return row


def lock(connection: Connection, key: str) -> None:
    """Hold a key until the commit, also one that has no row yet."""
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [key])


def own_row(connection: Connection, key: str) -> Guest | None:
    """A guest of the service's own table."""
    query = "SELECT id, name, nights FROM guest WHERE id = %s"
    row = connection.execute(query, [key]).fetchone()
    return None if row is None else Guest(id=row[0], name=row[1], nights=row[2])


def write_row(connection: Connection, key: str, guest: Guest | None) -> None:
    """Write the service's own table."""
    if guest is None:
        connection.execute("DELETE FROM guest WHERE id = %s", [key])
        return
    connection.execute(
        "INSERT INTO guest VALUES (%s, %s, %s)"
        " ON CONFLICT (id) DO UPDATE SET name = excluded.name, nights = excluded.nights",
        [guest.id, guest.name, guest.nights],
    )


def replica(config: Config) -> sql.Identifier:
    """What the pipeline keeps from the log."""
    return sql.Identifier(config.views.schema_name, "guest_latest")
