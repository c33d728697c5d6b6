"""What is repeated because its error may pass: for some seconds, or until a part is stopped.

The loops are tenacity's. This module has the two policies that several rooms share; a policy that
one place has is written there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from logging import Logger
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
    wait_fixed,
)

from everstate.errors import EverstateError
from everstate.parts import waits, works

T = TypeVar("T")


def within(
    seconds: float, passing: type[Exception] | Callable[[BaseException], bool], *, pause_s: float
) -> Retrying:
    """Repeats a call after each ``passing`` error; raises the error that comes after ``seconds``.

    ``passing``: a class of errors, or a function that decides whether one may pass. Others are
    raised at once. Threads may share it. Cost: 5 to 10 µs a call.
    """
    return Retrying(
        retry=(
            retry_if_exception_type(passing)
            if isinstance(passing, type)
            else retry_if_exception(passing)
        ),
        stop=stop_after_delay(seconds),
        wait=wait_fixed(pause_s),
        reraise=True,
    )


def until_stopped(
    step: Callable[[], T],
    stop: threading.Event,
    *,
    waiting: str,
    log: Logger,
    passes: Callable[[BaseException], bool],
    pause_s: float,
    pause_s_max: float,
    before_pause: Callable[[], object] = lambda: None,
) -> Callable[[], T | None]:
    """The step of a part, repeated while its errors pass; ``None``: ``stop`` ended a pause.

    The pauses double from ``pause_s`` to ``pause_s_max``, and start from the first after a step
    that succeeded. Each one is logged with its error after the words ``waiting`` ("the relay
    waits"), and reported as the state of this thread's part. Errors that do not pass are raised.
    """

    def tried() -> T | None:
        # After a pause that `stop` has ended, tenacity would call the step once more.
        is_repeated = again.statistics["attempt_number"] > 1
        return None if is_repeated and stop.is_set() else step()

    def paused(state: RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error, pause = state.outcome.exception(), state.next_action.sleep
        assert isinstance(error, EverstateError)
        log.warning("%s %.1f s: %s", waiting, pause, error)
        waits(error, pause)
        before_pause()

    again = Retrying(
        sleep=sleep_using_event(stop),
        stop=stop_when_event_set(stop),
        wait=wait_exponential(multiplier=pause_s, max=pause_s_max),
        retry=retry_if_exception(passes),
        before_sleep=paused,
        retry_error_callback=lambda _: None,
    )

    def repeated() -> T | None:
        done: T | None = again(tried)
        if not stop.is_set():
            works()
        return done

    return repeated


def may_pass(error: BaseException) -> bool:
    """Whether an error of everstate's may be gone at the next attempt."""
    return isinstance(error, EverstateError) and error.retryable
