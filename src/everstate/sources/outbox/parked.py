"""Parked transactions: those that the log refuses, and those with a later change of their keys.

Rows of parked transactions are in `outbox_parked` and not in `outbox_pending`, so that a page
contains only rows that may be sent. However many keys fail, a batch costs the same, and the relay
keeps none of them in memory. A parked transaction is either blocked itself (then it is in
`relay_blocked` too) or behind a blocked one: it has a later change of one of its keys.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from everstate.sources.outbox.pending import Pending, PendingPage, Transaction, closure
from everstate.sources.stores.postgres.database import OutboxConnection

RETRY_S_MAX: Final = 3600.0

# Of two changes of one key the later has the higher id (see `pending`).
_BEHIND: Final = sql.SQL("""
SELECT DISTINCT given.xid::text
FROM unnest(%s::bigint[], %s::xid8[], %s::text[], %s::text[]) AS given (id, xid, entity, key)
WHERE EXISTS (
    SELECT FROM everstate_store.outbox_parked AS parked
    WHERE parked.entity = given.entity AND parked.key = given.key AND parked.id < given.id
)
""")

_PARK: Final = sql.SQL("""
WITH moved AS (
    DELETE FROM everstate_store.outbox_pending WHERE xid = ANY(%s::xid8[])
    RETURNING id, xid, entity, key, bytes
)
INSERT INTO everstate_store.outbox_parked (id, xid, entity, key, bytes)
SELECT id, xid, entity, key, bytes FROM moved ON CONFLICT DO NOTHING
""")

_BLOCK: Final = sql.SQL("""
INSERT INTO everstate_store.relay_blocked AS present
    (xid, entity, key, version, reason, retry_at, delay_s)
VALUES (%(xid)s::xid8, %(entity)s, %(key)s, %(version)s, %(reason)s,
    clock_timestamp() + make_interval(secs => %(delay_s)s), 2 * %(delay_s)s)
ON CONFLICT (xid) DO UPDATE SET reason = excluded.reason, is_tried = false,
    retry_at = clock_timestamp() + make_interval(secs => present.delay_s),
    delay_s = least(%(delay_s_max)s, 2 * present.delay_s)
