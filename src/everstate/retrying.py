"""What is repeated because its error may pass: for some seconds, or with growing pauses.

The loops of a call are tenacity's, and a policy that one place has is written there. A part's steps
are repeated by a worker (`everstate.runtime`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenacity import Retrying


def within(
    seconds: float, passing: type[Exception] | Callable[[BaseException], bool], *, pause_s: float
) -> Retrying:
    """Repeats a call after each ``passing`` error; raises the error that comes after ``seconds``.

    ``passing``: a class of errors, or a function that decides whether one may pass. Others are
    raised at once. Threads may share it. Cost: 5 to 10 µs a call.
    """
    import tenacity

    return tenacity.Retrying(
        retry=(
            tenacity.retry_if_exception_type(passing)
            if isinstance(passing, type)
            else tenacity.retry_if_exception(passing)
        ),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_fixed(pause_s),
        reraise=True,
    )


class Retries:
    """Pauses by name; a name without a failure is always due."""

    def __init__(
        self, *, steady_s: float = inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``steady_s``: a name that fails again later than that begins with the first pause."""
        self._steady_s, self._clock = steady_s, clock
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def failed(self, name: str, pauses_s: Sequence[float]) -> float:
        """Record a failure; returns the seconds until the next try, more after each failure."""
        now = self._clock()
        is_steady = now - self._due.get(name, now) > self._steady_s
        failures = 0 if is_steady else self._failures.get(name, 0)
        pause = pauses_s[min(failures, len(pauses_s) - 1)]
        self._failures[name], self._due[name] = failures + 1, now + pause
        return pause

    def is_due(self, name: str) -> bool:
        """Whether a name may be tried now."""
        return self._due.get(name, -inf) <= self._clock()

    def forget(self, name: str) -> bool:
        """Clear the failures of a name; returns whether there were any."""
        self._due.pop(name, None)
        return self._failures.pop(name, None) is not None
