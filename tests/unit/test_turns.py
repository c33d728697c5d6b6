"""The keeper and the trailer take turns at an entity type."""

from __future__ import annotations

import threading

import pytest

from everstate.pipeline.keeping import turns as module
from everstate.pipeline.keeping.turns import Turns


def judged(turns: Turns) -> frozenset[str]:
    """The entity types of one step of the keeper."""
    with turns.judging(["guest", "order"]) as free:
        return free


def test_a_core_waits_while_a_view_meets_it_and_others_do_not() -> None:
    turns = Turns()
    with turns.meeting("guest"):
        assert judged(turns) == {"order"}
    assert judged(turns) == {"guest", "order"}


def test_a_view_waits_for_the_end_of_the_running_step() -> None:
    turns, met = Turns(), threading.Event()

    def meet() -> None:
        with turns.meeting("guest"):
            met.set()

    with turns.judging(["guest"]):
        meeting = threading.Thread(target=meet)
        meeting.start()
        assert not met.wait(0.2)
    assert met.wait(10)
    meeting.join()


def test_a_core_that_waited_has_its_step_before_it_waits_again() -> None:
    turns, order = Turns(), list[str]()
    with turns.meeting("guest"):
        judged(turns)  # it would have had changes

    def meet_again() -> None:
        with turns.meeting("guest"):
            order.append("view")

    meeting = threading.Thread(target=meet_again)
    meeting.start()
    with turns.judging(["guest"]) as free:
        order.append("core" if free else "nobody")
    meeting.join()
    assert order == ["core", "view"]


def test_a_view_goes_on_when_the_keeper_is_away_or_its_step_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CORES_TURN_S_MAX", 0.05)
    monkeypatch.setattr(module, "STEP_S_MAX", 0.05)
    turns = Turns()
    with turns.meeting("guest"):
        judged(turns)
    with turns.meeting("guest"):
        assert judged(turns) == {"order"}
    judged(turns)
    with turns.judging(["guest"]), turns.meeting("guest"):
        pass
    assert judged(turns) == {"guest", "order"}
