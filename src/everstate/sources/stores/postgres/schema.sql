-- The store's schema. It runs under one advisory lock until its last object exists.
CREATE SCHEMA IF NOT EXISTS everstate_store;

-- The identity of this store: a relay's progress in the log must never be applied to another store.
CREATE TABLE IF NOT EXISTS everstate_store.identity (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    store_id uuid NOT NULL
);
INSERT INTO everstate_store.identity (store_id) VALUES (gen_random_uuid())
ON CONFLICT DO NOTHING;

-- Every change that was committed, until trimmed. Rows are never updated. The xid is the writing
-- transaction's own (never the row's xmin, which a dump or a freeze changes). States are the JSON
-- text that the codec made, so that the message has them unchanged; occurred_at keeps the UTC
-- offset that the writer gave.
CREATE TABLE IF NOT EXISTS everstate_store.outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    entity text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    version bigint NOT NULL CHECK (version > 0),
    kind text NOT NULL,
    change_id uuid NOT NULL,
    schema_version integer NOT NULL,
    occurred_at text NOT NULL,
    recorded_at timestamptz NOT NULL,
    provenance text NOT NULL,
    event text,
    before text,
    after text
) WITH (autovacuum_vacuum_insert_scale_factor = 0.5, autovacuum_analyze_scale_factor = 0.5);

-- Outbox rows that are not yet known to be in the log, and may be published. The table is narrow,
-- because a row is written, read and deleted for each change; that costs a tenth of updating a flag
-- in the wide outbox row.
CREATE TABLE IF NOT EXISTS everstate_store.outbox_pending (
    id bigint PRIMARY KEY,
    xid xid8 NOT NULL,
    entity text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    bytes integer NOT NULL
) WITH (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 200000
);
CREATE INDEX IF NOT EXISTS outbox_pending_xid ON everstate_store.outbox_pending (xid);

-- Which ids were published when, for trimming, and for publishing again to a log that lost its end.
CREATE TABLE IF NOT EXISTS everstate_store.outbox_published (
    minute timestamptz PRIMARY KEY,
    ids int8multirange NOT NULL
);

-- The topic of each entity type's changes: two logs must not each get only a part of them.
CREATE TABLE IF NOT EXISTS everstate_store.published_to (
    entity text COLLATE "C" PRIMARY KEY,
    topic text NOT NULL,
    cluster_id text NOT NULL,
    topic_id text NOT NULL,
    partitions integer NOT NULL
);

-- The newest batch of each relay whose rows were deleted from outbox_pending. The row `<name>.begun`
-- has the batch that was the newest when the store was bound to its present log.
CREATE TABLE IF NOT EXISTS everstate_store.relay (
    name text PRIMARY KEY,
    batch bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- Transactions that the log rejects, with the change that is the cause.
CREATE TABLE IF NOT EXISTS everstate_store.relay_blocked (
    xid xid8 PRIMARY KEY,
    entity text NOT NULL,
    key text NOT NULL,
    version bigint NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    -- When the next attempt is made, and the pause after it.
    retry_at timestamptz NOT NULL DEFAULT now(),
    delay_s double precision NOT NULL DEFAULT 30,
    -- It is being tried now, so that its rows are in outbox_pending as well.
    is_tried boolean NOT NULL DEFAULT false
);
CREATE INDEX IF NOT EXISTS relay_blocked_retry_at ON everstate_store.relay_blocked (retry_at);

-- Entity types that services may emit (functions.sql), and the rules for their changes.
CREATE TABLE IF NOT EXISTS everstate_store.registered (
    entity text COLLATE "C" PRIMARY KEY,
    schema_version integer NOT NULL,
    key_field text NOT NULL,
    required text[] NOT NULL,
    is_event boolean NOT NULL,
    message_bytes_max integer NOT NULL,
    ahead_hours double precision NOT NULL DEFAULT 24,
    -- The JSON types of a state's fields; null: an earlier release registered it, so nothing is checked.
    shape jsonb,
    -- Whether fields that the type does not have are refused.
    refuses_unknown boolean NOT NULL DEFAULT false,
    -- Fields that a stored state may have and that no writer need know; null: nothing is checked.
    former text[]
);

-- The services for which each login role may write changes.
CREATE TABLE IF NOT EXISTS everstate_store.emitters (
    role name NOT NULL,
    service text COLLATE "C" NOT NULL,
    PRIMARY KEY (role, service)
);

-- Unpublished changes that wait: those of transactions in relay_blocked, and later changes of their
-- keys. They have a table of their own, so that reading publishable rows costs the same however many
-- rows wait.
CREATE TABLE IF NOT EXISTS everstate_store.outbox_parked (
    id bigint PRIMARY KEY,
    xid xid8 NOT NULL,
    entity text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    bytes integer NOT NULL
);
CREATE INDEX IF NOT EXISTS outbox_parked_xid ON everstate_store.outbox_parked (xid);
CREATE INDEX IF NOT EXISTS outbox_parked_key ON everstate_store.outbox_parked (entity, key, id);

-- All rows that are not yet known to be in the log; rows that are being retried are in both tables.
CREATE OR REPLACE VIEW everstate_store.outbox_unpublished AS
    SELECT id, xid, entity, key FROM everstate_store.outbox_pending
    UNION ALL SELECT id, xid, entity, key FROM everstate_store.outbox_parked;
