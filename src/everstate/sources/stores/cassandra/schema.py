"""The tables in Cassandra, and the statements on them.

An entity is one partition: two static columns are its head (newest version and its change id),
each change is a row. A row's `after` is the state at its version, so the newest row has the present
state. All writes to it are conditional on the head (C9): head, change and state are written in one
atomic step. An unconditional write would not be ordered with these.
"""

from __future__ import annotations

from typing import Final

from everstate.cassandra import Database

# Writing `fence` ensures that an announced write that has not been done is never done later.
# `before` is stored only where it is not the `after` of the row below (a repair of drift).
_ENTITY: Final = """
CREATE TABLE IF NOT EXISTS {table} (
    key text, version bigint,
    head_version bigint static, head_change_id uuid static, fence uuid static,
    change_id uuid, kind text, schema_version int, occurred_at text, recorded_at text,
    provenance text, event text, after text, before text, chained boolean,
    PRIMARY KEY (key, version)
) WITH CLUSTERING ORDER BY (version DESC)
"""

# Keys that may have unpublished changes, by the second in which the write began. Only
# unconditional writes: an outdated entry costs one extra read, and has no other effect.
_UNPUBLISHED: Final = """
CREATE TABLE IF NOT EXISTS {keyspace}.unpublished (
    bucket bigint, attempt uuid, entity text, key text, version bigint, again_from bigint,
    PRIMARY KEY (bucket, attempt)
) WITH gc_grace_seconds = 3600
"""

# Newest published version of each key. Written by the only publisher, with the version as the
# timestamp, so that it never decreases.
_PUBLISHED: Final = """
CREATE TABLE IF NOT EXISTS {keyspace}.published (
    entity text, key text, version bigint, PRIMARY KEY ((entity, key))
)
"""

# Requests that were answered, by caller and Idempotency-Key. Conditional writes only. `since`: the
# newest version of the entity before the request; its change has a later one.
_ANSWERED: Final = """
CREATE TABLE IF NOT EXISTS {keyspace}.answered (
    id text PRIMARY KEY, fingerprint text, answer text, since bigint
)
"""

# Topic to which the changes of each entity type are published (C8).
_PUBLISHED_TO: Final = """
CREATE TABLE IF NOT EXISTS {keyspace}.published_to (
    entity text PRIMARY KEY, topic text, cluster_id text, topic_id text, partitions int
)
"""

TOKEN_MIN: Final = -(2**63)
TOKEN_MAX: Final = 2**63 - 1


def install(database: Database, entities: tuple[str, ...]) -> None:
    """Create the missing keyspace and tables; idempotent."""
    database.define_keyspace()
    for statement in (_UNPUBLISHED, _PUBLISHED, _ANSWERED, _PUBLISHED_TO):
        database.define(statement.format(keyspace=database.keyspace))
    for entity in entities:
        database.define(_ENTITY.format(table=table_of(database.keyspace, entity)))


def table_of(keyspace: str, entity: str) -> str:
    """Table of an entity type; the names of both have been checked."""
    return f"{keyspace}.e_{entity}"


class CassandraStatements:
    """The statements of one entity type."""

    def __init__(self, keyspace: str, entity: str) -> None:
        table = table_of(keyspace, entity)
        self.head = (
            "SELECT head_version, head_change_id, fence, version, after, recorded_at "
            f"FROM {table} WHERE key = ? LIMIT 1"
        )
        self.move_head = (
            f"UPDATE {table} SET head_version = ?, head_change_id = ? "
            "WHERE key = ? IF head_version = ? AND fence = ?"
        )
        self.fence = f"UPDATE {table} SET fence = ? WHERE key = ? IF head_version = ?"
        self.add = (
            f"INSERT INTO {table} (key, version, change_id, kind, schema_version, occurred_at,"
            " recorded_at, provenance, event, after, before, chained)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        self.change_id = f"SELECT change_id FROM {table} WHERE key = ? AND version = ?"
        self.version_of = (
            f"SELECT version, kind, after FROM {table} WHERE key = ? AND version > ?"
            " AND change_id = ? ALLOW FILTERING"
        )
        self.changes = (
            "SELECT head_version, version, change_id, kind, schema_version, occurred_at,"
            f" recorded_at, provenance, event, after, before, chained FROM {table}"
            " WHERE key = ? AND version >= ? ORDER BY version ASC LIMIT ?"
        )
        newest = f"SELECT key, head_version, version, change_id, after FROM {table}"
        self.page = (
            f"SELECT token(key) AS place, head_version, after FROM {table}"
            " WHERE token(key) >= ? PER PARTITION LIMIT 1 LIMIT ?"
        )
        self.slice = f"{newest} WHERE token(key) >= ? AND token(key) <= ? PER PARTITION LIMIT 1"
        self.newest = f"{newest} WHERE key = ? LIMIT 1"


class IndexStatements:
    """The statements that all entity types share."""

    def __init__(self, keyspace: str) -> None:
        self.announce = (
            f"INSERT INTO {keyspace}.unpublished (bucket, attempt, entity, key, version,"
            " again_from) VALUES (?, ?, ?, ?, ?, ?)"
        )
        self.announced = (
            "SELECT attempt, entity, key, version, again_from, WRITETIME(key) AS written_at"
            f" FROM {keyspace}.unpublished WHERE bucket = ?"
        )
        self.buckets = f"SELECT DISTINCT bucket FROM {keyspace}.unpublished"
        self.forget_bucket = (
            f"DELETE FROM {keyspace}.unpublished USING TIMESTAMP ? WHERE bucket = ?"
        )
        self.forget = f"DELETE FROM {keyspace}.unpublished WHERE bucket = ? AND attempt = ?"
        self.published = f"SELECT version FROM {keyspace}.published WHERE entity = ? AND key = ?"
        self.set_published = (
            f"INSERT INTO {keyspace}.published (entity, key, version) VALUES (?, ?, ?)"
            " USING TIMESTAMP ?"
        )
        answered = f"{keyspace}.answered"
        self.take_once = (
            f"INSERT INTO {answered} (id, fingerprint, since) VALUES (?, ?, ?) IF NOT EXISTS"
            " USING TTL ?"
        )
        self.answer_once = (
            f"UPDATE {answered} USING TTL ? SET fingerprint = ?, answer = ? WHERE id = ?"
            " IF fingerprint = ?"
        )
        self.drop_once = f"DELETE FROM {answered} WHERE id = ? IF fingerprint = ? AND answer = null"
        self.answered = f"SELECT fingerprint, answer, since FROM {answered} WHERE id = ?"
