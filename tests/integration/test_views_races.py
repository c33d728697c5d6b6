"""Attempts that meet: positions (C11), staging tables (C11) and locks (C17), with planted defects.

The attempts are held at a barrier where it matters, so that every run has the same schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from view_cases import orders

from everstate.errors import PositionMoved, Unavailable
from everstate.log.positions import Range
from everstate.testing.view_contract import Log, check, differences, expected, observed
from everstate.testing.view_postgres import KeptViews
from everstate.views import control
from everstate.views.stores.postgres import apply as apply_half
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.apply import RETRIES_MAX, Applied, Applier
from everstate.views.stores.postgres.gate import Keys, Verdict
from everstate.views.stores.postgres.group import LinearTable, RowTable
from everstate.views.stores.postgres.quarantine import quarantine
from everstate.views.stores.postgres.session import Session, close
from everstate.views.stores.postgres.writes import GATE_STAGE, Batch

_MEET_S = 20.0


def race(kept: KeptViews, *attempts: Callable[[], object]) -> None:
    """Run attempts in threads of their own, each with its own session."""

    def run(attempt: Callable[[], object]) -> None:
        try:
            attempt()
        finally:
            close(kept.dsn)

    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(run, attempts))


def position(kept: KeptViews) -> list[int]:
    return [each.next_offset for each in control.positions(kept.connection, "kept", "order")]


# C11: the position


def test_c11_two_attempts_on_one_position_apply_once(kept: KeptViews) -> None:
    log = orders(40, versions=3)
    ends = [log.end, log.end // 2, log.end // 3] * 2
    together = threading.Barrier(len(ends))
    group = kept.group()

    class Together(Applier):
        """All have prepared when the first one asks for the position."""

        met = False

        def _take_position(self, start: int, end: int) -> bool:
            if not self.met:
                self.met = True
                together.wait(_MEET_S)
            return super()._take_position(start, end)

    here = replace(kept, applier=Together)
    race(
        kept,
        *(lambda e=end: here.apply_to(group, 0, 0, e, log.between(0, e)) for end in ends),
    )
    check(kept, [log])
    assert position(kept) == [log.end]


def test_c11_a_range_beyond_the_position_is_refused_and_changes_nothing(kept: KeptViews) -> None:
    log = orders(4)
    with pytest.raises(PositionMoved, match="behind"):
        kept.apply(0, 2, 4, log.between(2, 4))
    assert observed(kept) == expected([Log()])


def test_c11_a_plan_from_before_a_quarantine_changes_nothing(kept: KeptViews) -> None:
    log, old = orders(4), kept.group()
    quarantine(kept.connection, "kept", "order", "by_region", "test")
    with pytest.raises(PositionMoved):
        kept.apply_to(old, 0, 0, log.end, log.between(0, log.end))
    assert observed(kept) == expected([Log()])


class PositionWritten(Applier):
    """Planted: the position is written first, and compared with nothing."""

    def _take_position(self, start: int, end: int) -> bool:
        write_position(self, end)
        return True


def write_position(applier: Applier, end: int) -> None:
    applier.session.connection.execute(
        "UPDATE kept.position SET next_offset = %s "
        "WHERE view_group = %s AND generation = %s AND partition = %s",
        (end, applier.group.view_group, applier.group.generation, applier.partition),
    )


def test_c11_planted_position_without_compare_and_swap_is_caught(kept: KeptViews) -> None:
    """The gate keeps the rows right; position and account (law 7) tell of the second attempt."""
    log = orders(10)
    broken = replace(kept, applier=PositionWritten)
    broken.apply(0, 0, 10, log.between(0, 10))
    broken.apply(0, 0, 5, log.between(0, 5))
    assert position(kept) == [5]
    assert differences(observed(kept), expected([log])) == {"duplicate": (5, 0)}
    account = control.counters(kept.connection, "kept", "order")
    assert account.total == 15, "ten records were read"


@pytest.mark.parametrize("planted", [True, False])
def test_c11_two_attempts_that_judge_at_once_sum_twice_without_compare_and_swap(
    kept: KeptViews, planted: bool
) -> None:
    """Reading at one position, both pass the gate; only the swapped position stops the second."""
    log = orders(10)
    group = replace(kept.group(), history_table=None, ids_table=None)
    both_hold_it = threading.Barrier(2)

    class WrittenLast(Applier):
        """Planted: the position is taken on trust, and written with the rows."""

        def _take_position(self, start: int, end: int) -> bool:
            return True

        def _judge(self, keys: Keys) -> Verdict:
            verdict = super()._judge(keys)
            both_hold_it.wait(_MEET_S)
            return verdict

        def _count(self, applied: Applied) -> None:
            super()._count(applied)
            write_position(self, 10)

    here = replace(kept, applier=WrittenLast) if planted else kept
    attempt = lambda: here.apply_to(group, 0, 0, 10, log.between(0, 10))  # noqa: E731
    race(kept, attempt, attempt)
    wrong = differences(observed(kept), expected([log]))
    if not planted:
        assert wrong.keys() == {"history"}, "which this group does not keep"
        return
    assert {"by_region", "totals", "applied"} <= wrong.keys()
    assert [row[:2] for row in wrong["by_region"][0]] == [("north", 20)]


# C11: staging


@pytest.mark.parametrize("planted", [True, False])
def test_c11_a_staging_table_that_attempts_share_is_summed_twice(
    kept: KeptViews, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Planted: views are staged in tables of the schema, which two partitions' tasks share."""
    if planted:
        share_staging(monkeypatch)
    kept.reset(2)
    logs = [orders(10, "north", prefix="n"), orders(4, "south", prefix="s")]
    for partition, log in enumerate(logs):
        kept.apply(partition, 0, log.end, log.between(0, log.end))
    wrong = differences(observed(kept), expected(logs))
    if not planted:
        assert wrong == {}
        return
    assert {row[0]: row[1] for row in wrong["by_region"][0]} == {"north": 20, "south": 4}
    assert wrong["totals"][0][0][0] == 24


