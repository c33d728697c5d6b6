-- name: is_installed
SELECT to_regclass('everstate_handlers.parked_key') IS NOT NULL;

-- name: place
INSERT INTO everstate_handlers.position AS present
    (handler, partition, next_offset, done, log, lane)
SELECT %s, %s, %s, %s, %s, generate_series(1, %s)
ON CONFLICT (handler, partition, lane) DO UPDATE SET epoch = present.epoch + 1,
    next_offset = excluded.next_offset, done = excluded.done, log = excluded.log;

-- name: positions
SELECT partition, min(next_offset), max(epoch) FROM everstate_handlers.position
WHERE handler = %s GROUP BY partition;

-- name: logs
SELECT DISTINCT log FROM everstate_handlers.position WHERE handler = %s;

-- name: take
UPDATE everstate_handlers.position SET epoch = epoch + 1
WHERE handler = %s AND partition = %s RETURNING lane, next_offset, done, epoch;

-- name: move
-- A process that stops before it has committed holds up the next owner no longer than this.
WITH given (handler, partition, epoch, limited) AS (
    SELECT %s, %s, %s, set_config('idle_in_transaction_session_timeout', '5s', true))
UPDATE everstate_handlers.position AS present SET next_offset = moved.next_offset, done = moved.done
FROM given, unnest(%s::int[], %s::bigint[], %s::int[]) AS moved (lane, next_offset, done)
WHERE present.handler = given.handler AND present.partition = given.partition
    AND present.epoch = given.epoch AND present.lane = moved.lane AND given.limited IS NOT NULL;

-- name: waiting
SELECT partition, key, id, attempts, CASE WHEN due_at <= clock_timestamp()
    AND sum(4096 + octet_length(value)) OVER first_due - octet_length(value) <= 16777216 THEN value END
FROM (SELECT *, first_value(retry_at) OVER (PARTITION BY partition, key ORDER BY version) AS due_at
    FROM everstate_handlers.parked
    WHERE handler = %s AND partition = ANY(%s) AND (retry_at IS NOT NULL OR NOT %s)) one
WINDOW first_due AS (PARTITION BY partition ORDER BY due_at, key, version)
ORDER BY partition, due_at, key, version;

-- name: fail
WITH given (handler, id, reason, attempts, pause_s) AS (VALUES (%s, %s, %s, %s::int, %s::float8))
UPDATE everstate_handlers.parked AS present SET reason = given.reason, attempts = given.attempts,
    retry_at = clock_timestamp() + make_interval(secs => given.pause_s)
FROM given WHERE present.handler = given.handler AND present.id = given.id;

-- name: park
INSERT INTO everstate_handlers.parked
    (handler, partition, next_offset, done, key, version, value, reason, attempts, retry_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp() + make_interval(secs => %s))
ON CONFLICT (handler, partition, next_offset, done) DO UPDATE SET reason = excluded.reason,
    attempts = excluded.attempts, retry_at = excluded.retry_at;

-- name: counts
SELECT count(*) - count(retry_at), count(retry_at), max(attempts) FILTER (WHERE retry_at IS NOT NULL)
FROM everstate_handlers.parked WHERE handler = %s;

-- name: forget
DELETE FROM everstate_handlers.parked
WHERE handler = %s AND partition = %s AND (next_offset, done) > (%s, %s);

-- name: carry
WITH given (handler, partitions) AS (VALUES (%s, %s::int)), gone AS (
    DELETE FROM everstate_handlers.position AS former USING given
    WHERE former.handler = given.handler AND former.partition >= partitions)
UPDATE everstate_handlers.parked AS present
SET partition = present.partition %% partitions, next_offset = -id
FROM given WHERE present.handler = given.handler;

-- name: lock
SELECT pg_advisory_xact_lock(x'6576657268616E64'::bit(64)::bigint);

-- name: failed
SELECT id, key, version, attempts, retry_at, reason FROM everstate_handlers.parked
WHERE handler = %s AND reason <> '' ORDER BY id LIMIT %s;

-- name: retry
UPDATE everstate_handlers.parked SET retry_at = now(), attempts = 0
WHERE handler = %s AND (%s::bigint[] IS NULL AND reason <> '' OR id = ANY(%s));

-- name: skip
DELETE FROM everstate_handlers.parked
WHERE handler = %s AND (%s::bigint[] IS NULL AND reason <> '' OR id = ANY(%s));
