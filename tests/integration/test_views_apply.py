"""The core on PostgreSQL: gaps, numbers and poison, numbered after the rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from view_cases import orders

from everstate.errors import HeldOverflow, PositionMoved, Unavailable, ViewFailed
from everstate.log.positions import Range
from everstate.testing.view_contract import (
    TABLES,
    Log,
    check,
    differences,
    expected,
    history,
    observed,
    state_of,
)
from everstate.testing.view_postgres import HISTORY, KeptViews
from everstate.views.gaps import read_gaps
from everstate.views.gate import GateRow, Ints, Keys
from everstate.views.stores import PostgresStore, close_store
from everstate.views.stores.postgres.transaction import PostgresCore, PostgresTrailing
from everstate.views.tables import Core

BY_REGION, TOTALS, OPEN = TABLES["by_region"], TABLES["totals"], TABLES["open_orders"]


def all_of(kept: KeptViews, log: Log, partition: int = 0) -> None:
    kept.apply(partition, 0, log.end, log.between(0, log.end))


def logged(*records: Any) -> Log:
    log = Log()
    for record in records:
        log.append(record)
    return log


def without(kept: KeptViews, *names: str) -> Core:
    """A core in which some views do not ride."""
    return kept.core([rider for rider in kept.core().riders if rider.view not in names])


# C6


class NoGate(PostgresCore):
    """Planted: no version gate."""

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        return {}


def store_with(core: type[PostgresCore]) -> type[PostgresStore]:
    return type("Planted", (PostgresStore,), {"core_class": core})


def test_c6_planted_duplicates_applied_are_caught(kept: KeptViews) -> None:
    log = logged(*history("a", [state_of("a", region="north", quantity=2)]))
    again = logged(log.records[0], log.records[0])
    broken = replace(kept, store=store_with(NoGate))
    core = without(kept, "order_history")
    broken.apply(0, 0, 1, again.between(0, 1), core=core)
    broken.apply(0, 1, 2, again.between(1, 2), core=core)
    assert {"by_region", "totals"} <= differences(observed(kept), expected([again])).keys()


# C12


def test_c12_partitions_without_records_advance_with_their_riders(kept: KeptViews) -> None:
    kept.reset(3)
    kept.control.advance(kept.core(), {0: Range(0, 7), 1: Range(5, 9), 2: Range(0, 4)})
    kept.control.advance(kept.core(), {2: Range(0, 2)})
    assert kept.vector() == {0: 7, 1: 0, 2: 4}
    assert kept.vector(TOTALS) == {0: 7, 1: 0, 2: 4}


def test_v8_a_view_that_is_behind_does_not_ride_over_a_range_without_records(
    kept: KeptViews,
) -> None:
    log = orders(3)
    kept.apply(0, 0, 3, log.between(0, 3), core=without(kept, "totals"))
    kept.control.advance(kept.core(), {0: Range(3, 9)})
    assert (kept.vector(), kept.vector(BY_REGION), kept.vector(TOTALS)) == ({0: 9}, {0: 9}, {0: 0})


def test_c12_the_position_is_the_end_of_the_range_not_of_the_rows(kept: KeptViews) -> None:
    log = orders(3)
    log.skip(5)
    all_of(kept, log)
    assert kept.vector() == kept.vector(TOTALS) == {0: 8}


# C13


def test_c13_a_view_that_was_left_behind_catches_up_and_rides_again(kept: KeptViews) -> None:
    log = orders(6, versions=3)
    kept.apply(0, 0, 5, log.between(0, 5))
    kept.apply(0, 5, log.end, log.between(5, log.end), core=without(kept, "by_region"))
    assert differences(observed(kept), expected([log])).keys() == {"by_region"}
    kept.trail(BY_REGION, 0, 5, 9, log.between(5, 9))
    kept.trail(BY_REGION, 0, 9, log.end, log.between(9, log.end), meets=True)
    check(kept, [log])
    later = Log({log.end: history("z", [state_of("z", region="east")])[0]}, log.end + 1)
    kept.apply(0, log.end, later.end, later.between(log.end, later.end))
    log.append(later.records[log.end])
    assert kept.vector(BY_REGION) == kept.vector()
    check(kept, [log])


def test_a_trailing_view_applies_what_waited_where_it_was_freed(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, two, *orders(2).records.values())
    behind = without(kept, "totals", "order_history", "open_orders")
    for start, end in ((0, 2), (2, log.end)):
        kept.apply(0, start, end, log.between(start, end), core=behind)
    # [0, 2) has the first version only: the third waited there.
    for table in (TOTALS, OPEN, HISTORY):
        kept.trail(table, 0, 0, 2, log.between(0, 2))
    assert kept.query("SELECT quantity FROM totals") == [(1,)]
    # The third is read again beside the range in which it was freed.
    for table in (TOTALS, OPEN, HISTORY):
        kept.trail(table, 0, 2, log.end, log.between(1, log.end))
    check(kept, [log])


def test_a_trailing_view_skips_what_the_core_noted(kept: KeptViews) -> None:
    (one,) = history("a", [state_of("a", quantity=1)])
    other = replace(one, change_id="00000000-0000-0000-0000-00000000000f")
    log = logged(
        one, other, one, one, replace(one, reason="malformed"), *orders(1).records.values()
    )
    kept.apply(0, 0, log.end, log.between(0, log.end), core=without(kept, "totals"))
    kept.trail(TOTALS, 0, 0, 3, log.between(0, 3))
    kept.trail(TOTALS, 0, 3, log.end, log.between(3, log.end))
    check(kept, [log])


def test_a_trailing_view_never_passes_the_core(kept: KeptViews) -> None:
    log = orders(6)
    kept.apply(0, 0, 3, log.between(0, 3), core=without(kept, "totals"))
    with pytest.raises(PositionMoved):
        kept.trail(TOTALS, 0, 0, 6, log.between(0, 6))
    assert kept.vector(TOTALS) == {0: 0}


def test_planted_a_trailing_view_that_passes_the_core_is_caught(kept: KeptViews) -> None:
    class Passes(PostgresTrailing):
        def core_position(self, *, hold: bool) -> int:
            return 10**9

    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, two)
    kept.apply(0, 0, 1, log.between(0, 1), core=without(kept, "totals"))
    broken = replace(kept, store=type("Planted", (PostgresStore,), {"trailing_class": Passes}))
    broken.trail(TOTALS, 0, 0, 2, log.between(0, 2))
    kept.apply(0, 1, 3, log.between(1, 3), core=without(kept, "totals"))
    broken.trail(TOTALS, 0, 2, 3, log.between(1, 3))
    wrong = differences(observed(kept), expected([log]))
    assert "totals" in wrong, "version 3 was applied where it waited, and again where it was freed"


def test_v10_a_plan_that_changed_under_the_same_version_writes_nothing(kept: KeptViews) -> None:
    log = orders(3)
    other = replace(TOTALS, fingerprint="another meaning")
    kept.apply(0, 0, 3, log.between(0, 3), core=kept.core([other]))
    assert kept.vector(TOTALS) == {0: 0}
    with pytest.raises(PositionMoved):
        kept.trail(other, 0, 0, 3, log.between(0, 3))
    assert kept.query("SELECT orders FROM totals") == [(0,)]


# C14


def test_c14_a_gap_holds_and_its_filling_releases_in_order(kept: KeptViews) -> None:
    states = [state_of("a", region=r, quantity=1) for r in ("north", "south", "east", "west")]
    one, two, three, four = history("a", states)
    log = logged(one, four, three)
    done = kept.apply(0, 0, 3, log.between(0, 3))
    assert (done.applied, done.held) == (1, 2)
    check(kept, [log])
    log.append(two)
    done = kept.apply(0, 3, 4, log.between(3, 4))
    assert (done.applied, done.released, done.held) == (3, 2, 0)
    check(kept, [log])
    assert kept.control.waiting() == []


def test_v2_a_view_that_a_held_change_was_not_planned_for_trails_the_range(
    kept: KeptViews,
) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, two)
    first = log.between(0, 2)
    names = [n for n in first.column_names if not n.startswith("totals__")]
    kept.apply(0, 0, 2, first.select(names), core=without(kept, "totals"))
    kept.trail(TOTALS, 0, 0, 2, log.between(0, 2))
    kept.apply(0, 2, 3, log.between(2, 3))
    assert (kept.vector(), kept.vector(TOTALS)) == ({0: 3}, {0: 2})
    kept.trail(TOTALS, 0, 2, 3, log.between(1, 3))
    check(kept, [log])


def test_c14_more_held_than_allowed_stops_the_core(kept: KeptViews) -> None:
    log = logged(*history("b", [state_of("b")]), *history("a", [state_of("a")] * 6)[1:])
    for _ in range(2):
        with pytest.raises(HeldOverflow, match="5 changes wait"):
            kept.apply(0, 0, 6, log.between(0, 6), core=kept.core(held_max=3))
        # What fits is kept, so that the gap is seen; no change is lost, and none is skipped.
        assert kept.vector() == kept.vector(TOTALS) == {0: 4}
        (gap,) = read_gaps(kept.control)
        assert (gap.key, gap.missing, gap.held_versions) == ("a", range(1, 2), (2, 3, 4))
    kept.apply(0, 4, 6, log.between(4, 6), core=kept.core(held_max=5))
    check(kept, [log])


def test_c14_what_goes_on_makes_room_for_what_waits(kept: KeptViews) -> None:
    one, *later = history("a", [state_of("a")] * 4)
    log = logged(*later, one, *history("b", [state_of("b")] * 4)[1:])
    kept.apply(0, 0, 3, log.between(0, 3), core=kept.core(held_max=3))
    kept.apply(0, 3, 7, log.between(3, 7), core=kept.core(held_max=3))
    check(kept, [log])


def test_v4_notes_are_trimmed_only_below_what_everybody_passed(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, one, three, two, replace(one, reason="malformed"))
    kept.apply(0, 0, log.end, log.between(0, log.end), core=without(kept, "totals"))
    kept.control.trim("order", 1, {0: 0})
    kept.trail(TOTALS, 0, 0, log.end, log.between(0, log.end))
    check(kept, [log])
    assert kept.control.trim("order", 1, {0: log.end}) == 2
    noted = kept.control.exceptions(kept.core(), 0, 0, log.end)
    assert (set(noted.dead), noted.duplicates, set(noted.held)) == ({4}, (), set())


def test_v4_planted_held_bytes_that_are_trimmed_too_early_are_caught(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, two)
    kept.apply(0, 0, 3, log.between(0, 3), core=without(kept, "totals"))
    kept.control.trim("order", 1, {0: 3})
    kept.trail(TOTALS, 0, 0, 2, log.between(0, 2))
    assert kept.query("SELECT quantity FROM totals") != [(1,)], "the third waited there"


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
    log = logged(*history("a", [state_of("a", region="north", quantity=1), None]))
    all_of(kept, log)
    assert kept.query("SELECT * FROM by_region__v1") == []
    assert kept.query("SELECT orders, quantity FROM totals") == [(0, None)]


# C19


def test_c19_a_change_that_latest_refuses_is_dead_and_the_rest_goes_on(kept: KeptViews) -> None:
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
    (dead,) = kept.control.unnumbered(10)
    assert (dead.offset, dead.raw_key, dead.raw_value) == (13, bad.key.encode(), values[13])
    assert dead.reason.startswith("refused_by_store")
    log.records[13] = replace(bad, reason=dead.reason)
    check(kept, [log])


def test_c19_a_view_that_refuses_a_change_is_behind_alone_and_the_change_is_named(
    kept: KeptViews,
) -> None:
    log = orders(20)
    kept.connection.execute(
        "ALTER TABLE open_orders__v1 ADD CHECK (key <> 'k0007'), ALTER c0 SET DEFAULT ''"
    )
    done = kept.apply(0, 0, 20, log.between(0, 20))
    assert [(failed.view, failed.version) for failed in done.failures] == [("open_orders", 1)]
    assert differences(observed(kept), expected([log])).keys() == {"open_orders"}
    assert (kept.vector(), kept.vector(OPEN)) == ({0: 20}, {0: 0})
    with pytest.raises(ViewFailed) as failure:
        kept.trail(OPEN, 0, 0, 20, log.between(0, 20))
    assert (failure.value.view, failure.value.offset, failure.value.key) == (
        "open_orders",
        7,
        "k0007",
    )
    kept.connection.execute("ALTER TABLE open_orders__v1 DROP CONSTRAINT open_orders__v1_key_check")
    kept.trail(OPEN, 0, 0, 20, log.between(0, 20))
    check(kept, [log])


def test_a_view_whose_table_is_gone_fails_alone(kept: KeptViews) -> None:
    log = orders(3)
    kept.connection.execute("DROP TABLE totals__v1 CASCADE")
    done = kept.apply(0, 0, 3, log.between(0, 3))
    assert [failed.view for failed in done.failures] == ["totals"]
    assert len(kept.query("SELECT * FROM open_orders")) == 3


def test_v9_a_view_that_is_locked_is_behind_and_the_core_goes_on(
    kept: KeptViews, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "SET LOCAL lock_timeout = '100ms'; SET LOCAL statement_timeout = '120s'"
    monkeypatch.setattr("everstate.views.stores.postgres.transaction._RIDER_LIMITS", limits)
    log = orders(3)
    with psycopg.connect(kept.dsn) as other:
        other.execute("LOCK TABLE kept.totals__v1 IN ACCESS EXCLUSIVE MODE")
        # The staging table is like it, and is made beforehand.
        other.rollback()
        kept.apply(0, 0, 1, log.between(0, 1))
        other.execute("LOCK TABLE kept.totals__v1 IN ACCESS EXCLUSIVE MODE")
        done = kept.apply(0, 1, 3, log.between(1, 3))
    assert [failed.view for failed in done.failures] == ["totals"]
    assert (kept.vector(), kept.vector(BY_REGION), kept.vector(TOTALS)) == (
        {0: 3},
        {0: 3},
        {0: 1},
    )


# law 7


def test_law_7_conflicts_and_unreadable_records_are_dead_once_with_their_bytes(
    kept: KeptViews,
) -> None:
    (one,) = history("a", [state_of("a")])
    other = replace(one, change_id="00000000-0000-0000-0000-00000000000f")
    log = logged(one, other, one, replace(one, reason="malformed"))
    all_of(kept, log)
    check(kept, [log])
    control = kept.control
    dead = control.unnumbered(10)
    assert sorted((d.offset, d.reason) for d in dead) == [(1, "conflict"), (3, "malformed")]
    assert {d.raw_key for d in dead} == {b"a"}
    assert dict(dead[0].headers)["ce_id"] in (one.change_id.encode(), other.change_id.encode())
    control.number(1, [d.id for d in dead])
    assert control.last_batch() == 1
    assert control.mark_published(1) == 2
    assert control.unnumbered(10) == []


def test_an_attempt_that_dies_leaves_nothing_and_the_next_goes_on(kept: KeptViews) -> None:
    log = orders(10)

    class Dies(PostgresCore):
        def count(self, applied: Any) -> None:
            with psycopg.connect(self.session.dsn, autocommit=True) as other:
                pid = self.session.connection.info.backend_pid
                other.execute("SELECT pg_terminate_backend(%s)", (pid,))
            super().count(applied)

    with pytest.raises(Unavailable):
        replace(kept, store=store_with(Dies)).apply(0, 0, 10, log.between(0, 10))
    assert observed(kept) == expected([Log()])
    all_of(kept, log)
    check(kept, [log])


def test_a_commit_whose_answer_is_lost_is_decided_by_the_position(kept: KeptViews) -> None:
    """The server commits, and the connection breaks before it can say so."""
    log = orders(10)

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

    class Lost(PostgresCore):
        def commit(self, end: int) -> None:
            with answerless(self):
                super().commit(end)

    @contextmanager
    def answerless(opened: PostgresCore) -> Iterator[None]:
        real = opened.session.connection
        opened.session.connection = Answerless(real)  # type: ignore[assignment]
        try:
            yield
        finally:
            opened.session.connection = real

    done = replace(kept, store=store_with(Lost)).apply(0, 0, 10, log.between(0, 10))
    assert done.applied == 10
    check(kept, [log])


def test_c14_versions_in_the_wrong_order_within_one_range_are_put_right(kept: KeptViews) -> None:
    one, two, three = history("a", [state_of("a", region="north"), None, state_of("a")])
    log = logged(three, two, one, two)
    kept.apply(0, 0, 3, log.between(0, 3))
    kept.apply(0, 3, 4, log.between(3, 4))
    check(kept, [log])


@pytest.mark.parametrize("splits", [(4,), (1, 4), (2, 4), (3, 4), (1, 2, 3, 4)])
def test_verdicts_depend_on_the_log_and_not_on_the_batches(
    kept: KeptViews, splits: tuple[int, ...]
) -> None:
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(three, two, one, two)
    start = 0
    for end in splits:
        kept.apply(0, start, end, log.between(start, end), core=without(kept, "totals"))
        start = end
    noted = kept.control.exceptions(kept.core(), 0, 0, 4)
    assert (set(noted.held), set(noted.released)) == ({0, 1}, {0, 1})
    assert noted.duplicates == ((3, 3),)
    kept.trail(TOTALS, 0, 0, 2, log.between(0, 2))
    assert kept.query("SELECT orders FROM totals") == [(0,)]
    kept.trail(TOTALS, 0, 2, 4, log.between(0, 4))
    check(kept, [log])


def test_sessions_belong_to_threads(kept: KeptViews) -> None:
    kept.reset(2)
    logs = [orders(5, "north"), Log()]
    for n in range(5):
        logs[1].append(history(f"q{n}", [state_of(f"q{n}", region="south")])[0])

    def run(partition: int) -> None:
        kept.apply(partition, 0, 5, logs[partition].between(0, 5), core=core)
        close_store(kept.dsn)

    core = kept.core()
    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(kept, logs)


def test_a_late_report_never_makes_as_of_run_back(kept: KeptViews) -> None:
    records = history("a", [state_of("a", quantity=n) for n in range(4)], [3, 1, 5, 2])
    log = logged(*records)
    for n in range(4):
        kept.apply(0, n, n + 1, log.between(n, n + 1), core=without(kept, "order_history"))
    kept.trail(HISTORY, 0, 0, 1, log.between(0, 1))
    kept.trail(HISTORY, 0, 1, 4, log.between(1, 4))
    check(kept, [log])
