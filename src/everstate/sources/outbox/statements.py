"""The SQL of the store, and why each statement is as it is.

Order of locks: an entity's row first, its outbox row (and so its outbox id) after that, keys in C
collation. Hence of two changes of one key the later has the higher id and the higher xid need not
(C1), and two writers of the same keys do not deadlock.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from everstate.sources.outbox.schema import table_of

ENVELOPE_BYTES: Final = 704
"""More than the envelope's own text: field names, id, times, numbers, transaction block."""
KEY_FACTOR: Final = 6
"""Most bytes that JSON needs for one byte of a key."""

INCOMING: Final = sql.SQL("""
CREATE TEMP TABLE IF NOT EXISTS everstate_incoming (
    n integer NOT NULL, key text COLLATE "C" NOT NULL, state text NOT NULL,
    change_id uuid NOT NULL, occurred_at text NOT NULL, provenance text NOT NULL, event text
) ON COMMIT DELETE ROWS
""")

COPY_INCOMING: Final = sql.SQL("COPY pg_temp.everstate_incoming FROM STDIN (FORMAT binary)")
INCOMING_TYPES: Final = ("int4", "text", "text", "uuid", "text", "text", "text")

FORGET_INCOMING: Final = sql.SQL("DELETE FROM pg_temp.everstate_incoming")
"""Between two calls in one transaction of the caller's."""


class Statements:
    """The statements of one entity type's table."""

    def __init__(self, entity: str) -> None:
        names = {"table": table_of(entity)}
        self.get = sql.SQL(
            "SELECT version, state FROM {table} WHERE key = %s",
        ).format(**names)
        self.lock = sql.SQL(
            "SELECT version, state FROM {table} WHERE key = %s FOR UPDATE",
        ).format(**names)
        self.write = _WRITE.format(**names)
        self.lock_many = _LOCK_MANY.format(**names)
        self.write_many = _WRITE_MANY.format(**names)


# One write. The row is locked, or was not there. No row comes back when somebody inserted it in
# between. The outbox takes its id from `stored`, so never before the entity's row is ours.
_WRITE: Final = sql.SQL("""
WITH stored AS (
    INSERT INTO {table} AS present (key, version, state, change_id, recorded_at)
    VALUES (%(key)s, %(version)s, %(after)s, %(change_id)s, %(recorded_at)s)
    ON CONFLICT (key) DO UPDATE SET
        version = excluded.version, state = excluded.state,
        change_id = excluded.change_id,
        -- It was taken before the lock: it must not run back.
        recorded_at = greatest(present.recorded_at, excluded.recorded_at)
    WHERE present.version = excluded.version - 1
    RETURNING key, version, state, change_id, recorded_at
), sent AS (
    INSERT INTO everstate_store.outbox (entity, key, version, kind, change_id, schema_version,
        occurred_at, recorded_at, provenance, event, before, after)
    SELECT %(entity)s, key, version, %(kind)s, change_id, %(schema_version)s,
        %(occurred_at)s, recorded_at, %(provenance)s, %(event)s, %(before)s, state
    FROM stored
    RETURNING id, xid, entity, key,
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0) AS bytes
)
INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
SELECT id, xid, entity, key, bytes FROM sent
""")

# Locking and reading are two statements, because under READ COMMITTED only a new statement is
# sure to see what the holder of a lock has committed meanwhile (C18).
_LOCK_MANY: Final = sql.SQL("""
SELECT count(*) FROM (
    SELECT FROM (SELECT DISTINCT key FROM pg_temp.everstate_incoming) AS incoming
    JOIN {table} AS present ON present.key = incoming.key
    ORDER BY present.key FOR UPDATE OF present
) AS locked
""")

# Many writes, several of one key among them. A key that was not there at the lock may have been
# inserted since: then fewer rows are stored than there are keys, and the call starts over.
_WRITE_MANY: Final = sql.SQL("""
WITH chained AS (
    SELECT incoming.*, coalesce(present.version, 0) AS base,
        greatest(present.recorded_at, %(recorded_at)s) AS recorded_at,
        lag(incoming.state, 1, present.state) OVER by_key AS before
    FROM pg_temp.everstate_incoming AS incoming
    LEFT JOIN {table} AS present ON present.key = incoming.key
    WINDOW by_key AS (PARTITION BY incoming.key ORDER BY incoming.n)
), steps AS MATERIALIZED (
    SELECT *, base + row_number() OVER by_key AS version,
        lead(n) OVER by_key IS NULL AS newest,
        greatest(octet_length(state), octet_length(before)) + octet_length(provenance)
            + coalesce(octet_length(event), 0) + %(key_factor)s * octet_length(key)
            + %(envelope_bytes)s AS size
    FROM chained
    WHERE %(force)s OR before IS DISTINCT FROM state
    WINDOW by_key AS (PARTITION BY key ORDER BY n)
), updated AS (
    UPDATE {table} AS present
    SET version = steps.version, state = steps.state, change_id = steps.change_id,
        recorded_at = steps.recorded_at
    FROM steps
    WHERE steps.newest AND steps.base > 0 AND present.key = steps.key
        AND present.version = steps.base
    RETURNING present.key
), inserted AS (
    INSERT INTO {table} (key, version, state, change_id, recorded_at)
    SELECT key, version, state, change_id, %(recorded_at)s
    FROM steps WHERE newest AND base = 0 ORDER BY key
    ON CONFLICT (key) DO NOTHING
    RETURNING key
), sent AS (
    INSERT INTO everstate_store.outbox (entity, key, version, kind, change_id, schema_version,
        occurred_at, recorded_at, provenance, event, before, after)
    SELECT %(entity)s, key, version, CASE WHEN before IS NULL THEN 'created' ELSE 'updated' END,
        change_id, %(schema_version)s, occurred_at, recorded_at, provenance, event, before, state
    FROM steps ORDER BY n
    RETURNING id, xid, entity, key,
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0) AS bytes
), pending AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM sent
), largest AS (
    SELECT key, size FROM steps ORDER BY size DESC LIMIT 1
)
SELECT
    (SELECT count(*) FROM steps), (SELECT count(*) FROM steps WHERE newest),
    (SELECT count(*) FROM updated) + (SELECT count(*) FROM inserted),
    (SELECT key FROM largest), (SELECT size FROM largest)
""")
