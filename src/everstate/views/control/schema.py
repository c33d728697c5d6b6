"""Creates the control tables."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from everstate.errors import LogIdentityChanged, NoViews, ViewStoreError
from everstate.postgres import Connection, ReadCursor, identifier, one_snapshot

if TYPE_CHECKING:
    # A process that only reads does not need Kafka's client.
    from everstate.log.topics import TopicIdentity

StatementValues: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Parameters of a statement."""

# EXTERNAL, where values are compressed already, or do not become smaller.
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
    name text NOT NULL, version int NOT NULL, entity text NOT NULL, kind text NOT NULL,
    definition jsonb NOT NULL, fields text[] NOT NULL DEFAULT '{{}}',
    fingerprint text NOT NULL, status text NOT NULL, status_reason text, error text,
    waits_for text, built jsonb, published boolean NOT NULL DEFAULT false, published_at timestamptz,
    met_at xid8, options jsonb, attempt uuid, progress jsonb, undone text,
    declared_at timestamptz NOT NULL DEFAULT now(), changed_at timestamptz NOT NULL DEFAULT now(),
    verified_at timestamptz, verified jsonb, PRIMARY KEY (name, version));
CREATE UNIQUE INDEX IF NOT EXISTS view_published ON {s}.view (name) WHERE published;
CREATE TABLE IF NOT EXISTS {s}.view_number (name text PRIMARY KEY, version int NOT NULL);
INSERT INTO {s}.view_number SELECT name, max(version) FROM {s}.view GROUP BY name
    ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS {s}.reader_name (
    name text PRIMARY KEY, relation oid NOT NULL, shows text NOT NULL);