def share_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage all but the gate in plain tables of the views' schema."""
    own, prepare = writes.stage_of, writes.prepare_stage

    def shared(name: str) -> sql.Identifier:
        return own(name) if name == GATE_STAGE else sql.Identifier("kept", name)

    def prepare_shared(session: Session, name: str, columns: sql.Composed) -> None:
        if name == GATE_STAGE:
            prepare(session, name, columns)
            return
        create = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})")
        session.connection.execute(create.format(shared(name), columns))

    monkeypatch.setattr(writes, "stage_of", shared)
    monkeypatch.setattr(apply_half, "prepare_stage", prepare_shared)


# C17


def hot_logs(partitions: int, records: int) -> list[Log]:
    """Orders of many partitions that all are in one group."""
    return [orders(records, "hot", prefix=f"p{number}-") for number in range(partitions)]


def test_c17_one_hot_group_from_twelve_partitions_has_no_deadlock(kept: KeptViews) -> None:
    kept.reset(12)
    logs, group = hot_logs(12, 60), kept.group()

    def keep(partition: int) -> None:
        for start in range(0, 60, 20):
            changes = logs[partition].between(start, start + 20)
            kept.apply_to(group, partition, start, start + 20, changes)

    race(kept, *(lambda p=partition: keep(p) for partition in range(12)))
    check(kept, logs)


class OneShard(Applier):
    """Planted: all partitions add to the same row of a group."""

    def _view_write(self, view: RowTable | LinearTable) -> Callable[[Batch], None]:
        if isinstance(view, RowTable):
            return super()._view_write(view)
        where, group = self.session, self.group
        return lambda batch: writes.write_linear_view(where, group, 0, view, batch)


@pytest.mark.parametrize(("applier", "attempts"), [(Applier, 2), (OneShard, 3)])
def test_c17_two_partitions_that_cross_deadlock_only_in_one_shard_and_the_loser_tries_again(
    kept: KeptViews, applier: type[Applier], attempts: int
) -> None:
    """One takes `by_region` then `totals`, the other the other way round, both half-way at once."""
    kept.reset(2)
    logs, group = hot_logs(2, 5), kept.group()
    half_way = threading.Barrier(2)
    begun: list[int] = []

    class Crossing(applier):  # type: ignore[valid-type, misc]
        def _attempt(
            self, start: int, given: Range, changes: pa.Table, poison: Mapping[int, str]
        ) -> Applied:
            begun.append(self.partition)
            done: Applied = super()._attempt(start, given, changes, poison)
            return done

        def _writes(self) -> list[Any]:
            found = super()._writes()
            core = [write for write in found if write.core]
            views = [write for write in found if not write.core]
            if self.partition == 1:
                views.reverse()
            if begun.count(self.partition) == 1:
                meet = replace(views[0], run=lambda _: half_way.wait(_MEET_S))
                views.insert(1, meet)
            return [*core, *views]

    crossing = replace(kept, applier=Crossing)
    race(
        kept,
        *(
            lambda p=number, log=log: crossing.apply_to(group, p, 0, 5, log.between(0, 5))
            for number, log in enumerate(logs)
        ),
    )
    assert len(begun) == attempts
    check(kept, logs)


def test_c17_deadlocks_without_end_are_given_up_and_change_nothing(kept: KeptViews) -> None:
    log, begun = orders(3), []

    class Unlucky(Applier):
        def _writes(self) -> list[Any]:
            begun.append(1)
            raise psycopg.errors.DeadlockDetected("deadlock detected")

    with pytest.raises(Unavailable, match="deadlock"):
        replace(kept, applier=Unlucky).apply(0, 0, 3, log.between(0, 3))
    assert len(begun) == RETRIES_MAX + 1
    assert observed(kept) == expected([Log()])
