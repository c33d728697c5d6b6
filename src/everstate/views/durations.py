"""Durations as they are written: `1 hour`, `15 minutes`, `1 day 12 hours`."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_PART: Final = re.compile(r"(-?\d+)\s*([a-z]+?)s?(?=\s|$|-|\d)", re.IGNORECASE)


def microseconds(text: str) -> int | None:
    """Microseconds of a duration; ``None``: not a duration, or one with months or years."""
    words = text.strip().lower().removeprefix("interval ").strip("'\" ")
    total, end = 0, 0
    for part in _PART.finditer(words):
        if words[end : part.start()].strip() or part[2] not in _UNITS:
            return None
        total += int(part[1]) * _UNITS[part[2]]
        end = part.end()
    return total if end and not words[end:].strip() else None
