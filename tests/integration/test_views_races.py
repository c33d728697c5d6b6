"""Attempts that meet: positions (C11), staging tables (C11) and locks (C17), with planted defects.

The attempts are held at a barrier where it matters, so that every run has the same schedule.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from everstate.errors import PositionMoved, Unavailable
from everstate.postgres import identifier
from everstate.views.batch import Batch
from everstate.views.control import Control
from everstate.views.control.verdicts import CoreTables
from everstate.views.core import RETRIES_MAX, Applied
from everstate.views.gate import GateRow, Ints, Keys
from everstate.views.stores import PostgresViewStore, close_store
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.session import StoreSession
from everstate.views.stores.postgres.transaction import PostgresCore
from everstate.views.stores.postgres.writes import GATE_STAGE
from everstate.views.tables import KeptTable
from kit.view_contract import TOTALS, check
from kit.view_oracle import differences, expected
from kit.view_orders import Log, orders
from kit.view_postgres import PostgresKeptOrders

_MEET_S = 20.0


def with_core(kept: PostgresKeptOrders, core: type[PostgresCore]) -> PostgresKeptOrders:
    return replace(kept, store=type("Double", (PostgresViewStore,), {"core_class": core}))


def race(kept: PostgresKeptOrders, *attempts: Callable[[], object]) -> None:
    """Run attempts in threads of their own, each with its own session."""

    def run(attempt: Callable[[], object]) -> None:
        try:
            attempt()
        finally:
            close_store(kept.dsn)

    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(run, attempts))


# C11: the position


def test_c11_two_attempts_on_one_position_apply_once(kept: PostgresKeptOrders) -> None:
    log = orders(40, versions=3)
    ends = [log.end, log.end // 2, log.end // 3] * 2
    together, core = threading.Barrier(len(ends)), kept.core()
    met = threading.local()

    class Together(PostgresCore):
        """All have prepared when the first one asks for the position."""

        def take(self, start: int, end: int) -> bool:
            if not hasattr(met, "once"):
                met.once = True
                together.wait(_MEET_S)
            return super().take(start, end)

    here = with_core(kept, Together)
    race(
        kept,
        *(lambda end=end: here.apply(0, 0, end, log.between(0, end), core=core) for end in ends),
    )
    for start in range(0, log.end, 30):
        kept.apply(0, start, min(start + 30, log.end), log.between(start, start + 30))
    check(kept, [log])
    account = kept.control.counters("order")
    assert account.total == log.end


def test_c11_keepers_of_different_riders_write_each_view_once(kept: PostgresKeptOrders) -> None:
    """One keeper knows all views, the other only some: who loses the race changes nothing."""
    log = orders(30, versions=2)
    every, some = kept.core(), kept.core([TOTALS])
    for start in range(0, log.end, 10):
        changes = log.between(start, start + 10)
        attempts = [
            lambda core=core, start=start, changes=changes: kept.apply(
                0, start, start + 10, changes, core=core
            )
            for core in (every, some)
        ]
        race(kept, *attempts)
    for rider in every.riders:
        position = kept.vector(rider)[0]
        if position < log.end:
            kept.trail(rider, 0, position, log.end, log.between(position, log.end))
    check(kept, [log])


def write_position(opened: PostgresCore, end: int) -> None:
    opened.session.connection.execute(
        "UPDATE kept.position SET next_offset = %s WHERE view = 'order_latest' AND partition = %s",
        (end, opened.partition),
    )


def test_c11_planted_position_without_compare_and_swap_is_caught(kept: PostgresKeptOrders) -> None:
    """The gate keeps the rows right; position and account (law 7) tell of the second attempt."""

    class PositionWritten(PostgresCore):
        """Planted: the position is written first, and compared with nothing."""

        def take(self, start: int, end: int) -> bool:
            write_position(self, end)
            return True

    log = orders(10)
    broken = with_core(kept, PositionWritten)
    broken.apply(0, 0, 10, log.between(0, 10))
    broken.apply(0, 0, 5, log.between(0, 5))
    assert kept.vector() == {0: 5}
    assert differences(kept.tables(), expected([log])) == {"duplicate": (5, 0)}
    assert kept.control.counters("order").total == 15, "ten records were read"


@pytest.mark.parametrize("planted", [True, False])
def test_c11_two_attempts_that_judge_at_once_sum_twice_without_compare_and_swap(
    kept: PostgresKeptOrders, planted: bool
) -> None:
    """Reading at one position, both pass the gate; only the swapped position stops the second."""
    log = orders(10)
    core = kept.core(
        [rider for rider in kept.core().riders if rider.merge not in ("append", "history")]
    )
    both_hold_it = threading.Barrier(2)

    class WrittenLast(PostgresCore):
        """Planted: positions are taken on trust, and written with the rows."""

        def take(self, start: int, end: int) -> bool:
            return True

        def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
            found = super().gates(keys, first)
            both_hold_it.wait(_MEET_S)
            return found

        def _ride_together(
            self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
        ) -> None:
            for rider in riders:
                self.write_rider(rider, batch)

        def count(self, applied: Applied) -> None:
            super().count(applied)
            write_position(self, 10)

    here = with_core(kept, WrittenLast) if planted else kept
    attempt = lambda: here.judge(0, 0, 10, log.between(0, 10), core=core)  # noqa: E731
    race(kept, attempt, attempt)
    wrong = differences(kept.tables(), expected([log]))
    if not planted:
        assert wrong.keys() == {"history"}, "which does not ride here"
        return
    assert {"by_region", "totals", "applied"} <= wrong.keys()
    assert [row[:2] for row in wrong["by_region"][0]] == [("north", 20)]


def test_planted_a_verdict_outside_the_cores_transaction_is_caught(
    kept: PostgresKeptOrders,
) -> None:
    """A core that dies before its commit must leave no note, or what trails skips a change."""

    class Outside(PostgresCore):
        def note_duplicates(self, runs: Sequence[tuple[int, int]]) -> None:
            with psycopg.connect(self.session.dsn, autocommit=True) as other:
                CoreTables(other, "kept", self.core, self.partition).note_duplicates([(0, 9)])

        def commit(self, end: int) -> None:
            raise Unavailable("killed before the commit")

    log = orders(10)
    log.append(log.records[3])
    with pytest.raises(Unavailable):
        with_core(kept, Outside).apply(0, 0, 11, log.between(0, 11))
    kept.apply(0, 0, 11, log.between(0, 11), core=kept.core([]))
    kept.trail(TOTALS, 0, 0, 11, log.between(0, 11))
    assert kept.query("SELECT orders FROM totals") == [(0,)]


# V7: meeting


def test_v7_a_view_that_catches_up_meets_a_busy_core_and_rides(kept: PostgresKeptOrders) -> None:
    log = orders(400)
    core = kept.core([rider for rider in kept.core().riders if rider != TOTALS])
    kept.apply(0, 0, 20, log.between(0, 20), core=core)
    stop = threading.Event()

    def keep() -> None:
        for start in range(20, log.end, 2):
            if kept.vector(TOTALS)[0] == start:
                stop.set()
            time.sleep(0.02)  # As Spark plans and reads, outside of the core's transaction.
            kept.apply(0, start, start + 2, log.between(start, start + 2))

    def trail() -> None:
        with psycopg.connect(kept.dsn, autocommit=True) as own:
            control = Control(own, "kept")
            while not stop.is_set():
                start, end = control.vector("totals", 1)[0], control.core_vector("order")[0]
                if start == end:
                    continue
                with suppress(PositionMoved):  # it rode meanwhile
                    kept.trail(TOTALS, 0, start, end, log.between(start, end), meets=True)
                if end == log.end:
                    return

    race(kept, keep, trail)
    position = kept.vector(TOTALS)[0]
    if position < log.end:
        kept.trail(TOTALS, 0, position, log.end, log.between(position, log.end))
    assert stop.is_set(), "it never stood where the core was"
    check(kept, [log])


# C11: staging


@pytest.mark.parametrize("planted", [True, False])
def test_c11_a_staging_table_that_attempts_share_is_summed_twice(
    kept: PostgresKeptOrders, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Planted: views are staged in tables of the schema, which two partitions' tasks share."""
    if planted:
        share_staging(monkeypatch)
    kept.reset(2)
    logs = [orders(10, "north", prefix="n"), orders(4, "south", prefix="s")]
    for partition, log in enumerate(logs):
        kept.apply(partition, 0, log.end, log.between(0, log.end))
    wrong = differences(kept.tables(), expected(logs))
    if not planted:
        assert wrong == {}
        return
    assert {row[0]: row[1] for row in wrong["by_region"][0]} == {"north": 20, "south": 4}
    assert wrong["totals"][0][0][0] == 24


