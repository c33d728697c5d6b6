"""Selects the outbox rows to send now: whole transactions, no version before its predecessor.

Neither sequence ids nor transaction ids follow the order of commits (C1), so there is no cursor:
a row is unpublished until it is deleted from `outbox_pending`, and each page holds the rows that
are visible. Three facts ensure the order. A writer takes the entity's row lock before its outbox
id, so of two changes of one key the later has the higher id. One statement sees one snapshot, and a
snapshot that sees version n also sees n-1. And of two transactions that share a key, the later one
has the higher last id, because it took that id after the other one had committed. Facts that were
put into the outbox later are an exception, but no other transaction has their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from psycopg import sql

from everstate.sources.stores.postgres.database import OutboxConnection

_PAGE: Final = sql.SQL("""
SELECT id, xid::text, entity, key, bytes, EXISTS (SELECT FROM everstate_store.outbox_parked)
FROM everstate_store.outbox_pending ORDER BY id LIMIT %s
""")

# A transaction on the page committed before the page was read, so a later snapshot shows the same
# rows of it as the page's snapshot.
_CONTINUED: Final = sql.SQL("""
SELECT listed.xid::text FROM unnest(%s::xid8[]) AS listed (xid)
WHERE EXISTS (
    SELECT FROM everstate_store.outbox_pending AS pending
    WHERE pending.xid = listed.xid AND pending.id > %s
)
""")


class Pending(NamedTuple):
    """One unpublished change, without its contents. ``bytes``: size of states and event."""

    id: int
    xid: str
    entity: str
    key: str
    bytes: int


@dataclass(frozen=True)
class PendingPage:
    """The unpublished changes with the lowest ids that one snapshot shows."""

    rows: Sequence[Pending]
    is_full: bool
    """There may be more unpublished changes beyond the page."""
    continued: frozenset[str]
    """Transactions that have more rows beyond the page."""
    any_parked: bool = False
    """Whether the same snapshot shows parked changes; rows of the page may be behind these."""


@dataclass
class Transaction:
    """One source transaction with its unpublished changes, in the order of their ids.

    It has all unpublished changes, or a part of those of a large transaction: then ``before`` is
    the number of changes already sent, and ``total`` the number of all its changes.
    """

    xid: str
    rows: list[Pending] = field(default_factory=list)
    before: int = 0
    total: int = 0

    @property
    def bytes(self) -> int:
        """Size of its states and events."""
        return sum(row.bytes for row in self.rows)

    @property
    def count(self) -> int:
        """How many changes the source transaction has."""
        return self.total or len(self.rows)

    def part(self, rows_max: int, bytes_max: int) -> Transaction:
        """Its first changes that fit into a batch; at least one."""
        size = 0
        for count, row in enumerate(self.rows):
            size += row.bytes
            if count and (count >= rows_max or size > bytes_max):
                return Transaction(self.xid, self.rows[:count])
        return self


def read_page(connection: OutboxConnection, rows_max: int) -> PendingPage:
    """Read a page; cost: an index scan, and a look-up for each transaction of a full page."""
    read = connection.execute(_PAGE, [rows_max]).fetchall()
    rows = [Pending._make(row[:-1]) for row in read]
    any_parked = bool(read and read[0][-1])
    if len(rows) < rows_max:
        return PendingPage(rows, False, frozenset(), any_parked)
    xids = list({row.xid for row in rows})
    found = connection.execute(_CONTINUED, [xids, rows[-1].id]).fetchall()
    return PendingPage(rows, True, frozenset(xid for (xid,) in found), any_parked)


def sendable(page: PendingPage, withheld: AbstractSet[str]) -> list[Transaction]:
    """Transactions of a page that may be sent, in a valid order.

    Not included are ``withheld`` transactions, transactions with more rows beyond the page, and
    those with a later change of a key of any of these. Any prefix of the result may be sent without
    the rest.
    """
    staying = closure(page.rows, page.continued | withheld)
    going: dict[str, Transaction] = {}
    for row in page.rows:
        if row.xid not in staying:
            going.setdefault(row.xid, Transaction(row.xid)).rows.append(row)
    return list(_ordered(going))


def _ordered(going: Mapping[str, Transaction]) -> Iterator[Transaction]:
    """Transactions by their last ids, each after those with an earlier change of its keys."""
    earlier: dict[str, set[str]] = {xid: set() for xid in going}
    newest: dict[tuple[str, str], str] = {}
    for row in sorted(row for transaction in going.values() for row in transaction.rows):
        entity_key = (row.entity, row.key)
        before = newest.get(entity_key, row.xid)
        if before != row.xid:
            earlier[row.xid].add(before)
        newest[entity_key] = row.xid
    by_last_id = sorted(going.values(), key=lambda transaction: transaction.rows[-1].id)
    for transaction in by_last_id:
        path = [transaction.xid]
        while path:
            # Each edge is followed once, so this ends. It does not reorder transactions when the
            # order of their last ids is right already.
            behind = earlier.get(path[-1], set())
            if behind:
                path.append(behind.pop())
            elif path[-1] in earlier:
                del earlier[path[-1]]
                yield going[path.pop()]
            else:
                path.pop()


def first_of(page: PendingPage) -> Transaction:
    """The changes of a page's first transaction that may be sent before the rest of it.

    That transaction has the lowest id, so no pending change comes before its first change.
    """
    first, others = Transaction(page.rows[0].xid), set[tuple[str, str]]()
    for row in page.rows:
        if row.xid != first.xid:
            others.add((row.entity, row.key))
        elif (row.entity, row.key) in others:
            break
        else:
            first.rows.append(row)
    return first


def closure(rows: Sequence[Pending], staying: AbstractSet[str]) -> AbstractSet[str]:
    """The transactions of a page that must not be sent when ``staying`` are not, these included."""
    # Each round but the last adds some.
    if not staying:
        return staying
    found = set(staying)
    while True:
        before = len(found)
        keys: set[tuple[str, str]] = set()
        for row in rows:
            entity_key = (row.entity, row.key)
            if row.xid in found:
                keys.add(entity_key)
            elif entity_key in keys:
                found.add(row.xid)
                keys.add(entity_key)
        if len(found) == before:
            return found


def prefix(transactions: Sequence[Transaction], rows_max: int, bytes_max: int) -> int:
    """How many of the transactions fit into a batch; at least one."""
    rows = size = 0
    for count, transaction in enumerate(transactions):
        rows += len(transaction.rows)
        size += transaction.bytes
        if count and (rows > rows_max or size > bytes_max):
            return count
    return len(transactions)


def runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Ids as ranges of consecutive ids, (first, last), ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(ids):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
