"""Making the control tables, also from those of the first form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from everstate.errors import LogIdentityChanged
from everstate.views.tables import CORE_FINGERPRINT

if TYPE_CHECKING:
    # Who only reads has no use for Kafka's client.
    from everstate.log.topics import TopicIdentity

Connection = psycopg.Connection[Any]

_DDL: Final = """
CREATE TABLE IF NOT EXISTS {s}.position (
    view text NOT NULL, version int NOT NULL, entity text NOT NULL, generation int NOT NULL,
    partition int NOT NULL, next_offset bigint NOT NULL, fingerprint text NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (view, version, generation, partition)) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS {s}.counters (
    entity text NOT NULL, generation int NOT NULL, partition int NOT NULL,
    applied bigint NOT NULL DEFAULT 0, duplicate bigint NOT NULL DEFAULT 0,
    held bigint NOT NULL DEFAULT 0, dead bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (entity, generation, partition)) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS {s}.view (
    name text NOT NULL, version int NOT NULL, entity text NOT NULL, definition jsonb NOT NULL,
    fingerprint text NOT NULL, status text NOT NULL, reason text, built jsonb,
    published boolean NOT NULL DEFAULT false, published_at timestamptz, met_at xid8,
    options jsonb,
    declared_at timestamptz NOT NULL DEFAULT now(), changed_at timestamptz NOT NULL DEFAULT now(),
    verified_at timestamptz, verified jsonb, PRIMARY KEY (name, version));
CREATE UNIQUE INDEX IF NOT EXISTS view_published ON {s}.view (name) WHERE published;
CREATE TABLE IF NOT EXISTS {s}.topic_identity (
    topic text PRIMARY KEY, cluster_id text NOT NULL, topic_id text NOT NULL,
    entity text NOT NULL, generation int NOT NULL, partitions int NOT NULL);
CREATE TABLE IF NOT EXISTS {s}.held (
    entity text NOT NULL, generation int NOT NULL, partition int NOT NULL,
    key text COLLATE "C" NOT NULL, version bigint NOT NULL, "offset" bigint NOT NULL,
    change_id uuid NOT NULL, row bytea NOT NULL, released_at bigint,
    held_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (entity, generation, partition, key, version));
CREATE TABLE IF NOT EXISTS {s}.duplicate (
    entity text NOT NULL, generation int NOT NULL, partition int NOT NULL,
    first_offset bigint NOT NULL, last_offset bigint NOT NULL,
    PRIMARY KEY (entity, generation, partition, first_offset));
CREATE TABLE IF NOT EXISTS {s}.dead (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL,
    generation int NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL,
    entity text NOT NULL, reason text NOT NULL,
    raw_key bytea, raw_value bytea, header_names text[] NOT NULL, header_values bytea[] NOT NULL,
    found_at timestamptz NOT NULL DEFAULT now(), batch bigint, published_at timestamptz,
    UNIQUE (topic, partition, "offset"));
CREATE INDEX IF NOT EXISTS dead_unpublished ON {s}.dead (id) WHERE published_at IS NULL;
CREATE TABLE IF NOT EXISTS {s}.request (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), verb text NOT NULL, arguments jsonb NOT NULL,
    state text NOT NULL DEFAULT 'asked', answer jsonb, asked_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS {s}.identity (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), views_id uuid NOT NULL);
INSERT INTO {s}.identity (views_id) VALUES (gen_random_uuid()) ON CONFLICT DO NOTHING;
"""
_COLUMN: Final = """
SELECT FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s AND column_name = %s
"""
# A schema of before the identity was noted by entity type.
_ADD_ENTITY: Final = """
ALTER TABLE {s}.topic_identity ADD COLUMN entity text, ADD COLUMN generation int,
    ADD COLUMN partitions int;
UPDATE {s}.topic_identity SET
    entity = substring(topic FROM '([^.]+)[.]changes[.]g[0-9]+$'),
    generation = substring(topic FROM '([0-9]+)$')::int;
UPDATE {s}.topic_identity AS known SET partitions = (
    SELECT count(*) FROM {s}.position AS place
    WHERE place.view_group = known.entity AND place.generation = known.generation);
DELETE FROM {s}.topic_identity WHERE partitions = 0;
"""
# The first form kept views in groups. The main group is the core; each of its views is built again
# as version 2, while readers go on reading version 1.
_SECOND_FORM: Final = """
ALTER TABLE {s}.position RENAME TO position_1;
ALTER TABLE {s}.counters RENAME TO counters_1;
ALTER TABLE {s}.view RENAME TO view_1;
ALTER TABLE {s}.held RENAME TO held_1;
ALTER INDEX {s}.position_pkey RENAME TO position_1_pkey;
ALTER INDEX {s}.counters_pkey RENAME TO counters_1_pkey;
ALTER INDEX {s}.view_pkey RENAME TO view_1_pkey;
ALTER INDEX {s}.held_pkey RENAME TO held_1_pkey;
ALTER TABLE {s}.dead DROP COLUMN view_group;
"""
_COPY_FIRST_FORM: Final = """
INSERT INTO {s}.position (view, version, entity, generation, partition, next_offset, fingerprint)
    SELECT entity || '_latest', 1, entity, generation, partition, next_offset, {core}
    FROM {s}.position_1 WHERE view_group = entity;
