"""Schedules retries with growing pauses."""

from __future__ import annotations

import time
from collections.abc import Sequence


class Retries:
    """Pauses by name; a name without a failure is always due."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}

    def failed(self, name: str, pauses_s: Sequence[float]) -> float:
        """Record a failure; returns the seconds until the next try, more after each failure."""
        failures = self._failures.get(name, 0)
        pause = pauses_s[min(failures, len(pauses_s) - 1)]
        self._failures[name], self._due[name] = failures + 1, time.monotonic() + pause
        return pause

    def is_due(self, name: str) -> bool:
        """Whether a name may be tried now."""
        return self._due.get(name, 0.0) <= time.monotonic()

    def forget(self, name: str) -> bool:
        """Clear the failures of a name; returns whether there were any."""
        self._due.pop(name, None)
        return self._failures.pop(name, None) is not None
