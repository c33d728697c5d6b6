"""Control tables of the views' database: positions, views, counters, held and dead changes.

What one verb needs of another goes through these rows. Functions take a psycopg connection and
commit by themselves only when it is in autocommit mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from everstate.errors import InvalidView, LogIdentityChanged

Connection = psycopg.Connection[Any]

_DDL: Final = """
CREATE TABLE IF NOT EXISTS {s}.position (
    view_group text NOT NULL, entity text NOT NULL, generation int NOT NULL,
    partition int NOT NULL, next_offset bigint NOT NULL, epoch int NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (view_group, generation, partition)) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS {s}.counters (
    view_group text NOT NULL, generation int NOT NULL, partition int NOT NULL,
    applied bigint NOT NULL DEFAULT 0, duplicate bigint NOT NULL DEFAULT 0,
    held bigint NOT NULL DEFAULT 0, dead bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (view_group, generation, partition)) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS {s}.view (
    name text PRIMARY KEY, entity text NOT NULL, version int NOT NULL, view_group text NOT NULL,
    definition jsonb NOT NULL, fingerprint text NOT NULL, status text NOT NULL, reason text,
    verified_at timestamptz, verified jsonb, changed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS {s}.topic_identity (
    topic text PRIMARY KEY, cluster_id text NOT NULL, topic_id text NOT NULL);
CREATE TABLE IF NOT EXISTS {s}.held (
    view_group text NOT NULL, generation int NOT NULL, partition int NOT NULL,
    key text COLLATE "C" NOT NULL, version bigint NOT NULL, "offset" bigint NOT NULL,
    change_id uuid NOT NULL, row bytea NOT NULL,
    held_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (view_group, generation, partition, key, version));
CREATE TABLE IF NOT EXISTS {s}.dead (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL,
    generation int NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL,
    entity text NOT NULL, view_group text NOT NULL, reason text NOT NULL,
    raw_key bytea, raw_value bytea, header_names text[] NOT NULL, header_values bytea[] NOT NULL,
    found_at timestamptz NOT NULL DEFAULT now(), batch bigint, published_at timestamptz,
    UNIQUE (topic, partition, "offset"));
CREATE INDEX IF NOT EXISTS dead_unpublished ON {s}.dead (id) WHERE published_at IS NULL;
CREATE TABLE IF NOT EXISTS {s}.identity (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), views_id uuid NOT NULL);
INSERT INTO {s}.identity (views_id) VALUES (gen_random_uuid()) ON CONFLICT DO NOTHING;
"""
STOPPED: Final = "stopped"
LEFT: Final = "left"
# Number of the advisory lock that keeps two installers apart: "everview" in ASCII.
_INSTALL_LOCK: Final = 0x6576657276696577


@dataclass(frozen=True, slots=True)
class ViewRow:
    """A registered view.

    ``status`` is `live`, `building` (alone, from the first changes), `quarantined` (alone, tried
    again), `stopped` (with all of the main group, tried again) or `left` (no longer declared).
    """

    name: str
    entity: str
    version: int
    view_group: str
    definition: Mapping[str, Any]
    fingerprint: str
    status: str = "live"
    reason: str | None = None
    verified_at: datetime | None = None
    verified: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Next offset, exclusive, of one partition for one view group."""

    view_group: str
    entity: str
    generation: int
    partition: int
    next_offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What became of the records before a position: each is in exactly one of the four (law 7)."""

    applied: int
    duplicate: int
    held: int
    dead: int

    @property
    def total(self) -> int:
        """Records that were read."""
        return self.applied + self.duplicate + self.held + self.dead


def install(connection: Connection, schema_name: str) -> None:
    """Make the schema and the control tables; idempotent, and safe for two at once."""
    schema = sql.Identifier(schema_name)
    with connection.transaction():
        lock_installing(connection)
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(schema))
        connection.execute(sql.SQL(_DDL).format(s=schema))


def lock_installing(connection: Connection) -> None:
    """Wait until nobody else makes tables; the lock goes with the transaction."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_INSTALL_LOCK,))


def register_view(connection: Connection, schema_name: str, row: ViewRow) -> ViewRow:
    """Register a view, or give back the row it has.

    Raises InvalidView when the name is registered with another meaning: its table then holds
    what the old definition says.
    """
    table = sql.Identifier(schema_name, "view")
    with connection.transaction():
        connection.execute(
            sql.SQL(
                "INSERT INTO {} (name, entity, version, view_group, definition, fingerprint, "
                "status, reason) VALUES (%s, %s, %s, %s, %s, %s, %s, %s) "
                "ON CONFLICT (name) DO NOTHING"
            ).format(table),
            (
                row.name,
                row.entity,
                row.version,
                row.view_group,
                Jsonb(dict(row.definition)),
                row.fingerprint,
                row.status,
                row.reason,
            ),
        )
        found = views(connection, schema_name, row.name)[0]
    if found.fingerprint != row.fingerprint or found.entity != row.entity:
        raise InvalidView(
            row.name,
            "it is kept already with another definition or schema version.",
            advice="Declare the new definition under a new name.",
        )
    return found


