"""A view whose position is behind the core's: it applies accepted changes, and judges nothing.

Accepted changes of [a, b) are the records in it that the core noted no exception for, and those
that waited and were freed in it, versions of a key in order. A trailing view never passes the core,
because what the core has not judged is not accepted yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from everstate.errors import PositionMoved, Unavailable, ViewFailed
from everstate.log.positions import Range
from everstate.views.batch import Batch
from everstate.views.core import RETRIES_MAX, Again, Applied, by_version
from everstate.views.gate import Keys
from everstate.views.tables import Core, KeptTable


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What the core noted about a range: every record without an exception was applied."""

    dead: frozenset[int]
    """Offsets."""
    duplicates: tuple[tuple[int, int], ...]
    """First and last offset of each run."""
    held: frozenset[int]
    """Offsets in the range whose changes waited, wherever they were freed."""
    released: frozenset[int]
    """Offsets, in the range or before it, whose changes were freed in the range."""


class TrailingTransaction(Protocol):
    """One transaction of a trailing view; leaving it without `commit` rolls it back."""

    def core_position(self, *, hold: bool) -> int:
        """The core's position; ``hold``: it stays there until this transaction ends (V7)."""

    def take(self, start: int, end: int) -> bool:
        """Move the view's position from start to end; whether it was at start, with this plan."""

    def exceptions(self, start: int, end: int) -> Exceptions:
        """What the core noted about a range that lies behind its position."""

    def floors(self, keys: Keys) -> Mapping[str, datetime]:
        """As-of times from before, of the keys whose time may run back."""

    def write(self, batch: Batch) -> None:
        """Write the batch into the view; raises ViewFailed with the change that it refuses."""

    def commit(self, end: int) -> None:
        """Commit; when the answer is lost, the position tells what happened."""


class TrailingStore(Protocol):
    """Where a trailing view is kept; one for each thread."""

    def trailing(
        self, core: Core, table: KeptTable, partition: int
    ) -> AbstractContextManager[TrailingTransaction]:
        """Begin; raises Again and Unavailable, also from inside."""


def trail_range(
    store: TrailingStore,
    core: Core,
    table: KeptTable,
    partition: int,
    given: Range,
    changes: pa.Table,
    *,
    meets: bool,
) -> Applied:
    """Apply the accepted changes of one partition's range to one view: one commit.

    ``changes`` has every record of ``given`` and those that waited and were freed in it, planned
    for the view. With ``meets`` the core stands still meanwhile, so that the view can ride after
    it: for a last short step only. Raises PositionMoved when the view is not at the range's start
    or the core is not past its end, ViewFailed, Unavailable; nothing is changed then.
    """
    for attempt in range(1, RETRIES_MAX + 2):
        try:
            with store.trailing(core, table, partition) as opened:
                # The position is read before the exceptions: they are complete up to it (V1).
                ahead = opened.core_position(hold=meets)
                if ahead < given.end or not opened.take(given.start, given.end):
                    raise PositionMoved(
                        f"{table.name} is not at {given.start:,} of partition {partition}, or the "
                        f"core is not past {given.end:,}.",
                        advice="Read the positions again.",
                    )
                accepted = accepted_of(
                    table, given, changes, opened.exceptions(given.start, given.end)
                )
                if accepted.num_rows:
                    opened.write(Batch(accepted, opened.floors(Keys(accepted))))
                opened.commit(given.end)
                return Applied(applied=accepted.num_rows)
        except Again as cause:
            if attempt > RETRIES_MAX:
                raise Unavailable(
                    f"{table.name}: {attempt} attempts on partition {partition} met another "
                    f"transaction ({cause})"
                ) from cause
    raise AssertionError("the last attempt raises")


def accepted_of(table: KeptTable, given: Range, changes: pa.Table, noted: Exceptions) -> pa.Table:
    """The accepted changes among the records of a range and those that were freed in it."""
    offsets = changes["offset"].to_numpy()
    wanted = (offsets >= given.start) & (offsets < given.end)
    for excluded in (noted.dead, noted.held):
        if excluded:
            wanted &= ~np.isin(offsets, list(excluded))
    for first, last in noted.duplicates:
        wanted &= ~((offsets >= first) & (offsets <= last))
    if noted.released:
        wanted |= np.isin(offsets, list(noted.released))
    accepted = changes.filter(pa.array(wanted))
    unreadable = accepted.filter(pc.is_valid(accepted["reason"]))
    if unreadable.num_rows:
        offset, reason = unreadable["offset"][0].as_py(), unreadable["reason"][0].as_py()
        raise ViewFailed(
            table.view, f"a change that the core accepted cannot be read ({reason})", offset=offset
        )
    return by_version(accepted)
