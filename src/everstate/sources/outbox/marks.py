"""What a relay writes to the outbox: published batches are marked, and old rows trimmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from psycopg import sql
from psycopg.errors import UndefinedTable

from everstate.config import Config
from everstate.sources.stores.postgres.bound import BEGIN
from everstate.sources.stores.postgres.database import OutboxConnection, connect, translated

Runs = Sequence[tuple[int, int]]

_MARK: Final = sql.SQL("""
WITH run AS (
    SELECT first, last FROM unnest(%(firsts)s::bigint[], %(lasts)s::bigint[]) AS run (first, last)
), gone AS (
    DELETE FROM everstate_store.outbox_pending AS pending USING run
    WHERE pending.id BETWEEN run.first AND run.last
    RETURNING pending.id
), batch AS (
    INSERT INTO everstate_store.relay (name, batch) VALUES ('main', %(batch)s)
    ON CONFLICT (name) DO UPDATE SET batch = excluded.batch, updated_at = now()
), published AS (
    INSERT INTO everstate_store.outbox_published AS present (minute, ids)
    SELECT date_trunc('minute', now()), range_agg(int8range(first, last, '[]')) FROM run
    HAVING count(*) > 0
    ON CONFLICT (minute) DO UPDATE SET ids = present.ids + excluded.ids
)
SELECT count(*) FROM gone
""")

_BATCH: Final = sql.SQL("""
SELECT store_id, coalesce((SELECT batch FROM everstate_store.relay WHERE name = 'main'), 0),
    coalesce((SELECT batch FROM everstate_store.relay WHERE name = 'main.begun'), 0)
FROM everstate_store.identity
""")

_CHANGE_IDS: Final = sql.SQL("""
SELECT outbox.change_id
FROM unnest(%s::bigint[], %s::bigint[]) AS run (first, last)
JOIN everstate_store.outbox_pending AS pending ON pending.id BETWEEN run.first AND run.last
JOIN everstate_store.outbox ON outbox.id = pending.id
ORDER BY outbox.id
""")

_TRIM: Final = sql.SQL("""
WITH due AS (
    DELETE FROM everstate_store.outbox_published
    WHERE minute = (SELECT min(minute) FROM everstate_store.outbox_published)
        AND minute + interval '1 minute' <= now() - make_interval(secs => %s)
    RETURNING ids
), gone AS (
    DELETE FROM everstate_store.outbox USING (SELECT unnest(ids) AS run FROM due) AS each
    WHERE outbox.id >= lower(each.run) AND outbox.id < upper(each.run)
        AND NOT EXISTS (
            SELECT FROM everstate_store.outbox_unpublished AS left_over
            WHERE left_over.id = outbox.id
        )
    RETURNING outbox.id
)
SELECT (SELECT count(*) FROM due), (SELECT count(*) FROM gone)
""")

_REFILL: Final = sql.SQL("""
WITH again AS (
INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
SELECT id, xid, entity, key,
    coalesce(octet_length(before), 0) + coalesce(octet_length(after), 0)
        + coalesce(octet_length(event), 0)
FROM (
    SELECT unnest(ids) AS run FROM everstate_store.outbox_published
    WHERE minute >= date_trunc('minute', %s::timestamptz)
) AS each
JOIN everstate_store.outbox ON outbox.id >= lower(each.run) AND outbox.id < upper(each.run)
WHERE NOT EXISTS (SELECT FROM everstate_store.outbox_parked AS parked WHERE parked.id = outbox.id)
ON CONFLICT (id) DO NOTHING
RETURNING entity
)
SELECT entity, count(*) FROM again GROUP BY entity
""")

_OLDEST: Final = sql.SQL("""
SELECT greatest(0, extract(epoch FROM clock_timestamp() - recorded_at))::float8
FROM everstate_store.outbox
WHERE id = (SELECT min(id) FROM everstate_store.outbox_unpublished)
""")

_WAITING: Final = sql.SQL("""
SELECT (SELECT count(*) FROM everstate_store.relay_blocked),
    (SELECT count(*) FROM everstate_store.outbox_parked)