def views(connection: Connection, schema_name: str, name: str | None = None) -> list[ViewRow]:
    """Registered views by name, or the one of that name."""
    query = sql.SQL(
        "SELECT name, entity, version, view_group, definition, fingerprint, status, reason, "
        "verified_at, verified FROM {} WHERE %(name)s::text IS NULL OR name = %(name)s "
        "ORDER BY name"
    ).format(sql.Identifier(schema_name, "view"))
    return [ViewRow(*row) for row in connection.execute(query, {"name": name})]


def set_group_status(
    connection: Connection, schema_name: str, view_group: str, status: str, reason: str | None
) -> None:
    """Note how the views of a group stand."""
    query = sql.SQL(
        "UPDATE {} SET status = %s, reason = %s, changed_at = now() WHERE view_group = %s"
    ).format(sql.Identifier(schema_name, "view"))
    connection.execute(query, (status, reason, view_group))


def set_verified(
    connection: Connection, schema_name: str, name: str, report: Mapping[str, Any]
) -> None:
    """Note the outcome of a proof, with the database's time."""
    query = sql.SQL("UPDATE {} SET verified_at = now(), verified = %s WHERE name = %s")
    connection.execute(
        query.format(sql.Identifier(schema_name, "view")), (Jsonb(dict(report)), name)
    )


def init_positions(
    connection: Connection,
    schema_name: str,
    view_group: str,
    entity: str,
    offsets: Mapping[int, int],
    generation: int = 1,
) -> None:
    """Open a group's positions and counters at ``partition -> offset``; existing rows stay."""
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(
            sql.SQL(
                "INSERT INTO {} (view_group, entity, generation, partition, next_offset) "
                "VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
            ).format(sql.Identifier(schema_name, "position")),
            [(view_group, entity, generation, p, offset) for p, offset in offsets.items()],
        )
        cursor.executemany(
            sql.SQL(
                "INSERT INTO {} (view_group, generation, partition) "
                "VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
            ).format(sql.Identifier(schema_name, "counters")),
            [(view_group, generation, p) for p in offsets],
        )


def positions(
    connection: Connection, schema_name: str, view_group: str | None = None
) -> list[Position]:
    """Position rows of one group or of all, by group, generation and partition."""
    query = sql.SQL(
        "SELECT view_group, entity, generation, partition, next_offset, epoch FROM {} "
        "WHERE %(group)s::text IS NULL OR view_group = %(group)s "
        "ORDER BY view_group, generation, partition"
    ).format(sql.Identifier(schema_name, "position"))
    return [Position(*row) for row in connection.execute(query, {"group": view_group})]


def counters(connection: Connection, schema_name: str, view_group: str) -> Counters:
    """Sums over a group's partitions."""
    query = sql.SQL(
        "SELECT coalesce(sum(applied), 0)::bigint, coalesce(sum(duplicate), 0)::bigint, "
        "coalesce(sum(held), 0)::bigint, coalesce(sum(dead), 0)::bigint "
        "FROM {} WHERE view_group = %s"
    ).format(sql.Identifier(schema_name, "counters"))
    row = connection.execute(query, (view_group,)).fetchone()
    assert row is not None
    return Counters(*row)


def check_topic_identity(
    connection: Connection, schema_name: str, topic: str, cluster_id: str, topic_id: str
) -> None:
    """Note which topic the positions belong to; raises LogIdentityChanged for another one (C8)."""
    table = sql.Identifier(schema_name, "topic_identity")
    connection.execute(
        sql.SQL("INSERT INTO {} VALUES (%s, %s, %s) ON CONFLICT DO NOTHING").format(table),
        (topic, cluster_id, topic_id),
    )
    query = sql.SQL("SELECT cluster_id, topic_id FROM {} WHERE topic = %s").format(table)
    found = connection.execute(query, (topic,)).fetchone()
    if found != (cluster_id, topic_id):
        raise LogIdentityChanged(
            f"{topic} is not the topic that the views' positions belong to "
            f"(cluster and topic id were {found}, are {(cluster_id, topic_id)}).",
            advice="Point log.bootstrap_servers at the old cluster, or keep the views anew in "
            "another schema (views.schema_name).",
        )
