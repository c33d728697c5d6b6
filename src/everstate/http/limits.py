"""How many requests a caller may send: a bucket of tokens for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from everstate.errors import TooManyRequests


class Limits:
    """Buckets that hold ``burst`` requests and fill at ``per_s``. Used by one event loop.

    Callers are those of the settings, so that there are few buckets.
    """

    def __init__(
        self, per_s: float | None, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``per_s``: ``None`` for no limit; ``clock``: seconds from any moment on."""
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left: dict[str | None, tuple[float, float]] = {}

    def take(self, caller: str | None) -> None:
        """Take one request of a caller from its bucket; raises TooManyRequests when it is empty."""
        if self._per_s is None:
            return
        now = self._clock()
        left, at = self._left.get(caller, (float(self._burst), now))
        left = min(self._burst, left + (now - at) * self._per_s)
        if left < 1:
            self._left[caller] = left, now
            raise TooManyRequests((1 - left) / self._per_s)
        self._left[caller] = left - 1, now
