"""The store in PostgreSQL as the drift job sees it, and how it sends entities again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from everstate.changes.drift import DRIFT_PROVENANCE, RESENT, Drifted, Heard, Stored
from everstate.config import Config
from everstate.errors import SourceError
from everstate.sources.stores.postgres.database import translated
from everstate.sources.stores.postgres.schema import table_of
from everstate.sources.stores.rows import provenance_text

_FETCH_ROWS: Final = 5_000
_SAMPLE: Final = 10_000

_SIZE: Final = sql.SQL("SELECT reltuples FROM pg_class WHERE oid = %s::regclass")
_KEYS: Final = sql.SQL(
    "SELECT key FROM {table} TABLESAMPLE BERNOULLI (%s) REPEATABLE (1) ORDER BY key"
)
_READ: Final = sql.SQL(
    "SELECT key, version, change_id::text, state FROM {table}"
    " WHERE key > %s AND (%s::text IS NULL OR key <= %s)"
)
_LOGGED: Final = """unnest(%(keys)s::text[], %(versions)s::bigint[], %(ids)s::text[])
    AS logged (key, version, id)"""
# Unpublished changes of a key cross the log's newest one when they begin at or below its version,
# and it is none of them: then the log has other changes of these versions.
_CROSSING: Final = """
    SELECT outbox.key, min(outbox.version) <= logged.version
        AND NOT bool_or(outbox.version = logged.version AND outbox.change_id::text = logged.id)
        AS crosses
    FROM {logged}
    JOIN everstate_store.outbox ON outbox.entity = %(entity)s AND outbox.key = logged.key
    WHERE outbox.id IN (SELECT id FROM everstate_store.outbox_unpublished WHERE entity = %(entity)s)
    GROUP BY outbox.key, logged.version, logged.id
"""
_LOOK: Final = sql.SQL(f"""
SELECT entity.key, entity.version, entity.change_id::text, entity.state,
    coalesce(NOT unpublished.crosses, false)