def share_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage all but the gate in plain tables of the views' schema."""
    own, prepare = writes.stage_of, writes.prepare_stage

    def shared(name: str) -> str:
        return own(name) if name == GATE_STAGE else identifier("kept", name)

    def prepare_shared(session: StoreSession, name: str, row: str) -> None:
        if name == GATE_STAGE:
            prepare(session, name, row)
            return
        create = f"CREATE TABLE IF NOT EXISTS {shared(name)} AS {row} WITH NO DATA"
        session.connection.execute(create.encode())

    monkeypatch.setattr(writes, "stage_of", shared)
    monkeypatch.setattr(writes, "prepare_stage", prepare_shared)


# C17


def hot_logs(partitions: int, records: int) -> list[Log]:
    """Orders of many partitions that all are in one group."""
    return [orders(records, "hot", prefix=f"p{number}-") for number in range(partitions)]


def test_c17_one_hot_group_from_twelve_partitions_has_no_deadlock(kept: PostgresKeptOrders) -> None:
    kept.reset(12)
    logs, core = hot_logs(12, 60), kept.core()

    def keep(partition: int) -> None:
        for start in range(0, 60, 20):
            changes = logs[partition].between(start, start + 20)
            kept.apply(partition, start, start + 20, changes, core=core)

    race(kept, *(lambda p=partition: keep(p) for partition in range(12)))
    check(kept, logs)


