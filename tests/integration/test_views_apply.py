"""Applying to PostgreSQL: gaps, numbers and poison, numbered after the rules."""

from __future__ import annotations

import threading
from dataclasses import replace
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from view_cases import orders

from everstate.errors import (
    HeldOverflow,
    Unavailable,
    ViewFailed,
    ViewStoreError,
)
from everstate.log.positions import Range
from everstate.testing.view_contract import (
    Log,
    check,
    differences,
    expected,
    history,
    observed,
    state_of,
)
from everstate.testing.view_postgres import KeptViews
from everstate.views import control, dead_letters
from everstate.views.stores.postgres.apply import Applier, advance
from everstate.views.stores.postgres.gate import Keys, Verdict, judge
from everstate.views.stores.postgres.quarantine import quarantine, rejoin, start_alone
from everstate.views.stores.postgres.session import close


def all_of(kept: KeptViews, log: Log, partition: int = 0) -> None:
    kept.apply(partition, 0, log.end, log.between(0, log.end))


# C6


class DuplicatesApplied(Applier):
    """Planted: no version gate."""

    def _judge(self, keys: Keys) -> Verdict:
        return judge(keys, {}, {}, self._ids)


def test_c6_planted_duplicates_applied_are_caught(kept: KeptViews) -> None:
    log = Log()
    for record in history("a", [state_of("a", region="north", quantity=2)]) * 2:
        log.append(record)
    group = replace(kept.group(), history_table=None)
    broken = replace(kept, applier=DuplicatesApplied)
    broken.apply_to(group, 0, 0, 2, log.between(0, 2))
    assert {"by_region", "totals"} <= differences(observed(kept), expected([log])).keys()


# C12


def test_c12_partitions_without_records_advance(kept: KeptViews) -> None:
    kept.reset(3)
    group = kept.group()
    advance(kept.dsn, group, {0: Range(0, 7), 1: Range(5, 9), 2: Range(0, 4)})
    advance(kept.dsn, group, {2: Range(0, 2)})
    found = control.positions(kept.connection, "kept", "order")
    assert [p.next_offset for p in found] == [7, 0, 4]


def test_c12_the_position_is_the_end_of_the_range_not_of_the_rows(kept: KeptViews) -> None:
    log = orders(3)
    log.skip(5)
    all_of(kept, log)
    assert [p.next_offset for p in control.positions(kept.connection, "kept")] == [8]


# C13


def test_c13_a_view_alone_has_its_own_gate_and_catches_up(kept: KeptViews) -> None:
    log = orders(6, versions=3)
    kept.apply(0, 0, 5, log.between(0, 5))
    quarantine(kept.connection, "kept", "order", "by_region", "broken")
    kept.apply(0, 5, log.end, log.between(5, log.end))
    assert "by_region" in differences(observed(kept), expected([log]))
    assert not rejoin(kept.connection, "kept", "order", "by_region")
    alone = kept.group("by_region")
    kept.apply_to(alone, 0, 3, 9, log.between(3, 9))
    kept.apply_to(alone, 0, 9, log.end, log.between(9, log.end))
    check(kept, [log])
    assert rejoin(kept.connection, "kept", "order", "by_region")
    (row,) = control.views(kept.connection, "kept", "by_region")
    assert (row.status, row.view_group) == ("live", "order")
    later = Log({log.end: history("z", [state_of("z", region="east")])[0]}, log.end + 1)
    kept.apply(0, log.end, later.end, later.between(log.end, later.end))
    log.append(later.records[log.end])
    check(kept, [log])


def test_c13_planted_gate_shared_with_a_lagging_view_is_caught(kept: KeptViews) -> None:
    log = orders(6, versions=2)
    quarantine(kept.connection, "kept", "order", "by_region", "broken")
    all_of(kept, log)
    shared = replace(kept.group("by_region"), gate_table="order_latest__v1")
    done = kept.apply_to(shared, 0, 0, log.end, log.between(0, log.end))
    assert (done.applied, done.duplicate) == (0, 12)
    (alone,) = control.positions(kept.connection, "kept", shared.view_group)
    assert alone.next_offset == log.end, "what it did not apply never comes again"
    wrong = differences(observed(kept), expected([log]))
    assert wrong["by_region"] == ([], expected([log]).by_region)


