"""What is repeated, for how long, and what ends it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from psycopg.errors import DeadlockDetected

from everstate.errors import NotFound, Unavailable
from everstate.retrying import Retries, within
from everstate.sources.stores.postgres.database import InsertedMeanwhile, retried


class Failing:
    """A call that fails some times with an error, then returns how often it was called."""

    def __init__(self, times: int, error: Exception) -> None:
        self.calls, self._times, self._error = 0, times, error

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return self.calls


def passes(error: BaseException) -> bool:
    return isinstance(error, Unavailable)


@pytest.mark.parametrize("passing", [Unavailable, passes])
def test_a_call_is_repeated_while_its_error_passes(passing: Any) -> None:
    assert within(5.0, passing, pause_s=0.001)(Failing(3, Unavailable("not yet."))) == 4


def test_the_last_error_is_raised_itself_when_the_time_is_over() -> None:
    call = Failing(1_000_000, Unavailable("the server is down."))
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="the server is down"):
        within(0.05, Unavailable, pause_s=0.01)(call)
    assert 0.05 <= time.monotonic() - begun < 5
    assert call.calls > 1


@pytest.mark.parametrize("error", [NotFound("no such topic."), KeyError("key")])
def test_another_error_is_raised_at_once(error: Exception) -> None:
    call = Failing(1, error)
    with pytest.raises(type(error)):
        within(5.0, Unavailable, pause_s=0.001)(call)
    assert call.calls == 1


def test_a_write_that_lost_against_others_is_repeated_eight_times() -> None:
    lost = DeadlockDetected("deadlock detected")
    assert retried(Failing(3, lost), "order o1", in_callers_transaction=False) == 4
    call = Failing(1_000, InsertedMeanwhile())
    with pytest.raises(Unavailable, match=r"order o1: lost 8 times .*; nothing was") as caught:
        retried(call, "order o1", in_callers_transaction=False)
    assert call.calls == 8
    assert isinstance(caught.value.__cause__, InsertedMeanwhile)
    assert caught.value.public == caught.value.message


def test_a_deadlock_in_a_callers_transaction_is_the_callers() -> None:
    call = Failing(1, DeadlockDetected("deadlock detected"))
    with pytest.raises(DeadlockDetected):
        retried(call, "order o1", in_callers_transaction=True)
    assert call.calls == 1
    again = Failing(2, InsertedMeanwhile())
    assert retried(again, "order o1", in_callers_transaction=True) == 3


def test_pauses_grow_by_name_until_it_succeeds_or_was_steady() -> None:
    retries, steady = Retries(), Retries(steady_s=0.0)
    assert [retries.failed("a", (0.0, 60.0)) for _ in range(3)] == [0.0, 60.0, 60.0]
    assert retries.is_due("b")
    assert not retries.is_due("a")
    assert (retries.forget("a"), retries.forget("a"), retries.is_due("a")) == (True, False, True)
    assert steady.failed("a", (0.0, 60.0)) == 0.0
    time.sleep(0.01)
    assert steady.failed("a", (0.0, 60.0)) == 0.0, "it had worked for longer"
    assert steady.failed("a", (60.0, 90.0)) == 60.0
    assert steady.failed("a", (60.0, 90.0)) == 90.0, "it had not begun again"