class OneShard(PostgresCore):
    """Planted: all partitions add to the same row of a group."""

    def write_rider(self, rider: KeptTable, batch: Batch) -> None:
        place = replace(self.place, partition=0) if rider.merge == "sum" else self.place
        writes.write_view(self.session, place, rider, batch)


@pytest.mark.parametrize(("planted", "attempts"), [(PostgresCore, 2), (OneShard, 3)])
def test_c17_two_partitions_that_cross_deadlock_only_in_one_shard_and_the_loser_tries_again(
    kept: PostgresKeptOrders, planted: type[PostgresCore], attempts: int
) -> None:
    """One takes `by_region` then `totals`, the other the other way round, both half-way at once."""
    kept.reset(2)
    logs, core = hot_logs(2, 5), kept.core()
    half_way, won = threading.Barrier(2), threading.Event()
    begun: list[int] = []
    sums = [rider for rider in core.riders if rider.merge == "sum"]

    class Crossing(planted):  # type: ignore[valid-type, misc]
        def take(self, start: int, end: int) -> bool:
            begun.append(self.partition)
            if begun.count(self.partition) > 1:
                # Otherwise the loser could insert its group again before the winner does.
                assert won.wait(_MEET_S)
            return bool(super().take(start, end))

        def _ride_together(
            self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
        ) -> None:
            others = [rider for rider in riders if rider not in sums]
            crossed = sums if self.partition == 0 else sums[::-1]
            super()._ride_together([*others, crossed[0]], start, end, batch)
            if begun.count(self.partition) == 1:
                half_way.wait(_MEET_S)
            super()._ride_together([crossed[1]], start, end, batch)

    crossing = with_core(kept, Crossing)

    def keep(partition: int) -> None:
        crossing.apply(partition, 0, 5, logs[partition].between(0, 5), core=core)
        won.set()

    race(kept, *(lambda p=partition: keep(p) for partition in range(2)))
    assert len(begun) == attempts
    check(kept, logs)


def test_c17_deadlocks_without_end_are_given_up_and_change_nothing(
    kept: PostgresKeptOrders,
) -> None:
    log, begun = orders(3), []

    class Unlucky(PostgresCore):
        def write_latest(self, batch: Batch) -> Any:
            begun.append(1)
            raise psycopg.errors.DeadlockDetected("deadlock detected")

    with pytest.raises(Unavailable, match="deadlock"):
        with_core(kept, Unlucky).judge(0, 0, 3, log.between(0, 3))
    assert len(begun) == RETRIES_MAX + 1
    assert kept.tables() == expected([Log()])
