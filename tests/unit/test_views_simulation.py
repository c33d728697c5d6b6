"""Schedules of keepers, builds and readers in memory; each planted defect is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from everstate.errors import Unavailable
from everstate.views.batch import Batch
from everstate.views.control import BUILDING, ViewVersion
from everstate.views.core import Applied, Failure
from everstate.views.gate import GateRow, Ints, Keys
from everstate.views.kinds import ViewPlan
from everstate.views.publishing import InTheWay
from everstate.views.tables import KeptTable, Vector
from everstate.views.trailing import Exceptions
from kit.view_actors import MemoryPublisher, RepeatableReader, TwoStores, note
from kit.view_memory import (
    MemoryCore,
    MemoryTrailing,
    MemoryTransaction,
    exceptions_in,
)
from kit.view_memory_orders import LATEST
from kit.view_oracle import accepted
from kit.view_orders import Log, history, logged, orders, state_of
from kit.view_simulation import Simulation, Wrong
from kit.view_world import PLANS
from tiers import counted

SCHEDULES = counted(1_000, full=5_000)
TRIES_MAX = 400


def test_no_schedule_shows_a_reader_what_is_wrong_and_all_come_to_the_same_end() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception as wrong:
            pytest.fail(f"{wrong!r}: `Simulation({seed}).run()` shows it again")
        happened += simulation.happened
    seldom = ("published", "built", "killed build", "released", "behind", "restored", "undone")
    missing = [what for what in seldom if not happened[what]]
    assert missing == [], "schedules in which nothing happens prove nothing"


# Planted defects, by what must not be lost (views.md)


class NoSwap(MemoryCore):
    """C11: the position is written, and compared with nothing."""

    def take(self, start: int, end: int) -> bool:
        place = (LATEST, 1, self.partition)
        self.transaction.put("position", place, (end, self.position_of(LATEST, 1)[1]))  # type: ignore[index]
        return True


class FromRows(MemoryCore):
    """C12: the position is that of the last record, and not the end of the range."""

    last = 0

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        self.last = max(keys.changes["offset"].to_pylist(), default=0)
        return super().gates(keys, first)

    def commit(self, end: int) -> None:
        place = (LATEST, 1, self.partition)
        if self.last:
            self.transaction.put("position", place, (self.last + 1, self.position_of(LATEST, 1)[1]))  # type: ignore[index]
        super().commit(end)


class StopsAll(MemoryCore):
    """C13: a view that fails takes the core with it."""

    def ride(
        self, riders: Sequence[KeptTable], start: int, end: int, batch: Batch
    ) -> list[Failure]:
        if failures := super().ride(riders, start, end, batch):
            raise Unavailable(failures[0].reason)
        return failures


class NoGate(MemoryCore):
    """Law 2: nothing is compared with the newest version."""

    def gates(self, keys: Keys, first: Ints) -> dict[str, GateRow]:
        return {}


class NotesOutside(MemoryCore):
    """A verdict is written in a transaction of its own, which stays when the core's does not."""

    def note_duplicates(self, runs: Sequence[tuple[int, int]]) -> None:
        apart = MemoryTransaction(self.store.database)
        for first, last in runs:
            apart.put("duplicate", (self.partition, max(0, first - 1)), last)
        apart.commit()


class CountsOthers(MemoryCore):
    """Law 7: what was applied is counted as something else; the total is right."""

    def count(self, applied: Applied) -> None:
        super().count(replace(applied, applied=0, duplicate=applied.applied + applied.duplicate))


class CountsHeld(MemoryCore):
    """Law 7: what waits is counted as dead; the total is right."""

    def count(self, applied: Applied) -> None:
        waiting = applied.held - applied.released
        super().count(replace(applied, held=applied.released, dead=applied.dead + waiting))


class AnyPlan(MemoryTrailing):
    """V10: the position is compared, and not the meaning."""

    def take(self, start: int, end: int) -> bool:
        found = self.position_of(self.table.view, self.table.version)
        meaning = self.table.fingerprint if found is None else found[1]
        return self.swap(self.table.view, self.table.version, meaning, start, end)


class NotesFirst(MemoryTrailing):
    """V1: the core's notes are read before its position."""

    def core_position(self, *, hold: bool) -> int:
        self.first = exceptions_in(self.transaction, self.partition, 0, 10**9)
        return super().core_position(hold=hold)

    def exceptions(self, start: int, end: int) -> Exceptions:
        return self.first


class PassesCore(MemoryTrailing):
    """A trailing view goes as far as the log does."""

    def core_position(self, *, hold: bool) -> int:
        return 10**9


class AtOwnOffset(MemoryTrailing):
    """A change that waited is applied where it was read, and not where it was released."""

    def exceptions(self, start: int, end: int) -> Exceptions:
        found = super().exceptions(start, end)
        return Exceptions(found.dead, found.duplicates, frozenset(), {})