""")

_DUE: Final = sql.SQL("""
UPDATE everstate_store.relay_blocked SET is_tried = true
WHERE xid = (
    SELECT xid FROM everstate_store.relay_blocked
    WHERE retry_at <= clock_timestamp() ORDER BY retry_at LIMIT 1
)
RETURNING xid::text
""")

_TRY: Final = sql.SQL("""
WITH tried AS (
    SELECT id, xid, entity, key, bytes FROM everstate_store.outbox_parked WHERE xid = %s::xid8
), copied AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM tried ON CONFLICT DO NOTHING
)
SELECT id, xid::text, entity, key, bytes FROM tried ORDER BY id
""")

_WAITERS: Final = sql.SQL("""
SELECT DISTINCT parked.xid::text
FROM unnest(%s::text[], %s::text[]) AS given (entity, key)
JOIN everstate_store.outbox_parked AS parked USING (entity, key)
WHERE NOT EXISTS (
    SELECT FROM everstate_store.relay_blocked AS blocked WHERE blocked.xid = parked.xid
)
""")

_UNPARK: Final = sql.SQL("""
WITH moved AS (
    DELETE FROM everstate_store.outbox_parked WHERE xid = ANY(%s::xid8[])
    RETURNING id, xid, entity, key, bytes
), returned AS (
    INSERT INTO everstate_store.outbox_pending (id, xid, entity, key, bytes)
    SELECT id, xid, entity, key, bytes FROM moved ON CONFLICT DO NOTHING
)
SELECT DISTINCT entity, key FROM moved
""")

# Retried by a relay that was killed: rows that are still pending were not published.
_TRIED: Final = sql.SQL("""
SELECT xid::text, EXISTS (
    SELECT FROM everstate_store.outbox_pending AS pending WHERE pending.xid = blocked.xid
)
FROM everstate_store.relay_blocked AS blocked WHERE is_tried
""")


def reopen(connection: OutboxConnection, delay_s: float) -> None:
    """Recover the parked transactions of a former relay, and make all blocked ones due now."""
    with connection.transaction():
        for xid, is_pending in connection.execute(_TRIED).fetchall():
            if is_pending:
                connection.execute(_PARK, [[xid]])
            else:
                release(connection, xid)
        connection.execute(
            "UPDATE everstate_store.relay_blocked"
            " SET is_tried = false, retry_at = clock_timestamp(), delay_s = %s",
            [delay_s],
        )


def any_blocked(connection: OutboxConnection) -> bool:
    """Whether any transaction is blocked; if not, none is parked either."""
    query = "SELECT EXISTS (SELECT FROM everstate_store.relay_blocked)"
    found = connection.execute(query).fetchone()
    return found is not None and bool(found[0])


def count_blocked(connection: OutboxConnection) -> int:
    """How many transactions are blocked."""
    found = connection.execute("SELECT count(*) FROM everstate_store.relay_blocked").fetchone()
    return 0 if found is None else int(found[0])


def park_waiting(connection: OutboxConnection, page: PendingPage) -> frozenset[str]:
    """Park the transactions of a page that are behind a parked change; returns their xids.

    Transactions behind these are parked too.
    """
    if not page.any_parked:
        return frozenset()
    ids, xids = [row.id for row in page.rows], [row.xid for row in page.rows]
    entities, keys = [row.entity for row in page.rows], [row.key for row in page.rows]
    found = connection.execute(_BEHIND, [ids, xids, entities, keys]).fetchall()
    if not found:
        return frozenset()
    waiting = frozenset(closure(page.rows, {xid for (xid,) in found}))
    connection.execute(_PARK, [list(waiting)])
    return waiting


def block(
    connection: OutboxConnection,
    refused: tuple[str, str, str, int],
    reason: str,
    delay_s: float,
) -> None:
    """Park a transaction because of one refused change: its (xid, entity, key, version).

    It is retried after ``delay_s``; the delay doubles each time it is refused again.
    """
    xid, entity, key, version = refused
    values = {"xid": xid, "entity": entity, "key": key, "version": version, "reason": reason}
    times = {"delay_s": delay_s, "delay_s_max": RETRY_S_MAX}
    with connection.transaction():
        connection.execute(_BLOCK, values | times)
        connection.execute(_PARK, [[xid]])


def take_due(connection: OutboxConnection) -> Transaction | None:
    """Make the blocked transaction pending that is overdue longest; ``None``: none is due.

    It also stays parked, so that all transactions behind it wait, until :func:`release` or
    :func:`block`.
    """
    with connection.transaction():
        found = connection.execute(_DUE).fetchone()
        if found is None:
            return None
        rows = connection.execute(_TRY, [found[0]]).fetchall()
    return Transaction(found[0], [Pending._make(row) for row in rows])


def release_part(connection: OutboxConnection, transaction: Transaction) -> None:
    """Unpark the changes of a published part of a transaction, and the changes behind them."""
    with connection.transaction():
        gone = connection.execute(
            "DELETE FROM everstate_store.outbox_parked WHERE id = ANY(%s) RETURNING entity, key",
            [[row.id for row in transaction.rows]],
        )
        _unpark_behind(connection, set(gone.fetchall()))


def release(connection: OutboxConnection, xid: str) -> None:
    """Unpark a published transaction, and make the transactions behind it pending.

    Those that are also behind another blocked transaction are parked again when a page has them.
    """
    with connection.transaction():
        connection.execute("DELETE FROM everstate_store.relay_blocked WHERE xid = %s::xid8", [xid])
        gone = connection.execute(
            "DELETE FROM everstate_store.outbox_parked WHERE xid = %s::xid8 RETURNING entity, key",
            [xid],
        )
        _unpark_behind(connection, set(gone.fetchall()))


def _unpark_behind(connection: OutboxConnection, keys: set[tuple[str, str]]) -> None:
    """Make the transactions behind these keys pending, those behind their keys, and so on."""
    seen = set(keys)
    while keys:
        names = [[entity for entity, _ in keys], [key for _, key in keys]]
        xids = [waiter for (waiter,) in connection.execute(_WAITERS, names).fetchall()]
        if not xids:
            return
        keys = set(connection.execute(_UNPARK, [xids]).fetchall()) - seen
        seen |= keys