""")
_LISTED_MAX: Final = 1_000


class Note(msgspec.Struct, frozen=True):
    """A batch's note in the log: its store, its ranges of outbox ids, and a digest of its changes.

    ``parts``: for each transaction that is sent in parts, the number of its changes in the log,
    and the number of all its changes.
    """

    store: str
    runs: list[tuple[int, int]]
    digest: str
    parts: dict[str, tuple[int, int]] = {}

    def encode(self) -> bytes:
        """JSON bytes."""
        return _encode(self)

    @staticmethod
    def decode(note: bytes) -> Note | None:
        """Parse a note; ``None`` when it is not one."""
        try:
            return _decode(note)
        except msgspec.DecodeError:
            return None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Note).decode


@dataclass(frozen=True, slots=True)
class Blocked:
    """A transaction that the log refuses, with the change that causes it.

    Later changes of the transaction's keys wait until it is released.
    """

    xid: str
    entity: str
    key: str
    version: int
    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """How far the outbox has been published to the log; ages in seconds."""

    batch: int
    """Newest batch that was published and marked as such in the outbox; 0: none yet."""
    oldest_unpublished_s: float | None
    """Age of the oldest unpublished change; ``None``: all are published."""
    blocked: tuple[Blocked, ...]
    """The 1,000 transactions that have been blocked longest."""
    blocked_count: int = 0
    """How many transactions are blocked."""
    parked_count: int = 0
    """Number of parked changes: those of blocked transactions, and later ones of their keys."""


def mark(connection: OutboxConnection, batch: int, runs: Runs) -> int:
    """Mark a published batch in the outbox, and store its number; one atomic statement.

    Returns how many of its rows were unpublished until now.
    """
    values: dict[str, Any] = {
        "batch": batch,
        "firsts": [first for first, _ in runs],
        "lasts": [last for _, last in runs],
    }
    found = connection.execute(_MARK, values).fetchone()
    assert found is not None
    return int(found[0])


def newest_batch(connection: OutboxConnection) -> tuple[UUID, int, int]:
    """The store's id, the relay's newest marked batch, and that when its log began (0: none)."""
    found = connection.execute(_BATCH).fetchone()
    assert found is not None
    return found[0], found[1], found[2]


def pending_change_ids(connection: OutboxConnection, runs: Runs) -> list[UUID]:
    """Ids of the unpublished changes within ranges of outbox ids, in outbox order."""
    firsts, lasts = [run[0] for run in runs], [run[1] for run in runs]
    return [one for (one,) in connection.execute(_CHANGE_IDS, [firsts, lasts]).fetchall()]


def trim(connection: OutboxConnection, keep_s: float) -> int:
    """Delete outbox rows that were published longer than ``keep_s`` ago; returns how many.

    One transaction for each minute in which rows were published.
    """
    total = 0
    while True:
        found = connection.execute(_TRIM, [keep_s]).fetchone()
        assert found is not None
        minutes, rows = found
        total += int(rows)
        if not minutes:
            return total


def refill(
    connection: OutboxConnection, since: datetime, prepare: Callable[[str, int], None]
) -> int:
    """Mark changes that were published since then as unpublished again; returns how many.

    ``prepare`` is called with each entity type and its number of changes before they are marked
    for good; if it raises, none is. The log need not have the batches that were published until
    now.
    """
    with connection.transaction():
        counts = connection.execute(_REFILL, [since]).fetchall()
        for entity, count in counts:
            prepare(entity, count)
        connection.execute(BEGIN)
    return sum(count for _, count in counts)


def oldest_unpublished_s(connection: OutboxConnection) -> float | None:
    """Age of the oldest unpublished change; ``None``: there is none."""
    found = connection.execute(_OLDEST).fetchone()
    return None if found is None else found[0]


def oldest_waiting_s(config: Config) -> float | None:
    """Age in seconds of the oldest unpublished change; ``None``: there is none.

    Uses a connection of its own. Raises Unavailable.
    """
    doing = "reading the outbox"
    with translated(config.store_dsn, doing), connect(config.store_dsn, "everstate-get") as used:
        try:
            return oldest_unpublished_s(used)
        except UndefinedTable:
            return None  # nothing was ever written


def read_status(connection: OutboxConnection) -> OutboxStatus:
    """Read the status of the outbox; works in any process."""
    _, batch, _ = newest_batch(connection)
    rows = connection.execute(
        "SELECT xid::text, entity, key, version, reason, since"
        " FROM everstate_store.relay_blocked ORDER BY since, xid LIMIT %s",
        [_LISTED_MAX],
    ).fetchall()
    blocked = tuple(Blocked(*row) for row in rows)
    counts = connection.execute(_WAITING).fetchone()
    assert counts is not None
    return OutboxStatus(batch, oldest_unpublished_s(connection), blocked, *counts)
