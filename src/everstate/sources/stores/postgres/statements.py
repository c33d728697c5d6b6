"""The SQL of the store, with the reasons for each statement.

Order of locks: an entity's row first, its outbox row (and so its outbox id) after that, keys in C
collation. Therefore the later of two changes of one key has the higher outbox id, though not always
the higher xid (C1), and two writers of the same keys do not deadlock.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from everstate.sources.stores.postgres.schema import table_of

INCOMING: Final = sql.SQL("""
CREATE TEMP TABLE IF NOT EXISTS everstate_incoming (
    n integer NOT NULL, key text COLLATE "C" NOT NULL, state text NOT NULL,
    change_id uuid NOT NULL, occurred_at text NOT NULL, provenance text NOT NULL, event text
) ON COMMIT DELETE ROWS
""")

COPY_INCOMING: Final = sql.SQL("COPY pg_temp.everstate_incoming FROM STDIN (FORMAT binary)")
INCOMING_TYPES: Final = ("int4", "text", "text", "uuid", "text", "text", "text")

SET_STATES: Final = sql.SQL("""
UPDATE pg_temp.everstate_incoming AS incoming SET state = stored.state
FROM unnest(%s::integer[], %s::text[]) AS stored (n, state) WHERE incoming.n = stored.n
""")
"""Replaces the states of rows, by the place of the row."""

FORGET_INCOMING: Final = sql.SQL("DELETE FROM pg_temp.everstate_incoming")
"""Needed between two calls in one transaction of the caller."""

KEEP: Final = sql.SQL(
    "INSERT INTO everstate_store.answered (id, fingerprint) VALUES (%s, %s) ON CONFLICT DO NOTHING"
)
ANSWER: Final = sql.SQL("UPDATE everstate_store.answered SET answer = %s WHERE id = %s")
ANSWERED: Final = sql.SQL(
    "SELECT fingerprint, answer FROM everstate_store.answered WHERE id = %s AND answer IS NOT NULL"
)
FORGET: Final = sql.SQL("""
DELETE FROM everstate_store.answered WHERE id IN (
    SELECT id FROM everstate_store.answered
    WHERE answered_at < now() - make_interval(secs => %s)
    ORDER BY answered_at LIMIT %s FOR UPDATE SKIP LOCKED
)
""")


PROGRESS: Final = sql.SQL(
    "SELECT next_row, rows FROM everstate_store.import_progress WHERE id = %s"
)
# No row when another import of the same file came in between.
ADVANCE: Final = sql.SQL("""
INSERT INTO everstate_store.import_progress AS present (id, entity, next_row, rows)
VALUES (%(id)s, %(entity)s, %(next_row)s, %(rows)s)
ON CONFLICT (id) DO UPDATE
SET next_row = excluded.next_row, rows = excluded.rows, updated_at = now()
WHERE present.next_row = %(from_row)s
""")
FINISH: Final = sql.SQL("""
DELETE FROM everstate_store.import_progress
WHERE starts_with(id, %s) OR updated_at < now() - interval '90 days'
""")


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
        self.before_many = _BEFORE_MANY.format(**names)
        self.write_many = _WRITE_MANY.format(**names)
        self.page = _PAGE.format(**names)


# One write. The entity's row is locked, or did not exist. The statement returns no row when another
# writer inserted it in between. The outbox row is made from `stored`, so it gets its id only after
# the entity's row is locked.
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
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
            + coalesce(octet_length(event), 0) AS bytes
)
INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
SELECT id, xid, entity, key, bytes FROM sent
""")

# Locking and reading are two statements, because under READ COMMITTED only a new statement is
# guaranteed to see what the former holder of a lock has committed (C18).
_LOCK_MANY: Final = sql.SQL("""
SELECT count(*) FROM (
    SELECT FROM (SELECT DISTINCT key FROM pg_temp.everstate_incoming) AS incoming
    JOIN {table} AS present ON present.key = incoming.key
    ORDER BY present.key FOR UPDATE OF present
) AS locked
""")

_BEFORE_MANY: Final = sql.SQL("""
SELECT present.key, present.state FROM {table} AS present
WHERE present.key IN (SELECT key FROM pg_temp.everstate_incoming) AND present.state IS NOT NULL
""")

# Many writes, possibly several of one key. A key that did not exist when the rows were locked may
# have been inserted since: then fewer rows are stored than there are keys, or more of them existed
# than were locked and asked what they keep; the call is repeated.
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
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
            + coalesce(octet_length(event), 0) AS bytes
), pending AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM sent
), largest AS (
    SELECT key, size FROM steps ORDER BY size DESC LIMIT 1
)
SELECT
    (SELECT count(*) FROM steps), (SELECT count(*) FROM steps WHERE newest),
    (SELECT count(*) FROM updated) + (SELECT count(*) FROM inserted),
    (SELECT count(DISTINCT key) FROM chained WHERE base > 0),
    (SELECT key FROM largest), (SELECT size FROM largest)
""")

# A page reads at most `scan` rows and returns those that match, until they have `bytes` bytes. It
# also returns the last key that it read, because the next page starts after it even when no row
# matched, and how many rows matched.
_PAGE: Final = sql.SQL("""
WITH looked AS MATERIALIZED (
    SELECT key, version, state FROM {table}
    WHERE key > %(after)s ORDER BY key LIMIT %(scan)s
), shown AS (
    SELECT key, version, state, %(missing)s::jsonb || state::jsonb || coalesce((
        SELECT jsonb_object_agg(pair ->> 0, state::jsonb -> (pair ->> 1))
        FROM jsonb_array_elements(%(former)s::jsonb) AS pair
        WHERE coalesce(state::jsonb -> (pair ->> 0), 'null') = 'null'
            AND state::jsonb -> (pair ->> 1) <> 'null'
    ), '{{}}') AS fields FROM looked
), wanted AS (
    SELECT key, version, state FROM shown
    WHERE state IS NOT NULL AND (%(equal)s::jsonb = '{{}}' OR fields @> %(equal)s::jsonb)
        AND NOT EXISTS (
            SELECT FROM jsonb_each_text(%(numbers)s::jsonb) AS number,
                LATERAL (SELECT fields ->> number.key) AS shown(text)
            WHERE CASE WHEN pg_input_is_valid(shown.text, 'numeric')
                THEN shown.text::numeric <> number.value::numeric ELSE true END
        )
    ORDER BY key LIMIT %(limit)s
), sized AS (
    SELECT *, sum(octet_length(state)) OVER (ORDER BY key) - octet_length(state) AS before
    FROM wanted
)
SELECT key, version, state FROM sized WHERE before < %(bytes)s
UNION ALL
SELECT max(key), count(*), (SELECT count(*) FROM wanted)::text FROM looked
""")
