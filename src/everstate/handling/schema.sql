CREATE SCHEMA IF NOT EXISTS everstate_handlers;

-- The position of each lane of a partition; `done`: changes at `next_offset` itself that are
-- handled. Who takes the partition over raises `epoch`, which each transaction compares.
CREATE TABLE IF NOT EXISTS everstate_handlers.position (
    handler text, partition int, lane int, next_offset bigint NOT NULL, done int NOT NULL,
    epoch bigint NOT NULL DEFAULT 0, log bytea NOT NULL,
    PRIMARY KEY (handler, partition, lane)
) WITH (fillfactor = 20);

-- Changes whose call failed, and those behind them (with an empty reason), with the position after
-- each. Without `retry_at` a change is called again only when a command says so.
CREATE TABLE IF NOT EXISTS everstate_handlers.parked (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, handler text NOT NULL,
    partition int NOT NULL, next_offset bigint NOT NULL, done int NOT NULL,
    key text COLLATE "C" NOT NULL, version bigint NOT NULL,
    value bytea STORAGE EXTERNAL NOT NULL, reason text NOT NULL,
    attempts int NOT NULL, retry_at timestamptz,
    UNIQUE (handler, partition, next_offset, done)
);
CREATE INDEX IF NOT EXISTS parked_key ON everstate_handlers.parked
    (handler, partition, key, version);
