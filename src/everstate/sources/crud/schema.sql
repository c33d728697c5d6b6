-- Requests that were answered, by caller and Idempotency-Key: written in the transaction of the
-- write itself, so that an answer is here exactly when the write is.
CREATE TABLE IF NOT EXISTS everstate_store.answered (
    id text COLLATE "C" PRIMARY KEY,
    fingerprint text NOT NULL,
    answer text,
    answered_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS answered_at ON everstate_store.answered (answered_at);