def test_c13_waiting_changes_go_along_with_a_view_that_leaves(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = Log()
    for record in (one, three, two):
        log.append(record)
    kept.apply(0, 0, 2, log.between(0, 2))
    quarantine(kept.connection, "kept", "order", "totals", "broken")
    kept.apply(0, 2, 3, log.between(2, 3))
    kept.apply_to(kept.group("totals"), 0, 2, 3, log.between(2, 3))
    check(kept, [log])
    assert rejoin(kept.connection, "kept", "order", "totals")


def test_c15_a_view_that_comes_later_begins_at_the_first_change(kept: KeptViews) -> None:
    log = orders(5, versions=2)
    start_alone(kept.connection, "kept", "order", "totals", {0: 0})
    all_of(kept, log)
    alone = kept.group("totals")
    kept.apply_to(alone, 0, 0, log.end, log.between(0, log.end))
    check(kept, [log])
    assert rejoin(kept.connection, "kept", "order", "totals")


# C14


def test_c14_a_gap_holds_and_its_filling_releases_in_order(kept: KeptViews) -> None:
    states = [state_of("a", region=r, quantity=1) for r in ("north", "south", "east", "west")]
    one, two, three, four = history("a", states)
    log = Log()
    for record in (one, four, three):
        log.append(record)
    done = kept.apply(0, 0, 3, log.between(0, 3))
    assert (done.applied, done.held) == (1, 2)
    check(kept, [log])
    log.append(two)
    done = kept.apply(0, 3, 4, log.between(3, 4))
    assert (done.applied, done.released, done.held) == (3, 2, 0)
    check(kept, [log])
    assert kept.query("SELECT * FROM held") == []


def test_c14_a_held_change_is_released_by_a_plan_of_other_views(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = Log()
    for record in (one, three, two):
        log.append(record)
    kept.apply(0, 0, 2, log.between(0, 2))
    fewer = replace(kept.group(), rows=(), linears=kept.group().linears[-1:])
    fill = log.between(2, 3)
    names = [n for n in fill.column_names if "__" not in n or n.startswith(fewer.linears[0].view)]
    done = kept.apply_to(fewer, 0, 2, 3, fill.select(names))
    assert (done.applied, done.released) == (2, 1)
    assert kept.query("SELECT quantity FROM totals") == [(3,)]
    assert kept.query("SELECT * FROM held") == []


def test_c14_more_held_than_allowed_stops_the_group(kept: KeptViews) -> None:
    log = Log()
    for record in history("a", [state_of("a")] * 6)[1:]:
        log.append(record)
    with pytest.raises(HeldOverflow, match="held_max is 3"):
        kept.apply_to(kept.group(held_max=3), 0, 0, 5, log.between(0, 5))
    assert observed(kept) == expected([Log()])


# C16


def test_c16_sums_are_exact_and_nulls_are_groups(kept: KeptViews) -> None:
    huge = Decimal("9999999999.99")
    log = Log()
    for n in range(30):
        key = f"k{n}"
        state = state_of(key, amount=huge, quantity=2**62 + n)
        for record in history(key, [state, None, state])[: 2 + n % 2]:
            log.append(record)
    all_of(kept, log)
    check(kept, [log])
    assert kept.query("SELECT region, total FROM by_region") == [(None, 15 * huge)]


def test_c16_a_group_is_gone_when_its_last_entity_is(kept: KeptViews) -> None:
    log = Log()
    for record in history("a", [state_of("a", region="north", quantity=1), None]):
        log.append(record)
    all_of(kept, log)
    assert kept.query("SELECT * FROM by_region__v1") == []
    assert kept.query("SELECT orders, quantity FROM totals") == [(0, None)]


# C19


def test_c19_a_change_that_the_store_refuses_is_dead_and_the_rest_goes_on(
    kept: KeptViews,
) -> None:
    log = orders(20)
    bad = log.records[13]
    # jsonb's numbers end where numeric does.
    broken = log.between(0, 20)
    values = broken["raw_value"].to_pylist()
    values[13] = values[13].replace(b'"quantity":13', b'"quantity":1e200000')
    place = broken.column_names.index("raw_value")
    broken = broken.set_column(place, "raw_value", [values])
    done = kept.apply(0, 0, 20, broken)
    assert (done.applied, done.dead) == (19, 1)
    (dead,) = dead_letters.unnumbered(kept.connection, "kept", 10)
    assert (dead.offset, dead.raw_key, dead.raw_value) == (13, bad.key.encode(), values[13])
    assert dead.reason.startswith("refused_by_store")
    log.records[13] = replace(bad, reason=dead.reason)
    check(kept, [log])


def test_c19_a_view_that_refuses_a_change_is_named_with_offset_and_key(kept: KeptViews) -> None:
    log = orders(20)
    kept.connection.execute(
        "ALTER TABLE open_orders__v1 ADD CHECK (key <> 'k0007'), ALTER c0 SET DEFAULT ''"
    )
    with pytest.raises(ViewFailed) as failure:
        all_of(kept, log)
    assert (failure.value.view, failure.value.offset, failure.value.key) == (
        "open_orders",
        7,
        "k0007",
    )
    assert observed(kept) == expected([Log()])
    quarantine(kept.connection, "kept", "order", "open_orders", str(failure.value))
    all_of(kept, log)
    assert differences(observed(kept), expected([log])).keys() == {"open_orders"}
    kept.connection.execute("ALTER TABLE open_orders__v1 DROP CONSTRAINT open_orders__v1_key_check")
    kept.apply_to(kept.group("open_orders"), 0, 0, 20, log.between(0, 20))
    check(kept, [log])


def test_a_view_whose_table_is_gone_fails_alone(kept: KeptViews) -> None:
    log = orders(3)
    kept.connection.execute("DROP TABLE totals__v1 CASCADE")
    with pytest.raises(ViewFailed) as failure:
        all_of(kept, log)
    assert (failure.value.view, failure.value.offset) == ("totals", None)


def test_latest_is_never_put_aside(kept: KeptViews) -> None:
    row = control.ViewRow("order_latest", "order", 1, "order", {}, "x")
    control.register_view(kept.connection, "kept", row)
    with pytest.raises(ViewStoreError):
        quarantine(kept.connection, "kept", "order", "order_latest", "test")


# law 7


def test_law_7_conflicts_and_unreadable_records_are_dead_once_with_their_bytes(
    kept: KeptViews,
) -> None:
    (one,) = history("a", [state_of("a")])
    other = replace(one, change_id="00000000-0000-0000-0000-00000000000f")
    log = Log()
    for record in (one, other, one, replace(one, reason="malformed")):
        log.append(record)
    all_of(kept, log)
    check(kept, [log])
    dead = dead_letters.unnumbered(kept.connection, "kept", 10)
    assert sorted((d.offset, d.reason) for d in dead) == [(1, "conflict"), (3, "malformed")]
    assert {d.raw_key for d in dead} == {b"a"}
    assert dict(dead[0].headers)["ce_id"] in (one.change_id.encode(), other.change_id.encode())
    dead_letters.number(kept.connection, "kept", 1, [d.id for d in dead])
    assert dead_letters.last_batch(kept.connection, "kept") == 1
    assert dead_letters.mark_published(kept.connection, "kept", 1) == 2
    assert dead_letters.unnumbered(kept.connection, "kept", 10) == []


def test_an_attempt_that_dies_leaves_nothing_and_the_next_goes_on(kept: KeptViews) -> None:
    log, group = orders(10), kept.group()

    class Dies(Applier):
        def _count(self, applied: object) -> None:
            with psycopg.connect(self.session.dsn, autocommit=True) as other:
                pid = self.session.connection.info.backend_pid
                other.execute("SELECT pg_terminate_backend(%s)", (pid,))
            super()._count(applied)  # type: ignore[arg-type]

    with pytest.raises(Unavailable):
        replace(kept, applier=Dies).apply_to(group, 0, 0, 10, log.between(0, 10))
    assert observed(kept) == expected([Log()])
    all_of(kept, log)
    check(kept, [log])


def test_a_commit_whose_answer_is_lost_is_decided_by_the_position(kept: KeptViews) -> None:
    """The server commits, and the connection breaks before it can say so."""
    log, group = orders(10), kept.group()

    class Answerless:
        """A connection that loses the answer to COMMIT."""

        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def execute(self, query: Any, *values: Any) -> Any:
            done = self._real.execute(query, *values)
            if query == "COMMIT":
                raise psycopg.OperationalError("the answer was lost")
            return done

    class Lost(Applier):
        def _commit(self, end: int) -> None:
            real = self.session.connection
            self.session.connection = Answerless(real)  # type: ignore[assignment]
            try:
                super()._commit(end)
            finally:
                self.session.connection = real

    done = replace(kept, applier=Lost).apply_to(group, 0, 0, 10, log.between(0, 10))
    assert done.applied == 10
    check(kept, [log])


def test_c14_versions_in_the_wrong_order_within_one_range_are_put_right(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", region="north"), None, state_of("a")])
    log = Log()
    for record in (three, two, one, two):
        log.append(record)
    kept.apply(0, 0, 3, log.between(0, 3))
    kept.apply(0, 3, 4, log.between(3, 4))
    check(kept, [log])


def test_sessions_belong_to_threads(kept: KeptViews) -> None:
    kept.reset(2)
    group, logs = kept.group(), [orders(5, "north"), Log()]
    for n in range(5):
        logs[1].append(history(f"q{n}", [state_of(f"q{n}", region="south")])[0])

    def run(partition: int) -> None:
        kept.apply_to(group, partition, 0, 5, logs[partition].between(0, 5))
        close(kept.dsn)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(kept, logs)


def test_a_late_report_never_makes_as_of_run_back(kept: KeptViews) -> None:
    records = history("a", [state_of("a", quantity=n) for n in range(4)], [3, 1, 5, 2])
    log = Log()
    for record in records:
        log.append(record)
    for n in range(4):
        kept.apply(0, n, n + 1, log.between(n, n + 1))
    check(kept, [log])
