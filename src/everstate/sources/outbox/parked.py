"""Transactions that wait: those the log refuses, and those with a later change of their keys.

What waits stands in `outbox_parked` and not in `outbox_pending`, so that a page has only what may
go: however many keys fail, a batch costs the same, and the relay remembers none of them. A parked
transaction is either one that is to blame (it is in `relay_blocked` too) or behind one.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from everstate.sources.outbox.database import Connection
from everstate.sources.outbox.pending import Page, Pending, Transaction, closure

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

# A relay that knew no parking left them: they are pending, and found out again.
_NOT_PARKED: Final = sql.SQL("""
DELETE FROM everstate_store.relay_blocked AS blocked WHERE NOT EXISTS (
    SELECT FROM everstate_store.outbox_parked AS parked WHERE parked.xid = blocked.xid
)
""")

# Tried and then killed: what is still pending was not published.
_TRIED: Final = sql.SQL("""
SELECT xid::text, EXISTS (
    SELECT FROM everstate_store.outbox_pending AS pending WHERE pending.xid = blocked.xid
)
FROM everstate_store.relay_blocked AS blocked WHERE is_tried
""")


def reopen(connection: Connection, delay_s: float) -> None:
    """Take up what a relay left, and let every blocked transaction be tried again at once."""
    with connection.transaction():
        connection.execute(_NOT_PARKED)
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


def any_blocked(connection: Connection) -> bool:
    """Whether any transaction is refused; if none is, none waits."""
    query = "SELECT EXISTS (SELECT FROM everstate_store.relay_blocked)"
    found = connection.execute(query).fetchone()
    return found is not None and bool(found[0])


def count_blocked(connection: Connection) -> int:
    """How many transactions are refused."""
    found = connection.execute("SELECT count(*) FROM everstate_store.relay_blocked").fetchone()
    return 0 if found is None else int(found[0])


def park_waiting(connection: Connection, page: Page) -> frozenset[str]:
    """Park what of a page is behind a parked change, and what is behind that; says which."""
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
    connection: Connection,
    refused: tuple[str, str, str, int],
    reason: str,
    delay_s: float,
) -> None:
    """Park a transaction because of one change: its (xid, entity, key, version).

    It is due again after ``delay_s``, and each time it is refused after twice as long.
    """
    xid, entity, key, version = refused
    values = {"xid": xid, "entity": entity, "key": key, "version": version, "reason": reason}
    times = {"delay_s": delay_s, "delay_s_max": RETRY_S_MAX}
    with connection.transaction():
        connection.execute(_BLOCK, values | times)
        connection.execute(_PARK, [[xid]])


def take_due(connection: Connection) -> Transaction | None:
    """Make the transaction pending that is longest due; ``None``: none is.

    It stays parked too, so that all behind it waits, until :func:`release` or :func:`block`.
    """
    with connection.transaction():
        found = connection.execute(_DUE).fetchone()
        if found is None:
            return None
        rows = connection.execute(_TRY, [found[0]]).fetchall()
    return Transaction(found[0], [Pending._make(row) for row in rows])


def release_part(connection: Connection, transaction: Transaction) -> None:
    """Let changes of a transaction go that were published in a part, and what was behind them."""
    with connection.transaction():
        gone = connection.execute(
            "DELETE FROM everstate_store.outbox_parked WHERE id = ANY(%s) RETURNING entity, key",
            [[row.id for row in transaction.rows]],
        )
        _unpark_behind(connection, set(gone.fetchall()))


def release(connection: Connection, xid: str) -> None:
    """Let a transaction go that was published, and make pending what was behind it.

    What is behind another blocked one is parked again when a page brings it.
    """
    with connection.transaction():
        connection.execute("DELETE FROM everstate_store.relay_blocked WHERE xid = %s::xid8", [xid])
        gone = connection.execute(
            "DELETE FROM everstate_store.outbox_parked WHERE xid = %s::xid8 RETURNING entity, key",
            [xid],
        )
        _unpark_behind(connection, set(gone.fetchall()))


def _unpark_behind(connection: Connection, keys: set[tuple[str, str]]) -> None:
    """Make pending what waits behind these keys, and behind what that brings, and so on."""
    seen = set(keys)
    while keys:
        names = [[entity for entity, _ in keys], [key for _, key in keys]]
        xids = [waiter for (waiter,) in connection.execute(_WAITERS, names).fetchall()]
        if not xids:
            return
        keys = set(connection.execute(_UNPARK, [xids]).fetchall()) - seen
        seen |= keys
