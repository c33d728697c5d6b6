"""Which transactions may go, over every schedule that row locks allow."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from everstate.sources.outbox.pending import (
    Pending,
    PendingPage,
    Transaction,
    first_of,
    prefix,
    runs,
    sendable,
)


def a_schedule(seed: int, transactions: int, keys: int) -> list[tuple[str, str, int]]:
    """Outbox rows (xid, key, version) by id, of transactions that lock keys until they commit."""
    rng = random.Random(seed)
    rows: list[tuple[str, str, int]] = []
    versions: dict[str, int] = {}
    holders: dict[str, str] = {}
    opened: list[str] = []
    started = 0
    while started < transactions or opened:
        if started < transactions and (not opened or rng.random() < 0.4):
            # The xid is taken at some time of its own: here the order is not that of the ids.
            opened.append(f"{rng.randrange(10**6)}-{started}")
            started += 1
        xid = rng.choice(opened)
        key = f"k{rng.randrange(keys)}"
        if rng.random() < 0.35 or holders.get(key, xid) != xid:
            opened.remove(xid)
            holders = {key: holder for key, holder in holders.items() if holder != xid}
            continue
        holders[key] = xid
        versions[key] = versions.get(key, 0) + 1
        rows.append((xid, key, versions[key]))
    return rows


@given(
    seed=st.integers(0, 10**9),
    transactions=st.integers(1, 12),
    keys=st.integers(1, 5),
    page_rows=st.integers(1, 40),
    facts=st.booleans(),
    data=st.data(),
)
def test_C1_any_prefix_of_what_is_sendable_is_whole_and_in_version_order(
    seed: int, transactions: int, keys: int, page_rows: int, facts: bool, data: st.DataObject
) -> None:
    schedule = a_schedule(seed, transactions, keys)
    if facts:
        # Facts of the WAL come into the outbox after all that was committed beside them.
        xids = sorted({xid for xid, _, _ in schedule})
        random.Random(seed).shuffle(xids)
        schedule += [(xid, f"fact of {xid}", 1) for xid in xids[::2]]
    every = [Pending(at, xid, "e", key, 1) for at, (xid, key, _) in enumerate(schedule)]
    version_of = {at: version for at, (_, _, version) in enumerate(schedule)}
    rows = every[:page_rows]
    beyond = {row.xid for row in every[page_rows:]}
    page = PendingPage(rows, len(rows) < len(every), frozenset(beyond & {row.xid for row in rows}))
    withheld = data.draw(st.sets(st.sampled_from(sorted({row.xid for row in every}) or ["x"])))

    going = sendable(page, withheld)

    sent: dict[str, int] = {}
    for transaction in going:
        assert transaction.xid not in withheld
        assert transaction.rows == [row for row in every if row.xid == transaction.xid]
        for row in transaction.rows:
            assert version_of[row.id] == sent.get(row.key, 0) + 1
            sent[row.key] = version_of[row.id]
    # Nothing stays without need: what stays is withheld, cut, or behind one that stays.
    if not withheld and not page.continued:
        assert sum(len(transaction.rows) for transaction in going) == len(rows)


@given(
    seed=st.integers(0, 10**9),
    transactions=st.integers(1, 12),
    keys=st.integers(1, 5),
    page_rows=st.integers(1, 6),
    part_rows=st.integers(1, 4),
)
def test_C1_parts_of_transactions_larger_than_a_page_come_to_an_end_in_version_order(
    seed: int, transactions: int, keys: int, page_rows: int, part_rows: int
) -> None:
    schedule = a_schedule(seed, transactions, keys)
    pending = [Pending(at, xid, "e", key, 1) for at, (xid, key, _) in enumerate(schedule)]
    version_of = {at: version for at, (_, _, version) in enumerate(schedule)}
    sent: dict[str, int] = {}
    while pending:
        rows, beyond = pending[:page_rows], {row.xid for row in pending[page_rows:]}
        page = PendingPage(rows, bool(beyond), frozenset(beyond & {row.xid for row in rows}))
        going = sendable(page, frozenset()) or [first_of(page).part(part_rows, 100)]
        for row in [row for transaction in going for row in transaction.rows]:
            assert version_of[row.id] == sent.get(row.key, 0) + 1
            sent[row.key] = version_of[row.id]
            pending.remove(row)


@given(ids=st.sets(st.integers(0, 300)))
def test_runs_hold_exactly_the_ids(ids: set[int]) -> None:
    found = runs(sorted(ids, reverse=True))
    assert [number for first, last in found for number in range(first, last + 1)] == sorted(ids)
    assert all(after[0] > before[1] + 1 for before, after in itertools.pairwise(found))


def test_a_batch_ends_at_its_limits_but_always_has_a_transaction() -> None:
    def of(rows: int, size: int) -> Transaction:
        return Transaction("x", [Pending(0, "x", "e", "k", size)] * rows)

    assert prefix([of(5, 1), of(5, 1), of(1, 1)], 10, 100) == 2
    assert prefix([of(50, 1)], 10, 10) == 1
    assert prefix([of(1, 60), of(1, 60)], 10, 100) == 1
    assert prefix([of(1, 1)], 10, 10) == 1


def test_a_part_ends_at_its_limits_but_always_has_a_change() -> None:
    rows = [Pending(at, "x", "e", "k", 10) for at in range(5)]
    whole = Transaction("x", rows)
    assert [len(whole.part(*limits).rows) for limits in [(2, 99), (9, 35), (9, 5), (9, 99)]] == [
        2,
        3,
        1,
        5,
    ]


def test_C1_a_fact_that_came_into_the_outbox_late_does_not_put_its_transaction_behind() -> None:
    rows = [Pending(at, xid, "e", key, 1) for at, (xid, key) in enumerate(_LATE_FACT)]
    going = sendable(PendingPage(rows, False, frozenset()), frozenset())
    assert [transaction.xid for transaction in going] == ["first", "second", "other"]


_LATE_FACT = [
    ("first", "k"),
    ("second", "k"),
    ("second", "mate"),
    ("other", "free"),
    ("first", "a fact of the WAL"),
]
