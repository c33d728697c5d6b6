"""Which conditions fire an alert, and which are resolved. Pure: the time comes as an argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from everstate.attention.conditions import Area, Concern


@dataclass(frozen=True, slots=True)
class Alert:
    """One message: a condition fires, or is resolved."""

    id: str
    """The same when the message is delivered twice."""
    status: Literal["firing", "resolved"]
    condition: str
    """Key of the condition."""
    level: str
    what: str
    why: str
    advice: str | None
    project: str
    since: str
    """When the condition was seen first, as ISO 8601 in UTC."""
    at: str
    """When it fired or was resolved."""

    @property
    def text(self) -> str:
        """The alert in one line."""
        advice = f" {self.advice}" if self.advice and self.status == "firing" else ""
        return f"{self.project}: {self.status}: {self.what} {self.why}{advice}"

    def payload(self) -> dict[str, Any]:
        """The body of the webhook's request; ``text`` is what chat services show."""
        return {**asdict(self), "text": self.text}


@dataclass(frozen=True, slots=True)
class Tracked:
    """A condition that holds."""

    condition: Concern
    since_s: float
    """When it was seen first, in seconds since the epoch."""
    is_firing: bool = False


class Alerts:
    """Tracks the conditions of one project.

    A condition that holds for ``hold_s`` fires once. It is resolved once, when it is looked for and
    not found. While its area is not known (a server does not answer) it stays as it is.
    """

    def __init__(self, project: str, hold_s: float, new_id: Callable[[], str]) -> None:
        self._project, self._hold_s, self._new_id = project, hold_s, new_id
        self.tracked: dict[str, Tracked] = {}

    def step(
        self, conditions: Iterable[Concern], unknown: Collection[Area], now_s: float
    ) -> list[Alert]:
        """The alerts that follow from what was seen at ``now_s``, seconds since the epoch."""
        found = {each.key: each for each in conditions}
        alerts = []
        for key, known in list(self.tracked.items()):
            if key not in found and known.condition.area not in unknown:
                del self.tracked[key]
                if known.is_firing:
                    alerts.append(self._alert("resolved", known, now_s))
        for key, condition in found.items():
            known = replace(self.tracked.get(key, Tracked(condition, now_s)), condition=condition)
            if not known.is_firing and now_s - known.since_s >= self._hold_s:
                known = replace(known, is_firing=True)
                alerts.append(self._alert("firing", known, now_s))
            self.tracked[key] = known
        return alerts

    def restore(self, tracked: Iterable[Tracked]) -> None:
        """Continue with the conditions that an earlier process tracked."""
        self.tracked = {each.condition.key: each for each in tracked}

    def _alert(
        self, status: Literal["firing", "resolved"], tracked: Tracked, now_s: float
    ) -> Alert:
        one = tracked.condition
        return Alert(
            self._new_id(),
            status,
            one.key,
            one.level,
            one.what,
            one.why,
            one.advice,
            self._project,
            _iso(tracked.since_s),
            _iso(now_s),
        )


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