FROM {_LOGGED} JOIN {{table}} AS entity USING (key)
LEFT JOIN ({_CROSSING.format(logged=_LOGGED)}) AS unpublished USING (key)
""")
_BEHIND: Final = sql.SQL(f"""
SELECT FROM {_LOGGED} LEFT JOIN {{table}} AS entity USING (key)
LEFT JOIN ({_CROSSING.format(logged=_LOGGED)}) AS unpublished USING (key)
WHERE coalesce(entity.version, 0) < logged.version OR unpublished.crosses
LIMIT 1
""")
_STAGE: Final = sql.SQL("""
CREATE TEMP TABLE everstate_drift (
    key text COLLATE "C" PRIMARY KEY, resend boolean NOT NULL, same boolean NOT NULL,
    stored bigint NOT NULL, logged bigint NOT NULL, logged_id text, logged_state text,
    refused boolean NOT NULL
) ON COMMIT DROP
""")
_COPY: Final = sql.SQL("COPY pg_temp.everstate_drift FROM STDIN")
_LOCK: Final = sql.SQL("""
SELECT count(*) FROM (
    SELECT FROM pg_temp.everstate_drift AS drift JOIN {table} AS entity USING (key)
    ORDER BY entity.key FOR UPDATE OF entity
) AS locked
""")

# If the outbox still has all missing versions, they are sent as they were. If one of them is gone,
# all between the log's version and the newest get the original state of the newest: versions stay
# dense and chained, and no state is invented. A deleted entity without any row in the outbox cannot
# be sent and is left out, and so is one whose state readers would refuse. The newest change keeps
# its id, unless another version has that id too (after the version was raised by hand): then the
# entity's row gets a new id.
_RESEND: Final = sql.SQL("""
WITH entities AS (
    SELECT drift.key, drift.logged_state, drift.logged_id, drift.refused,
        entity.version AS newest, entity.change_id,
        entity.state, entity.recorded_at,
        CASE WHEN drift.same THEN entity.version - 1 ELSE drift.logged END AS logged, drift.same
    FROM pg_temp.everstate_drift AS drift JOIN {table} AS entity USING (key)
    WHERE drift.resend AND (NOT drift.same OR entity.version = drift.stored)
), kept AS (
    SELECT DISTINCT ON (outbox.key, outbox.version) outbox.*
    FROM everstate_store.outbox
    JOIN entities ON entities.key = outbox.key
        AND outbox.version > entities.logged AND outbox.version <= entities.newest
    WHERE outbox.entity = %(entity)s
    ORDER BY outbox.key, outbox.version, outbox.id DESC
), reused AS (
    SELECT outbox.key FROM everstate_store.outbox
    JOIN entities ON entities.key = outbox.key AND entities.change_id = outbox.change_id
        AND entities.newest <> outbox.version
    WHERE outbox.entity = %(entity)s
    UNION SELECT key FROM entities WHERE NOT same AND logged_id = change_id::text
), counted AS (
    SELECT key, count(*) AS versions FROM kept GROUP BY key
), judged AS (
    SELECT entities.*, coalesce(counted.versions, 0) = newest - logged AS whole,
        top.key IS NOT NULL AS has_top, reused.key IS NOT NULL AS is_reused,
        coalesce(top.before, entities.state, entities.logged_state) AS fill
    FROM entities LEFT JOIN counted USING (key) LEFT JOIN reused USING (key)
    LEFT JOIN kept AS top
        ON top.key = entities.key AND top.version = entities.newest
        AND top.change_id = entities.change_id
), steps AS (
    SELECT judged.key, number AS version, whole OR (number = newest AND has_top) AS as_kept,
        CASE WHEN number = newest AND NOT is_reused THEN change_id
            ELSE gen_random_uuid() END AS change_id,
        refused AND NOT has_top AS is_refused,
        CASE WHEN number = logged + 1 THEN logged_state ELSE fill END AS before,
        CASE WHEN number = newest THEN state ELSE fill END AS after, recorded_at
    FROM judged, generate_series(logged + 1, newest) AS number
    WHERE whole OR NOT same
), sendable AS (
    SELECT * FROM steps WHERE key NOT IN (
        SELECT key FROM steps
        WHERE NOT as_kept AND (is_refused OR before IS NULL AND after IS NULL)
    )
), sent AS (
    INSERT INTO everstate_store.outbox (entity, key, version, kind, change_id, schema_version,
        occurred_at, recorded_at, provenance, event, before, after)
    SELECT %(entity)s, key, version,
        CASE WHEN as_kept THEN kept.kind WHEN steps.before IS NULL THEN 'created'
            WHEN steps.after IS NULL THEN 'deleted' ELSE 'updated' END,
        CASE WHEN as_kept THEN kept.change_id ELSE steps.change_id END,
        CASE WHEN as_kept THEN kept.schema_version ELSE %(schema_version)s END,
        CASE WHEN as_kept THEN kept.occurred_at
            ELSE to_char(steps.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US')
                || '+00:00' END,
        CASE WHEN as_kept THEN kept.recorded_at ELSE steps.recorded_at END,
        CASE WHEN as_kept THEN kept.provenance ELSE %(provenance)s END,
        CASE WHEN as_kept THEN kept.event END,
        CASE WHEN as_kept THEN kept.before ELSE steps.before END,
        CASE WHEN as_kept THEN kept.after ELSE steps.after END
    FROM sendable AS steps LEFT JOIN kept USING (key, version)
    ORDER BY key, version
    RETURNING id, xid, entity, key, version, change_id,
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
            + coalesce(octet_length(event), 0) AS bytes
), named AS (
    UPDATE {table} AS entity SET change_id = sent.change_id FROM sent
    WHERE entity.key = sent.key AND entity.version = sent.version
        AND entity.change_id <> sent.change_id
), queued AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM sent
)
SELECT count(DISTINCT key) FROM sent
""")

_DRIFT: Final = """(
    SELECT key, drift.logged AS version, drift.logged_id AS id FROM pg_temp.everstate_drift AS drift
    WHERE NOT same AND NOT refused
) AS logged"""
# Unpublished changes that the log cannot take: the version that repairs has their last state.
_WITHDRAW: Final = sql.SQL("""
WITH crossing AS (
    SELECT key FROM ({crossing}) AS unpublished WHERE crosses
), pending AS (
    DELETE FROM everstate_store.outbox_pending AS waiting USING crossing
    WHERE waiting.entity = %(entity)s AND waiting.key = crossing.key RETURNING id
), parked AS (
    DELETE FROM everstate_store.outbox_parked AS waiting USING crossing
    WHERE waiting.entity = %(entity)s AND waiting.key = crossing.key RETURNING id
), freed AS (
    -- Others may be parked behind these. The relay parks again what must wait.
    DELETE FROM everstate_store.outbox_parked AS waiting
    WHERE EXISTS (SELECT FROM parked) AND (waiting.entity <> %(entity)s
        OR NOT EXISTS (SELECT FROM crossing WHERE crossing.key = waiting.key))
    RETURNING id, xid, entity, key, bytes
), again AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM freed ON CONFLICT DO NOTHING
), unblocked AS (
    DELETE FROM everstate_store.relay_blocked WHERE EXISTS (SELECT FROM parked)
)
DELETE FROM everstate_store.outbox
WHERE id IN (SELECT id FROM pending UNION ALL SELECT id FROM parked)
""")

# When neither side has a state, there is nothing to send: the store takes the log's version.
_FOLLOW: Final = sql.SQL("""
WITH followed AS (
    INSERT INTO {table} AS present (key, version, change_id, recorded_at)
    SELECT drift.key, drift.logged, drift.logged_id::uuid, now()
    FROM pg_temp.everstate_drift AS drift LEFT JOIN {table} AS entity USING (key)
    WHERE drift.logged > 0 AND drift.logged_state IS NULL AND entity.state IS NULL
        AND coalesce(entity.version, 0) = drift.stored
        AND (entity.version, entity.change_id::text)
            IS DISTINCT FROM (drift.logged, drift.logged_id)
        AND NOT EXISTS (
            SELECT FROM everstate_store.outbox_unpublished AS unpublished
            WHERE unpublished.entity = %(entity)s AND unpublished.key = drift.key
        )
    ORDER BY drift.key
    ON CONFLICT (key) DO UPDATE
        SET version = excluded.version, change_id = excluded.change_id
        WHERE present.state IS NULL
    RETURNING key
)
SELECT count(*) FROM followed
""")

# Makes a new version above both sides, from the newest state in the log to the state in the store.
# When neither has a state, there is no change to make.
_RESTATE: Final = sql.SQL("""
WITH entities AS (
    SELECT drift.key, drift.logged_state AS before, entity.state AS after,
        greatest(drift.logged, coalesce(entity.version, 0)) + 1 AS version
    FROM pg_temp.everstate_drift AS drift LEFT JOIN {table} AS entity USING (key)
    WHERE NOT drift.resend AND NOT drift.refused AND coalesce(entity.version, 0) = drift.stored
        AND (drift.logged_state IS NOT NULL OR entity.state IS NOT NULL)
), stored AS (
    INSERT INTO {table} AS present (key, version, state, change_id, recorded_at)
    SELECT key, version, after, gen_random_uuid(), now() FROM entities ORDER BY key
    ON CONFLICT (key) DO UPDATE SET version = excluded.version, change_id = excluded.change_id,
        -- The last version may come from a writer whose clock is ahead: time must not run back.
        recorded_at = greatest(present.recorded_at, excluded.recorded_at)
    WHERE present.state IS NOT DISTINCT FROM excluded.state
    RETURNING key, version, state, change_id, recorded_at
), sent AS (
    INSERT INTO everstate_store.outbox (entity, key, version, kind, change_id, schema_version,
        occurred_at, recorded_at, provenance, before, after)
    SELECT %(entity)s, key, stored.version,
        CASE WHEN entities.before IS NULL THEN 'created'
            WHEN stored.state IS NULL THEN 'deleted' ELSE 'updated' END,
        change_id, %(schema_version)s,
        to_char(recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') || '+00:00',
        recorded_at, %(provenance)s, entities.before, stored.state
    FROM stored JOIN entities USING (key) ORDER BY key
    RETURNING id, xid, entity, key,
        coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
            + coalesce(octet_length(event), 0) AS bytes
), queued AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM sent
)
SELECT count(*) FROM sent
""")


@dataclass(frozen=True)
class PostgresTruth:
    """The entities of one type in the store; changes go to the log through its outbox."""

    dsn: str
    entity: str
    schema_version: int

    @staticmethod
    def of(config: Config, entity: str, schema_version: int) -> PostgresTruth:
        """The truth of an entity type in the configured store."""
        return PostgresTruth(config.store_dsn, entity, schema_version)

    def slices(self, count: int) -> Sequence[str]:
        """Key ranges of about equal size, from a sample. Cost: one scan of the key column."""
        with self._connected() as connection:
            name = table_of(self.entity).as_string(connection)
            row = connection.execute(_SIZE, [name]).fetchone()
            rows = max(1.0, float(row[0]) if row else 1.0)
            share = min(100.0, 100.0 * _SAMPLE / rows)
            found = connection.execute(self._for(_KEYS), [share]).fetchall()
        keys = [key for (key,) in found]
        cuts = sorted({keys[len(keys) * n // count] for n in range(1, count)}) if keys else []
        return [json.dumps(pair) for pair in zip(["", *cuts], [*cuts, None], strict=True)]

    def read(self, piece: str) -> Iterator[Stored]:
        """Entities of a key range, through a cursor."""
        low, high = json.loads(piece)
        with self._connected() as connection, connection.cursor(name="drift") as cursor:
            cursor.itersize = _FETCH_ROWS
            cursor.execute(self._for(_READ), [low, high, high])
            for row in cursor:
                yield Stored(*row)

    def look(self, logged: Mapping[str, Heard]) -> Mapping[str, tuple[Stored, bool]]:
        """Present rows, and whether the outbox has changes of each that the log can take."""
        with self._connected() as connection:
            rows = connection.execute(self._for(_LOOK), self._values(logged)).fetchall()
        return {row[0]: (Stored(*row[:4]), bool(row[4])) for row in rows}

    def is_behind(self, logged: Mapping[str, Heard]) -> bool:
        """Whether the log has a version of these keys that the store lacks, or would send again."""
        with self._connected() as connection:
            return bool(connection.execute(self._for(_BEHIND), self._values(logged)).fetchall())

    def _values(self, logged: Mapping[str, Heard]) -> dict[str, Any]:
        versions, ids = [each.version for each in logged.values()], [i for _, i in logged.values()]
        return {"keys": list(logged), "versions": versions, "ids": ids, "entity": self.entity}

    def repair(self, drifted: Sequence[Drifted]) -> int:
        """Put the repairs into the outbox, in one transaction of a few statements."""
        values: dict[str, Any] = {
            "entity": self.entity,
            "schema_version": self.schema_version,
            "provenance": provenance_text(self.entity, "", DRIFT_PROVENANCE),
        }
        done = 0
        with self._connected() as connection:
            connection.execute(_STAGE)
            with connection.cursor().copy(_COPY) as copy:
                for each in drifted:
                    resend, same = each.what in RESENT, each.what == "same"
                    logged = (each.logged, each.logged_id, each.logged_state)
                    refused = each.refused is not None
                    copy.write_row((each.key, resend, same, each.stored, *logged, refused))
            connection.execute("ANALYZE pg_temp.everstate_drift")
            connection.execute(self._for(_LOCK))
            crossing = sql.SQL(_CROSSING.format(logged=_DRIFT))
            connection.execute(_WITHDRAW.format(crossing=crossing), values)
            for statement in (_RESEND, _RESTATE, _FOLLOW):
                found = connection.execute(self._for(statement), values).fetchone()
                done += int(found[0]) if found else 0
        return done

    def _for(self, statement: sql.SQL) -> sql.Composed:
        return statement.format(table=table_of(self.entity))

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """One transaction with the planner's default settings, because whole tables are joined."""
        options = "-c jit=off -c timezone=UTC"
        doing = f"{self.entity}: looking for drift"
        try:
            with (
                translated(self.dsn, doing),
                psycopg.connect(
                    self.dsn, options=options, application_name="everstate-drift"
                ) as connection,
            ):
                yield connection
        except psycopg.errors.UndefinedTable as cause:
            raise SourceError(
                f"{doing}: the store has no table of its entities.",
                advice="What services emit into their own tables cannot be compared.",
            ) from cause
        except psycopg.Error as cause:
            reason = str(cause).strip().partition("\n")[0]
            raise SourceError(f"{doing}: PostgreSQL refuses: {reason}") from cause
