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

from everstate.errors import HeldOverflow, Unavailable, ViewFailed
from everstate.views.batch import Batch
from everstate.views.gaps import read_gaps
from everstate.views.gate import GateRow, Ints, Keys
from everstate.views.stores import PostgresViewStore, close_store
from everstate.views.stores.postgres.transaction import PostgresCore, PostgresTrailing
from kit.view_contract import BY_REGION, OPEN, TOTALS, check
from kit.view_oracle import differences, expected
from kit.view_orders import Log, history, logged, orders, state_of
from kit.view_postgres import PostgresKeptOrders


def all_of(kept: PostgresKeptOrders, log: Log, partition: int = 0) -> None:
    kept.apply(partition, 0, log.end, log.between(0, log.end))


# C6


class NoGate(PostgresCore):
    """Planted: no version gate."""

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        return {}


def store_with(core: type[PostgresCore]) -> type[PostgresViewStore]:
    return type("Planted", (PostgresViewStore,), {"core_class": core})


def test_c6_planted_duplicates_applied_are_caught(kept: PostgresKeptOrders) -> None:
    log = logged(*history("a", [state_of("a", region="north", quantity=2)]))
    again = logged(log.records[0], log.records[0])
    broken = replace(kept, store=store_with(NoGate))
    core = kept.without("order_history")
    broken.apply(0, 0, 1, again.between(0, 1), core=core)
    broken.apply(0, 1, 2, again.between(1, 2), core=core)
    assert {"by_region", "totals"} <= differences(kept.tables(), expected([again])).keys()


def test_c6_planted_a_quick_write_that_compares_no_versions_is_caught(
    kept: PostgresKeptOrders,
) -> None:
    class Trusting(PostgresCore):
        def write_next(self, batch: Batch) -> dict[str, Any]:
            super().write_next(batch)
            return {}

    one, _, three = history("a", [state_of("a", region="north", quantity=n) for n in (1, 2, 3)])
    log, broken = logged(one, three), replace(kept, store=store_with(Trusting))
    broken.apply(0, 0, 1, log.between(0, 1))
    broken.apply(0, 1, 2, log.between(1, 2))
    assert {"history", "totals", "held"} <= differences(kept.tables(), expected([log])).keys()


def test_c14_planted_a_quick_write_beside_changes_that_wait_is_caught(
    kept: PostgresKeptOrders,
) -> None:
    class NothingWaits(PostgresCore):
        def held_keys(self) -> set[str]:
            return set()

    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, two)
    kept.apply(0, 0, 2, log.between(0, 2))
    replace(kept, store=store_with(NothingWaits)).apply(0, 2, 3, log.between(2, 3))
    assert {"latest", "totals", "held"} <= differences(kept.tables(), expected([log])).keys()


def test_planted_a_trailing_view_that_passes_the_core_is_caught(kept: PostgresKeptOrders) -> None:
    class Passes(PostgresTrailing):
        def core_position(self, *, hold: bool) -> int:
            return 10**9

    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    log = logged(one, three, two)
    kept.apply(0, 0, 1, log.between(0, 1), core=kept.without("totals"))
    broken = replace(kept, store=type("Planted", (PostgresViewStore,), {"trailing_class": Passes}))
    broken.trail(TOTALS, 0, 0, 2, log.between(0, 2))
    kept.apply(0, 1, 3, log.between(1, 3), core=kept.without("totals"))
    broken.trail(TOTALS, 0, 2, 3, log.between(1, 3))
    wrong = differences(kept.tables(), expected([log]))
    assert "totals" in wrong, (
        "version 3 was applied where it waited, and again where it was released"
    )


# C14


def test_c14_more_held_than_allowed_stops_the_core(kept: PostgresKeptOrders) -> None:
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


# C16


def test_c16_sums_are_exact_and_nulls_are_groups(kept: PostgresKeptOrders) -> None:
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


# C19


