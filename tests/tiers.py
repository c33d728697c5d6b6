"""The two tiers of the suite: what runs before every landing, and what runs before an issue ends.

`make test` leaves out the tests with the marker ``full`` and takes the small counts. `make
test-full`, which is ``pytest --full``, runs everything with the counts in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Count = TypeVar("Count")


@dataclass
class Tier:
    """What this run was asked for; set by ``conftest.py`` before a test file is imported."""

    is_full: bool = False
    kills: int | None = None


TIER = Tier()


def counted(quick: Count, *, full: Count) -> Count:
    """How much of something this run does."""
    return full if TIER.is_full else quick


def kills(quick: int, *, full: int) -> int:
    """How often each kind of kill happens: ``--kills`` wins over the tier."""
    return TIER.kills or counted(quick, full=full)