class BeforeMeeting(MemoryPublisher):
    """A version is published before it has met the core."""

    def vectors(self, row: ViewVersion) -> tuple[Vector, Vector]:
        _, mine = super().vectors(row)
        return mine, mine


class UnderOlderSnapshot(MemoryPublisher):
    """V13: nobody asks for readers whose snapshot is older."""

    def caught_up(self, row: ViewVersion) -> str | None:
        return None


def core_is(core: type[MemoryCore]) -> type[Simulation]:
    store = type("Planted", (TwoStores,), {"core_class": core})
    return type(core.__name__, (Simulation,), {"store_class": store})


def trailing_is(trailing: type[MemoryTrailing]) -> type[Simulation]:
    store = type("Planted", (TwoStores,), {"trailing_class": trailing})
    return type(trailing.__name__, (Simulation,), {"store_class": store})


def publisher_is(publisher: type[MemoryPublisher]) -> type[Simulation]:
    return type(publisher.__name__, (Simulation,), {"publisher_class": publisher})


class TrimmedEarly(Simulation):
    """V3: held bytes go when the core has passed, whoever still needs them."""

    def notes_below(self, vectors: Sequence[Vector]) -> dict[int, int]:
        return self.core_vector()


class FromNothing(Simulation):
    """C15: a new version begins at its vector, and not with what came before."""

    def accepted_for_build(self, vector: Vector) -> list[Any]:
        return []


class DeadOfArchive(Simulation):
    """V5: a build takes for dead what the archive cannot read, and not what the core said."""

    def accepted_for_build(self, vector: Vector) -> list[Any]:
        same = {
            id(r): j
            for log, judged in zip(self.logs, self.judged, strict=True)
            for r, j in zip(log.records.values(), judged.records.values(), strict=True)
        }
        return [same[id(record)] for record in accepted(self.logs, vector)]


class ForgetsUndo(Simulation):
    """C14: any start reverses what an operator asked for."""

    def go_back(self, row: ViewVersion, seen: ViewVersion) -> None:
        super().go_back(row, seen)
        note(self.database, row, undone=None)


class ForgetsRebuild(Simulation):
    """C14: any start gives up a rebuild that was asked for, or is half done."""

    def take_steps(self) -> None:
        super().take_steps()
        seen = {row.name: row.fingerprint for row in self.versions() if row.published}
        for row in self.versions():
            if row.status == BUILDING and row.fingerprint == seen.get(row.name):
                self.give_up(row)


class NumbersLeft(Simulation):
    """A3: the next number is that after the highest that is left."""

    def numbers(self) -> dict[str, int]:
        rows = self.versions()
        return {row.name: max(r.version for r in rows if r.name == row.name) for row in rows}


