"""What is repeated, for how long, and what ends it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
from psycopg.errors import DeadlockDetected

from everstate.errors import Fenced, NotFound, Unavailable
from everstate.retrying import may_pass, until_stopped, within
from everstate.sources.stores.postgres.database import InsertedMeanwhile, retried

LOG = logging.getLogger("everstate.test")


class Failing:
    """A call that fails some times with an error, then returns how often it was called."""

    def __init__(self, times: int, error: Exception) -> None:
        self.calls, self._times, self._error = 0, times, error

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return self.calls


def test_a_call_is_repeated_while_its_error_passes() -> None:
    assert within(5.0, Unavailable, pause_s=0.001)(Failing(3, Unavailable("not yet."))) == 4
    assert within(5.0, may_pass, pause_s=0.001)(Failing(3, Unavailable("not yet."))) == 4


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


def _until_stopped(step: Callable[[], int], stop: threading.Event) -> Callable[[], int | None]:
    return until_stopped(
        step,
        stop,
        waiting="the worker waits",
        log=LOG,
        passes=may_pass,
        pause_s=0.01,
        pause_s_max=0.02,
    )


def test_pauses_double_to_a_limit_and_start_again_after_a_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = Failing(3, Unavailable("the server is down."))
    stop = threading.Event()
    repeated = _until_stopped(step, stop)
    assert repeated() == 4
    step.calls = 2
    assert repeated() == 4
    assert all(each.startswith("the worker waits 0.0 s: the server") for each in caplog.messages)
    pauses = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses == [0.01, 0.02, 0.02, 0.01]


def test_a_stop_ends_the_pause_and_the_step_is_not_repeated() -> None:
    stop = threading.Event()
    step = Failing(1_000_000, Unavailable("the server is down."))
    repeated = until_stopped(
        step, stop, waiting="it waits", log=LOG, passes=may_pass, pause_s=600, pause_s_max=600
    )
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    begun = time.monotonic()
    assert repeated() is None
    assert time.monotonic() - begun < 60
    assert step.calls == 1
    timer.join()


def test_a_step_is_made_though_a_stop_came_before_it() -> None:
    stop = threading.Event()
    stop.set()
    assert _until_stopped(Failing(0, Unavailable("never.")), stop)() == 1


def test_a_part_raises_what_does_not_pass_and_prepares_each_pause() -> None:
    stop, dropped = threading.Event(), []
    failures = [Unavailable("down."), Unavailable("down."), Fenced("another one took over.")]

    def step() -> int:
        raise failures.pop(0)

    repeated = until_stopped(
        step,
        stop,
        waiting="it waits",
        log=LOG,
        passes=may_pass,
        pause_s=0.001,
        pause_s_max=0.001,
        before_pause=lambda: dropped.append(len(failures)),
    )
    with pytest.raises(Fenced):
        repeated()
    assert dropped == [2, 1]


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