CREATE TABLE IF NOT EXISTS {s}.entity_model (
    entity text PRIMARY KEY, model jsonb NOT NULL, noted_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS {s}.topic_identity (
    topic text PRIMARY KEY, cluster_id text NOT NULL, topic_id text NOT NULL,
    entity text NOT NULL, generation int NOT NULL, partitions int NOT NULL);
CREATE TABLE IF NOT EXISTS {s}.held (
    entity text NOT NULL, generation int NOT NULL, partition int NOT NULL,
    key text COLLATE "C" NOT NULL, version bigint NOT NULL, "offset" bigint NOT NULL,
    change_id uuid NOT NULL, row bytea NOT NULL, released_at bigint,
    held_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (entity, generation, partition, key, version));
CREATE INDEX IF NOT EXISTS held_offset ON {s}.held (entity, generation, partition, "offset");
CREATE INDEX IF NOT EXISTS held_released ON {s}.held (entity, generation, partition, released_at);
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
CREATE INDEX IF NOT EXISTS dead_offset ON {s}.dead (entity, generation, partition, "offset");
CREATE INDEX IF NOT EXISTS dead_unpublished ON {s}.dead (id) WHERE published_at IS NULL;
CREATE TABLE IF NOT EXISTS {s}.misfit (
    entity text NOT NULL, generation int NOT NULL, partition int NOT NULL, field text NOT NULL,
    schema_version int NOT NULL, count bigint NOT NULL, first_offset bigint NOT NULL,
    last_offset bigint NOT NULL, seen_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (entity, generation, partition, field, schema_version)) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS {s}.request (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), verb text NOT NULL, arguments jsonb NOT NULL,
    state text NOT NULL DEFAULT 'asked', answer jsonb, asked_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS {s}.deferred (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, view text NOT NULL, version int NOT NULL,
    generation int NOT NULL, partition int NOT NULL, changes int NOT NULL,
    first_offset bigint NOT NULL,
    keys bytea STORAGE EXTERNAL NOT NULL, rows bytea STORAGE EXTERNAL NOT NULL);
CREATE INDEX IF NOT EXISTS deferred_place ON {s}.deferred
    (view, version, generation, partition, id);
CREATE TABLE IF NOT EXISTS {s}.stored_table (
    view text NOT NULL, version int NOT NULL, store text NOT NULL, attempt text NOT NULL,
    PRIMARY KEY (view, version, attempt));
CREATE TABLE IF NOT EXISTS {s}.deployment (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, project text NOT NULL,
    started_on text NOT NULL, started_at timestamptz NOT NULL DEFAULT now(),
    declared text[] NOT NULL DEFAULT '{{}}');
CREATE TABLE IF NOT EXISTS {s}.identity (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), views_id uuid NOT NULL);
INSERT INTO {s}.identity (views_id) VALUES (gen_random_uuid()) ON CONFLICT DO NOTHING;
"""
_TABLES: Final = tuple(re.findall(r"CREATE TABLE IF NOT EXISTS {s}\.(\w+)", _DDL))
_COLUMN: Final = """
SELECT FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s AND column_name = %s
"""
# Number of the advisory lock that serializes installers: "everview" in ASCII.
_INSTALL_LOCK: Final = 0x6576657276696577
_TRY_S: Final = 0.1
Duty: TypeAlias = Literal["builds", "answers", "refreshes"]
"""Work that one process at a time does for a schema."""


class Schema:
    """The control tables, their locks, and the topics that their positions belong to."""

    def __init__(self, connection: Connection, schema_name: str) -> None:
        self.connection, self.schema_name = connection, schema_name

    def run(self, text: str, values: StatementValues | None = None) -> ReadCursor:
        """Run a statement; a name in braces is a control table: `SELECT … FROM {position}`."""
        return self.connection.execute(self.statement(text), values)

    def run_each(self, text: str, rows: Iterable[StatementValues]) -> None:
        """Run a statement once for each row of values, in few round trips."""
        with self.connection.cursor() as cursor:
            cursor.executemany(self.statement(text), rows)

    def statement(self, text: str) -> bytes:
        """A statement with the names of the control tables in the place of those in braces."""
        return _statement(self.schema_name, text)

    def value(self, text: str, values: StatementValues | None = None) -> Any:
        """The first column of the first row that a statement gives; ``None``: it gives no row."""
        row = self.run(text, values).fetchone()
        return None if row is None else row[0]

    def run_one(self, text: str, values: StatementValues) -> bool:
        """Run a statement about at most one row; returns whether there was one."""
        return self.run(text, values).rowcount == 1

    def install(self) -> None:
        """Create the schema and the control tables; idempotent, and safe for concurrent calls.

        Raises ViewStoreError where an unreleased version of everstate made them.
        """
        s = identifier(self.schema_name)
        with self.connection.transaction():
            self.lock_installing()
            self.connection.execute(f"CREATE SCHEMA IF NOT EXISTS {s}".encode())
            is_of_today = self._has("view", "waits_for") and self._has("deferred", "first_offset")
            if self._has("view", "name") and not is_of_today:
                raise ViewStoreError(
                    f"the control tables in schema {self.schema_name} were made by an unreleased "
                    "version of everstate; nothing was changed.",
                    advice="Give `views.schema_name` a new value and start `everstate run`: all "
                    "views are built there. To begin with a new log, too, see `everstate log begin "
                    "--help`.",
                )
            self.connection.execute(_DDL.format(s=s).encode())

    @contextmanager
    def installing(self, *, waits: bool = True) -> Iterator[bool]:
        """A transaction in which no other one installs tables or changes which views there are.

        False, and others may do so, when another one does just now and ``waits`` is false.
        """
        with self.connection.transaction():
            if waits:
                self.lock_installing()
            query = "SELECT pg_try_advisory_xact_lock(%s)"
            yield waits or bool(self.value(query, (_INSTALL_LOCK,)))

    def lock_installing(self) -> None:
        """Wait until no other transaction installs tables; the lock ends with the transaction."""
        self.connection.execute("SELECT pg_advisory_xact_lock(%s)", (_INSTALL_LOCK,))

    @contextmanager
    def duty(self, name: Duty | str, *, waits: bool = False) -> Iterator[bool]:
        """Hold a duty for this schema during the block; false when another process holds it.

        With ``waits`` never false: it tries again each 0.1 s, because a statement that waits has a
        snapshot, for which all publications would wait. The lock ends with the connection, so a
        killed process leaves no lock.
        """
        number = (f"everstate {self.schema_name} {name}",)
        call = "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))"
        while not (is_mine := bool(self.value(call, number))) and waits:
            time.sleep(_TRY_S)
        try:
            yield is_mine
        finally:
            if is_mine and not self.connection.closed:
                unlock = "SELECT pg_advisory_unlock(hashtextextended(%s, 0))"
                self.connection.execute(unlock, number)

    def is_on_duty(self, name: Duty) -> bool:
        """Whether some process holds a duty now."""
        query = (
            "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND (classid::bigint << 32) | objid::bigint = hashtextextended(%s, 0))"
        )
        return bool(self.value(query, (f"everstate {self.schema_name} {name}",)))

    def check_topic_identity(
        self, entity: str, topic: str, found: TopicIdentity, generation: int = 1
    ) -> None:
        """Check the topic of an entity type's positions; the first call stores its identity.

        Raises LogIdentityChanged when they belong to another topic, of this name or of another
        `log.prefix` (C8), and TopicResized when the topic's number of partitions has changed.
        """
        from everstate.log.topics import check_same_topic

        if self.stored_topics(entity, generation) == {topic: found}:
            return  # the usual case, without a lock
        with self.connection.transaction():
            # Two keepers with different prefixes must not both find no stored identity.
            self.lock_installing()
            stored = self.stored_topics(entity, generation)
            if not stored:
                ids = (found.cluster_id, found.topic_id, found.partitions)
                self.run(
                    "INSERT INTO {topic_identity} (topic, cluster_id, topic_id, partitions, "
                    "entity, generation) VALUES (%s, %s, %s, %s, %s, %s)",
                    (topic, *ids, entity, generation),
                )
        for name, identity in stored.items():
            if name != topic:
                raise LogIdentityChanged(
                    f"the views of {entity} in schema {self.schema_name} are kept from topic "
                    f"{name}; configured is {topic}. Nothing was read."
                )
            check_same_topic(topic, identity, found)

    def stored_topics(self, entity: str, generation: int = 1) -> dict[str, TopicIdentity]:
        """The topic of an entity type's positions; more than one topic: positions were mixed."""
        from everstate.log.topics import TopicIdentity

        rows = self.run(
            "SELECT topic, cluster_id, topic_id, partitions FROM {topic_identity} "
            "WHERE entity = %s AND generation = %s ORDER BY topic",
            (entity, generation),
        )
        return {topic: TopicIdentity(*identity) for topic, *identity in rows}

    def table(self, name: str) -> str:
        """A table of the schema, as SQL."""
        return identifier(self.schema_name, name)

    def snapshot(self) -> AbstractContextManager[None]:
        """Run the block in one snapshot."""
        return one_snapshot(self.connection)

    def update(self) -> None:
        """As :meth:`install`, where the tables exist; raises NoViews where they were never made.

        For commands that only read: they make nothing.
        """
        if not self._has("view", "name"):
            raise NoViews
        self.install()

    def _has(self, table: str, column: str) -> bool:
        row = self.connection.execute(_COLUMN, (self.schema_name, table, column)).fetchone()
        return row is not None


@lru_cache(maxsize=1024)
def _statement(schema_name: str, text: str) -> bytes:
    """A statement, made once for each schema."""
    tables = {name: identifier(schema_name, name) for name in _TABLES}
    return text.format(**tables).encode()