def test_c19_a_change_that_latest_refuses_is_dead_and_the_rest_goes_on(
    kept: PostgresKeptOrders,
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
    (dead,) = kept.control.unpublished(10)
    assert (dead.offset, dead.raw_key, dead.raw_value) == (13, bad.key.encode(), values[13])
    assert dead.reason.startswith("refused_by_store")
    log.records[13] = replace(bad, reason=dead.reason)
    check(kept, [log])


def test_c19_a_view_that_refuses_a_change_is_behind_alone_and_the_change_is_named(
    kept: PostgresKeptOrders,
) -> None:
    log = orders(20)
    kept.connection.execute(
        "ALTER TABLE open_orders__v1 ADD CHECK (key <> 'k0007'), ALTER c0 SET DEFAULT ''"
    )
    done = kept.apply(0, 0, 20, log.between(0, 20))
    assert [(failed.view, failed.version) for failed in done.failures] == [("open_orders", 1)]
    assert differences(kept.tables(), expected([log])).keys() == {"open_orders"}
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


def test_a_view_whose_table_is_gone_fails_alone(kept: PostgresKeptOrders) -> None:
    log = orders(3)
    kept.connection.execute("DROP TABLE totals__v1 CASCADE")
    done = kept.apply(0, 0, 3, log.between(0, 3))
    assert [failed.view for failed in done.failures] == ["totals"]
    assert len(kept.query("SELECT * FROM open_orders")) == 3


def test_v9_a_view_that_is_locked_is_behind_and_the_core_goes_on(
    kept: PostgresKeptOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = "SAVEPOINT riders; SET LOCAL lock_timeout = '100ms'"
    monkeypatch.setattr("everstate.views.stores.postgres.transaction._RIDERS_BEGIN", begin)
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


def test_v9_a_view_that_is_locked_when_a_session_begins_does_not_hold_the_core(
    kept: PostgresKeptOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging table is made like the view's, and waits for its lock."""
    limit = b"SET lock_timeout = '100ms'"
    monkeypatch.setattr("everstate.views.stores.postgres.writes._LOCK_LIMIT", limit)
    log = orders(3)
    with psycopg.connect(kept.dsn) as other:
        other.execute("LOCK TABLE kept.totals__v1 IN ACCESS EXCLUSIVE MODE")
        done = kept.apply(0, 0, 3, log.between(0, 3))
        with pytest.raises(ViewFailed, match="lock timeout"):
            kept.trail(TOTALS, 0, 0, 3, log.between(0, 3))
    assert [(failed.view, failed.reason) for failed in done.failures] == [
        ("totals", "canceling statement due to lock timeout")
    ]
    kept.trail(TOTALS, 0, 0, 3, log.between(0, 3))
    check(kept, [log])


def test_v9_a_view_that_is_locked_while_it_meets_its_core_lets_it_go_on(
    kept: PostgresKeptOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = b"SET LOCAL lock_timeout = '100ms'; SAVEPOINT view"
    monkeypatch.setattr("everstate.views.stores.postgres.transaction._TRAILING_BEGIN", limit)
    log, core = orders(3), kept.without("totals")
    kept.apply(0, 0, 3, log.between(0, 3), core=core)
    kept.trail(TOTALS, 0, 0, 1, log.between(0, 1))
    with psycopg.connect(kept.dsn) as other:
        other.execute("LOCK TABLE kept.totals__v1 IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(ViewFailed, match="lock timeout"):
            kept.trail(TOTALS, 0, 1, 3, log.between(1, 3), meets=True)
    kept.trail(TOTALS, 0, 1, 3, log.between(1, 3), meets=True)
    check(kept, [log])


# law 7


def test_law_7_conflicts_and_unreadable_records_are_dead_once_with_their_bytes(
    kept: PostgresKeptOrders,
) -> None:
    (one,) = history("a", [state_of("a")])
    other = replace(one, change_id="00000000-0000-0000-0000-00000000000f")
    log = logged(one, other, one, replace(one, reason="malformed"))
    all_of(kept, log)
    check(kept, [log])
    control = kept.control
    dead = control.unpublished(10)
    assert sorted((d.offset, d.reason) for d in dead) == [(1, "conflict"), (3, "malformed")]
    assert {d.raw_key for d in dead} == {b"a"}
    assert dict(dead[0].headers)["ce_id"] in (one.change_id.encode(), other.change_id.encode())
    assert control.number([d.id for d in dead], above=0) == 1
    assert control.mark_published(1) == 2
    assert control.unpublished(10) == []


def test_an_attempt_that_dies_leaves_nothing_and_the_next_goes_on(kept: PostgresKeptOrders) -> None:
    log = orders(10)

    class Dies(PostgresCore):
        def count(self, applied: Any) -> None:
            with psycopg.connect(self.session.dsn, autocommit=True) as other:
                pid = self.session.connection.info.backend_pid
                other.execute("SELECT pg_terminate_backend(%s)", (pid,))
            super().count(applied)

    with pytest.raises(Unavailable):
        replace(kept, store=store_with(Dies)).apply(0, 0, 10, log.between(0, 10))
    assert kept.tables() == expected([Log()])
    all_of(kept, log)
    check(kept, [log])


def test_a_commit_whose_answer_is_lost_is_decided_by_the_position(kept: PostgresKeptOrders) -> None:
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


def test_c14_versions_in_the_wrong_order_within_one_range_are_put_right(
    kept: PostgresKeptOrders,
) -> None:
    one, two, three = history("a", [state_of("a", region="north"), None, state_of("a")])
    log = logged(three, two, one, two)
    kept.apply(0, 0, 3, log.between(0, 3))
    kept.apply(0, 3, 4, log.between(3, 4))
    check(kept, [log])


def test_sessions_belong_to_threads(kept: PostgresKeptOrders) -> None:
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
