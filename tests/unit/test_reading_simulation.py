"""Readers that follow changes under schedules of keepers in memory; each planted defect is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstate.changes.tokens import Spot
from everstate.views.trailing import Exceptions
from kit.view_actors import Subscriber
from kit.view_memory import MemoryStore
from kit.view_orders import Log, history, logged, state_of
from kit.view_simulation import Simulation, Wrong
from tiers import counted

SCHEDULES = counted(15, full=500)
TRIES_MAX = 400


class Following(Simulation):
    """Many follow; nothing else is looked at."""

    def look(self) -> None:
        self.follow()
        self.follow()


def test_every_reader_gets_each_change_after_its_beginning_once_and_in_order() -> None:
    followed = released = 0
    for seed in range(SCHEDULES):
        simulation = Following(seed)
        simulation.run()
        followed += simulation.happened["followed"]
        released += simulation.happened["released"]
    assert followed > 10 * SCHEDULES
    assert released > 0


class NotesFirst(Subscriber):
    """V1: what was noted is read before the position, and is not complete up to it."""

    early: Exceptions | None = None

    def judged(
        self, store: MemoryStore, partition: int, start: int, end: int
    ) -> tuple[int, Exceptions]:
        position, now = super().judged(store, partition, start, end)
        told, self.early = self.early, now
        return position, now if told is None else told


class AtOwnOffset(Subscriber):
    """A change that waited is given where it was read, and not where it was released."""

    def judged(
        self, store: MemoryStore, partition: int, start: int, end: int
    ) -> tuple[int, Exceptions]:
        position, told = super().judged(store, partition, start, end)
        return position, replace(told, held=frozenset(), released={})


class LikeTheLog(Subscriber):
    """Duplicates are given again."""

    def judged(
        self, store: MemoryStore, partition: int, start: int, end: int
    ) -> tuple[int, Exceptions]:
        position, told = super().judged(store, partition, start, end)
        return position, replace(told, duplicates=())


class ForgetsTheRest(Subscriber):
    """Who stops among changes of one offset goes on behind that offset."""

    def read(self, store: MemoryStore, partition: int, log: Log, end: int, most: int) -> None:
        self.spots[partition] = Spot(self.spots[partition].covered_by)
        super().read(store, partition, log, end, most)


class BeginsAgain(Subscriber):
    """Who stops among changes of one offset gets all of them again."""

    def read(self, store: MemoryStore, partition: int, log: Log, end: int, most: int) -> None:
        self.spots[partition] = Spot(self.spots[partition].next_offset)
        super().read(store, partition, log, end, most)


PLANTED = (NotesFirst, AtOwnOffset, LikeTheLog, ForgetsTheRest, BeginsAgain)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_planted_defect_is_caught(planted: type[Subscriber]) -> None:
    kind = type(planted.__name__, (Following,), {"subscriber_class": planted})
    for seed in range(TRIES_MAX):
        try:
            kind(seed).run()
        except (Wrong, AssertionError):
            return
    pytest.fail(f"{planted.__name__} was not seen in {TRIES_MAX} schedules")


@pytest.mark.parametrize("planted", [False, True])
def test_the_whole_past_can_be_read_when_all_views_have_passed_it(planted: bool) -> None:
    """Planted: the notes go with the bytes."""
    one, two, three = history("a", [state_of("a", quantity=n) for n in (1, 2, 3)])
    simulation = Following(0, [logged(one, three, three, two), Log()])
    simulation.ends = simulation.archived = [4, 0]
    for _ in range(20):
        simulation.go_on()
    simulation.trim()
    if planted:
        simulation.database.table("held").clear()
    subscriber = Subscriber({0: 0, 1: 0})
    subscriber.read(simulation.store, 0, simulation.logs[0], 4, 9)
    assert ([change.version for change in subscriber.given] == [1, 2, 3]) is not planted
