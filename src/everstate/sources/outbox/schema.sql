-- The store's schema. It runs under one advisory lock, until its last object is there.
CREATE SCHEMA IF NOT EXISTS everstate_store;

-- Which store this is: a relay's memory in the log must never be applied to another one.
CREATE TABLE IF NOT EXISTS everstate_store.identity (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    store_id uuid NOT NULL
);
INSERT INTO everstate_store.identity (store_id) VALUES (gen_random_uuid())
ON CONFLICT DO NOTHING;

-- Every change that was committed, until trimmed. Rows are never updated. The xid is the writing
-- transaction's own (never the row's xmin, which a dump or a freeze changes). States are the JSON
-- text that the codec made, so that the message carries them unchanged; occurred_at keeps the
-- offset with which the writer said it.
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

-- What of the outbox is not yet known to be in the log, and may go. Narrow, because it is
-- written, read and deleted once for each change: a tenth of flagging the wide row.
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

-- What was published when, for trimming and for refilling a log that lost its tail.
CREATE TABLE IF NOT EXISTS everstate_store.outbox_published (
    minute timestamptz PRIMARY KEY,
    ids int8multirange NOT NULL
);

-- Which topic the changes of each entity type go to: two logs must not each get a part of them.
CREATE TABLE IF NOT EXISTS everstate_store.published_to (
    entity text COLLATE "C" PRIMARY KEY,
    topic text NOT NULL,
    cluster_id text NOT NULL,
    topic_id text NOT NULL,
    partitions integer NOT NULL
);

-- The newest batch of each relay whose rows were taken off outbox_pending.
CREATE TABLE IF NOT EXISTS everstate_store.relay (
    name text PRIMARY KEY,
    batch bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- Transactions that the log does not take, with the change that is to blame.
CREATE TABLE IF NOT EXISTS everstate_store.relay_blocked (
    xid xid8 PRIMARY KEY,
    entity text NOT NULL,
    key text NOT NULL,
    version bigint NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL DEFAULT now()
);
-- When it is tried again, and the wait after that; `is_tried`: now, so it is pending as well.
ALTER TABLE everstate_store.relay_blocked
    ADD COLUMN IF NOT EXISTS retry_at timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN IF NOT EXISTS delay_s double precision NOT NULL DEFAULT 30,
    ADD COLUMN IF NOT EXISTS is_tried boolean NOT NULL DEFAULT false;
CREATE INDEX IF NOT EXISTS relay_blocked_retry_at ON everstate_store.relay_blocked (retry_at);

-- Entity types that services may emit (functions.sql), and what their changes are held to.
CREATE TABLE IF NOT EXISTS everstate_store.registered (
    entity text COLLATE "C" PRIMARY KEY,
    schema_version integer NOT NULL,
    key_field text NOT NULL,
    required text[] NOT NULL,
    is_event boolean NOT NULL,
    message_bytes_max integer NOT NULL,
    ahead_hours double precision NOT NULL DEFAULT 24,
    -- What a state's JSON is, field by field; null: registered by an earlier release, not checked.
    shape jsonb
);

-- Which services the login roles of services may name as the writer of their changes.
CREATE TABLE IF NOT EXISTS everstate_store.emitters (
    role name NOT NULL,
    service text COLLATE "C" NOT NULL,
    PRIMARY KEY (role, service)
);

-- The replication slot of each relay that reads one. `spooled`: up to there, what stood in the WAL
-- only was put into the outbox, because the log did not take all.
CREATE TABLE IF NOT EXISTS everstate_store.relay_slot (
    name text PRIMARY KEY,
    slot text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    spooled pg_lsn NOT NULL DEFAULT '0/0'
);
-- The relay polls, because of something that the log refused, and must not stream after a restart.
ALTER TABLE everstate_store.relay_slot
    ADD COLUMN IF NOT EXISTS polls boolean NOT NULL DEFAULT false;

-- Messages in the WAL under our prefix that no change can be made of, byte for byte.
CREATE TABLE IF NOT EXISTS everstate_store.relay_refused (
    lsn pg_lsn PRIMARY KEY,
    content bytea NOT NULL,
    reason text NOT NULL,
    since timestamptz NOT NULL DEFAULT now()
);

-- Unpublished changes that wait: of transactions in relay_blocked, and later changes of their keys.
-- In a table of its own, so that reading what may go costs the same however many wait.
CREATE TABLE IF NOT EXISTS everstate_store.outbox_parked (
    id bigint PRIMARY KEY,
    xid xid8 NOT NULL,
    entity text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    bytes integer NOT NULL
);
CREATE INDEX IF NOT EXISTS outbox_parked_xid ON everstate_store.outbox_parked (xid);
CREATE INDEX IF NOT EXISTS outbox_parked_key ON everstate_store.outbox_parked (entity, key, id);

-- All that is not yet known to be in the log; what is being tried again is there twice.
CREATE OR REPLACE VIEW everstate_store.outbox_unpublished AS
    SELECT id, xid, entity, key FROM everstate_store.outbox_pending
    UNION ALL SELECT id, xid, entity, key FROM everstate_store.outbox_parked;

-- What a relay reads of the WAL. Without wal_level = logical it does nothing (and warns).
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = 'everstate_outbox') THEN
        CREATE PUBLICATION everstate_outbox FOR TABLE everstate_store.outbox
            WITH (publish = 'insert');
    END IF;
END $$;
