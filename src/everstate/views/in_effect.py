"""The order in which the accepted changes of a partition take effect. Pure.

A change takes effect at its own offset; a held change takes effect at the offset of the change that
released it, after that change. In this order a key's versions are dense, and the position of a
reader is one spot: an offset, and how many changes at that offset were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from everstate.changes.tokens import Spot
from everstate.log.positions import Range
from everstate.views.trailing import Exceptions, is_accepted

R = TypeVar("R")


def in_effect(
    records: Sequence[R],
    offsets: Sequence[int],
    since: Spot,
    end: int,
    exceptions: Exceptions,
    version_of: Callable[[R], int],
) -> list[tuple[Spot, R]]:
    """The accepted changes that take effect after a spot and before an offset.

    In: all records between the two, and the changes held before and released there; the core's
    exceptions between the two; ``version_of`` is called only for released records. Out: each change
    with the spot after it.
    """
    placed = by_effect(records, offsets, Range(since.next_offset, end), exceptions, version_of)
    if not exceptions.released:
        return [(Spot(at + 1), record) for at, record in placed]
    return list(_with_spots(placed))[since.done :]


def by_effect(
    records: Sequence[R],
    offsets: Sequence[int],
    given: Range,
    exceptions: Exceptions,
    version_of: Callable[[R], int],
) -> list[tuple[int, R]]:
    """As :func:`in_effect`, of whole offsets; each change with that at which it takes effect."""
    rows = np.flatnonzero(is_accepted(np.asarray(offsets, np.int64), given, exceptions)).tolist()
    if not exceptions.released:
        return [(offsets[row], records[row]) for row in rows]
    placed = []
    for row in rows:
        at = exceptions.released.get(offsets[row])
        order = (offsets[row], 0) if at is None else (at, version_of(records[row]))
        placed.append((order, records[row]))
    placed.sort(key=lambda each: each[0])
    return [(at, record) for (at, _), record in placed]


def _with_spots(placed: Sequence[tuple[int, R]]) -> Iterable[tuple[Spot, R]]:
    done = 0
    for number, (at, record) in enumerate(placed):
        is_last = number + 1 == len(placed) or placed[number + 1][0] != at
        done = 0 if is_last else done + 1
        yield Spot(at + 1) if is_last else Spot(at, done), record