INSERT INTO {s}.counters
    SELECT view_group, generation, partition, applied, duplicate, held, dead
    FROM {s}.counters_1 WHERE strpos(view_group, '/') = 0;
INSERT INTO {s}.held
    (entity, generation, partition, key, version, "offset", change_id, row, held_at)
    SELECT view_group, generation, partition, key, version, "offset", change_id, row, held_at
    FROM {s}.held_1 WHERE strpos(view_group, '/') = 0;
INSERT INTO {s}.view (name, version, entity, definition, fingerprint, status, reason, published)
    SELECT name, version, entity, definition, fingerprint || '/1',
        CASE WHEN status = 'left' THEN 'retired' ELSE 'live' END,
        'kept by an earlier form of everstate: it is built again', true
    FROM {s}.view_1 WHERE name <> entity || '_latest';
INSERT INTO {s}.view (name, version, entity, definition, fingerprint, status, published)
    SELECT name, 1, entity, definition, {core}, 'live', true
    FROM {s}.view_1 WHERE name = entity || '_latest';
DROP TABLE {s}.position_1, {s}.counters_1, {s}.view_1, {s}.held_1;
"""
# Number of the advisory lock that keeps two installers apart: "everview" in ASCII.
_INSTALL_LOCK: Final = 0x6576657276696577


class Schema:
    """The tables themselves, and which topic their positions belong to."""

    def __init__(self, connection: Connection, schema_name: str) -> None:
        self.connection, self.schema_name = connection, schema_name

    def install(self) -> None:
        """Make the schema and the control tables; idempotent, and safe for two at once.

        Tables of the first form are taken over in the same transaction.
        """
        s = sql.Identifier(self.schema_name)
        with self.connection.transaction():
            self.lock_installing()
            self.connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(s))
            # Only where it is needed: ALTER TABLE waits for every reader of the table.
            is_first_form = self._has("view", "view_group")
            if is_first_form:
                if not self._has("topic_identity", "entity"):
                    self.connection.execute(sql.SQL(_ADD_ENTITY).format(s=s))
                self.connection.execute(sql.SQL(_SECOND_FORM).format(s=s))
            self.connection.execute(sql.SQL(_DDL).format(s=s))
            if is_first_form:
                copy = sql.SQL(_COPY_FIRST_FORM)
                self.connection.execute(copy.format(s=s, core=sql.Literal(CORE_FINGERPRINT)))

    def lock_installing(self) -> None:
        """Wait until nobody else makes tables; the lock goes with the transaction."""
        self.connection.execute("SELECT pg_advisory_xact_lock(%s)", (_INSTALL_LOCK,))

    def check_topic_identity(
        self, entity: str, topic: str, found: TopicIdentity, generation: int = 1
    ) -> None:
        """Note which topic the positions of an entity type belong to.

        Raises LogIdentityChanged when they belong to another topic, of this name or of another
        `log.prefix` (C8), and TopicResized when the topic has got other partitions.
        """
        from everstate.log.topics import check_same_topic

        with self.connection.transaction():
            # Two keepers of different prefixes must not both find nothing noted.
            self.lock_installing()
            stored = self.stored_topics(entity, generation)
            if not stored:
                query = sql.SQL(
                    "INSERT INTO {} (topic, cluster_id, topic_id, partitions, entity, generation) "
                    "VALUES (%s, %s, %s, %s, %s, %s)"
                ).format(self.table("topic_identity"))
                ids = (found.cluster_id, found.topic_id, found.partitions)
                self.connection.execute(query, (topic, *ids, entity, generation))
        for name, identity in stored.items():
            if name != topic:
                raise LogIdentityChanged(
                    f"the views of {entity} in schema {self.schema_name} are kept from topic "
                    f"{name}; configured is {topic}. Nothing was read."
                )
            check_same_topic(topic, identity, found)

    def stored_topics(self, entity: str, generation: int = 1) -> dict[str, TopicIdentity]:
        """The topic that an entity type's positions belong to; more than one: they were mixed."""
        from everstate.log.topics import TopicIdentity

        query = sql.SQL(
            "SELECT topic, cluster_id, topic_id, partitions FROM {} "
            "WHERE entity = %s AND generation = %s ORDER BY topic"
        ).format(self.table("topic_identity"))
        rows = self.connection.execute(query, (entity, generation)).fetchall()
        return {topic: TopicIdentity(*identity) for topic, *identity in rows}

    def table(self, name: str) -> sql.Identifier:
        """A table of the schema."""
        return sql.Identifier(self.schema_name, name)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read everything inside as of one moment."""
        with self.connection.transaction():
            self.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            yield

    def _has(self, table: str, column: str) -> bool:
        row = self.connection.execute(_COLUMN, (self.schema_name, table, column)).fetchone()
        return row is not None