PLANTED: Iterable[type[Simulation]] = (
    *map(core_is, (NoSwap, FromRows, StopsAll, NoGate, NotesOutside, CountsOthers, CountsHeld)),
    *map(trailing_is, (AnyPlan, NotesFirst, PassesCore, AtOwnOffset)),
    *map(publisher_is, (BeforeMeeting, UnderOlderSnapshot)),
    *(TrimmedEarly, FromNothing, DeadOfArchive, ForgetsUndo, ForgetsRebuild, NumbersLeft),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_planted_defect_is_caught(planted: type[Simulation]) -> None:
    for seed in range(TRIES_MAX):
        try:
            planted(seed).run()
        except (Wrong, AssertionError):
            return
    pytest.fail(f"{planted.__name__} was not seen in {TRIES_MAX} schedules")


# Planted defects that few schedules meet: each with the schedule that does


class Calm(Simulation):
    killed_builds = 0.0

    def until(self, end: int) -> None:
        """The log, the archive and all views come to an offset."""
        self.ends = self.archived = [end, 0]
        for _ in range(20):
            self.go_on()

    def version_2(self) -> ViewVersion:
        """Another version of `totals` is asked for."""
        seen = next(row for row in self.versions() if row.name == "totals")
        row = replace(seen, version=2, status=BUILDING, published=False, built=None)
        self.put(row)
        return row


class MetOnce(MemoryPublisher):
    """The meeting of a version that was replaced is remembered when readers go back to it."""

    def fell_behind(self, row: ViewVersion) -> None:
        pass


class StaysMet(MemoryTrailing):
    """A version that moves by itself is said to have caught up when it first did."""

    def take(self, start: int, end: int) -> bool:
        return self.swap(self.table.view, self.table.version, self.table.fingerprint, start, end)


@pytest.mark.parametrize("planted", [False, True])
def test_v13_a_reader_from_before_the_way_back_is_waited_for_too(planted: bool) -> None:
    simulation = Calm(0, [orders(6), Log()])
    if planted:
        simulation.publisher_class = MetOnce  # type: ignore[misc]
        simulation.store.trailing_class = StaysMet  # type: ignore[misc]
    simulation.until(3)
    newer = simulation.version_2()
    simulation.until(3)
    simulation.undo()
    simulation.until(3)
    note(simulation.database, newer, status=BUILDING)  # and forward again
    simulation.until(3)
    published = [(row.name, row.version) for row in simulation.versions() if row.published]
    assert ("totals", 2) in published
    simulation.until(6)
    simulation.readers.append(RepeatableReader(simulation.database))
    simulation.undo()
    simulation.until(6)
    if planted:
        with pytest.raises(Wrong, match="older snapshot"):
            simulation.look()
        return
    simulation.look()
    simulation.readers.clear()
    simulation.go_on()
    assert ("totals", 1) in [(r.name, r.version) for r in simulation.versions() if r.published]


class Held(MemoryPublisher):
    """A reader holds a lock on every name."""

    def point(self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan) -> bool:
        raise InTheWay("report (process 7)")


def test_a_reader_in_the_way_is_named_and_the_try_is_reported_so_that_the_next_one_waits() -> None:
    simulation = Calm(0, [orders(6), Log()])
    simulation.until(3)
    newer = simulation.version_2()
    simulation.publisher_class = Held  # type: ignore[misc]
    with pytest.raises(InTheWay):
        simulation.until(3)
    (row,) = (r for r in simulation.versions() if (r.name, r.version) == (newer.name, 2))
    assert row.waits_for == "built; waits for report (process 7), which holds a lock on its name"
    assert (row.status, row.published) == (BUILDING, False)


@pytest.mark.parametrize("planted", [False, True])
def test_v6_notes_that_a_build_needs_are_not_trimmed_while_it_begins(planted: bool) -> None:
    """Planted: its vector is read before anything holds the notes."""
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    simulation = Calm(0, [logged(one, three, two), Log()])
    simulation.until(3)
    simulation.archived = [2, 0]
    early = simulation.build_vector()
    simulation.archived = [3, 0]
    simulation.trim()
    vector = early if planted else simulation.build_vector()
    simulation.open_build(simulation.version_2(), vector)
    simulation.pending.pop()()
    if planted:
        with pytest.raises(AssertionError, match="a view needs what was trimmed"):
            simulation.until(3)
        return
    simulation.until(3)
    simulation.look()


class LeftBuild(Calm):
    """A task of a build that was given up adds its rows to the next one's table."""

    def is_attempt(self, row: ViewVersion, attempt: object) -> bool:
        return (row.name, row.version) in self.database.table("view")


@pytest.mark.parametrize("kind", [Calm, LeftBuild])
def test_a_build_that_was_given_up_adds_nothing_to_the_next(kind: type[Calm]) -> None:
    simulation = kind(0, [orders(6), Log()])
    simulation.until(3)
    row = simulation.version_2()
    simulation.open_build(row, simulation.build_vector())
    left = simulation.pending.pop()
    simulation.forget(row)
    simulation.until(6)
    simulation.open_build(simulation.version_2(), simulation.build_vector())
    simulation.pending.insert(0, left)
    simulation.until(6)
    if kind is LeftBuild:
        with pytest.raises(Wrong, match="totals, version 2"):
            simulation.look()
        return
    simulation.look()


@pytest.mark.parametrize("planted", [False, True])
def test_v13_a_version_that_fell_behind_between_two_tries_waits_for_readers_of_that_time(
    planted: bool,
) -> None:
    """A keeper of another app goes on without it, and it catches up before the next try."""
    simulation = Calm(0, [orders(6), Log()])
    if planted:
        simulation.store.trailing_class = StaysMet  # type: ignore[misc]
    simulation.until(3)
    newer = simulation.version_2()
    simulation.put(replace(newer, fingerprint=f"{newer.fingerprint}/other"))
    simulation.readers.append(RepeatableReader(simulation.database))
    simulation.until(4)
    simulation.ends = [5, 0]
    simulation.plan_keeping(frozenset(PLANS))
    simulation.pending.pop()()
    simulation.readers.append(RepeatableReader(simulation.database))
    simulation.readers.pop(0)
    simulation.until(5)
    if planted:
        with pytest.raises(Wrong, match="an older snapshot reads totals"):
            simulation.look()
        return
    simulation.look()
    seen = [row for row in simulation.versions() if row.published and row.name == "totals"]
    assert [row.version for row in seen] == [1], "it waits for the reader"
    simulation.readers.clear()
    simulation.go_on()
    simulation.look()
    seen = [row for row in simulation.versions() if row.published and row.name == "totals"]
    assert [row.version for row in seen] == [2]
