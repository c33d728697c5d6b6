"""Finds by halves which of many make a job fail, so that the number of tries hardly grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def culprits(
    suspects: Sequence[T], failure: Callable[[Sequence[T]], str | None]
) -> list[tuple[T, str]]:
    """The suspects that fail by themselves, with their reasons; none when nobody's job fails too.

    ``failure`` tries some of them, and says why they fail. Cost: for each culprit at most
    2 * log2(suspects) + 1 tries, and one without any of them.
    """
    if not suspects or failure([]) is not None:
        return []
    found, rest = [], [suspects]
    while rest:
        some = rest.pop()
        reason = failure(some)
        if reason is None:
            continue
        if len(some) == 1:
            found.append((some[0], reason))
        else:
            half = len(some) // 2
            rest += [some[half:], some[:half]]
    return found
