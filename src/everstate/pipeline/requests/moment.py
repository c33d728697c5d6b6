"""The moment for which past states are requested."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from everstate.changes.moments import moment_fault
from everstate.errors import InvalidQuery


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment given by at most one field; without one, all that is judged and archived counts."""

    at: datetime | None = None
    """World time: changes that occurred by then count, whenever they were recorded."""
    recorded_at: datetime | None = None
    """Changes that were recorded by then count."""
    position: str | None = None
    """A token: the changes that readers of a view saw at that position count."""

    def __post_init__(self) -> None:
        given = [each for each in (self.at, self.recorded_at, self.position) if each is not None]
        if len(given) > 1:
            raise InvalidQuery("give exactly one of at, recorded_at and position.")
        for name in ("at", "recorded_at"):
            moment: datetime | None = getattr(self, name)
            if moment is None:
                continue
            if (fault := moment_fault(moment)) is not None:
                raise InvalidQuery(f"{moment.isoformat()}: {fault}.")
            # In UTC: Arrow has no offsets with seconds, and equal times have one cached result.
            object.__setattr__(self, name, moment.astimezone(UTC))
