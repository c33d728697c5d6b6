"""A view whose position is behind the core's: it applies accepted changes, and judges nothing.

Accepted changes of [a, b) are the records in it without an exception of the core, and the held
changes that were released in it, versions of a key in order. A trailing view never passes the core,
because records that the core has not judged are not accepted yet.
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
from everstate.views.core import RETRIES_MAX, Again, Applied, by_version, where
from everstate.views.gate import Bools, Ints
from everstate.views.tables import Core, KeptTable


@dataclass(frozen=True, slots=True)
class Exceptions:
    """The core's exceptions in a range: every record without an exception was applied."""

    dead: frozenset[int]
    """Offsets of dead records."""
    duplicates: tuple[tuple[int, int], ...]
    """First and last offset of each run of duplicates."""
    held: frozenset[int]
    """Offsets in the range whose changes were held, wherever they were released."""
    released: Mapping[int, int]
    """Offsets, in the range or before it, of changes released in the range; each with the offset
    of the change that released it."""


class TrailingTransaction(Protocol):
    """One transaction of a trailing view; leaving it without `commit` rolls it back."""

    def core_position(self, *, hold: bool) -> int:
        """The core's position; ``hold``: lock it until this transaction ends (V7)."""

    def take(self, start: int, end: int) -> bool:
        """Move the view's position from start to end; returns whether it was at start.

        False, too, when the position is of another plan. The record that the version has caught up
        with its core is cleared: it was behind.
        """

    def exceptions(self, start: int, end: int) -> Exceptions:
        """The core's exceptions in a range before its position."""

    def floors(self, batch: Batch) -> Mapping[str, datetime]:
        """Stored as-of times, for the keys where a change may have an earlier time."""

    def write(self, batch: Batch) -> None:
        """Write the batch to the view; raises ViewFailed with the change that is refused."""

    def commit(self, end: int) -> None:
        """Commit; when the server's answer is lost, the position shows whether it committed."""


class TrailingStore(Protocol):
    """The store of a trailing view; one for each thread."""

    def trailing(
        self, core: Core, table: KeptTable, partition: int
    ) -> AbstractContextManager[TrailingTransaction]:
        """Begin a transaction; raises Again and Unavailable, also from inside the block."""


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

    ``changes`` has every record of ``given`` and the held changes released in it, planned for the
    view. With ``meets`` the core's position is locked meanwhile, so that the view can ride
    afterwards: for a last short step only. Raises PositionMoved when the view is not at the range's
    start or the core is before its end, ViewFailed, Unavailable; nothing is changed then.
    """
    for attempt in range(1, RETRIES_MAX + 2):
        try:
            with store.trailing(core, table, partition) as opened:
                # The position is read before the exceptions: they are complete up to it (V1).
                ahead = opened.core_position(hold=meets)
                if ahead < given.end or not opened.take(given.start, given.end):
                    raise PositionMoved(
                        f"{table.name} is not at offset {given.start:,} of partition {partition}, "
                        f"or the core has not reached {given.end:,}.",
                        advice="Read the positions again.",
                    )
                accepted = accepted_of(
                    table, given, changes, opened.exceptions(given.start, given.end)
                )
                if accepted.num_rows:
                    batch = Batch(accepted, {})
                    if floors := opened.floors(batch):
                        batch = Batch(accepted, floors, batch.keys)
                    opened.write(batch)
                opened.commit(given.end)
                return Applied(applied=accepted.num_rows)
        except Again as cause:
            if attempt > RETRIES_MAX:
                raise Unavailable(
                    f"{table.name}: {attempt} attempts to write partition {partition} conflicted "
                    f"with other transactions ({cause})"
                ) from cause
    raise AssertionError("the last attempt raises")


def accepted_of(
    table: KeptTable, given: Range, changes: pa.Table, exceptions: Exceptions
) -> pa.Table:
    """The accepted changes among the records of a range and the changes released in it."""
    offsets = changes["offset"].to_numpy()
    accepted = where(changes, is_accepted(offsets, given, exceptions))
    if accepted["reason"].null_count < accepted.num_rows:
        unreadable = accepted.filter(pc.is_valid(accepted["reason"]))
        offset, reason = unreadable["offset"][0].as_py(), unreadable["reason"][0].as_py()
        raise ViewFailed(
            table.view, f"a change that the core accepted cannot be read ({reason})", offset=offset
        )
    return by_version(accepted)


def is_accepted(offsets: Ints, given: Range, exceptions: Exceptions) -> Bools:
    """Which records of a range, and of changes released in it, are accepted changes."""
    wanted: Bools = (offsets >= given.start) & (offsets < given.end)
    for excluded in (exceptions.dead, exceptions.held):
        if excluded:
            wanted &= ~np.isin(offsets, list(excluded))
    for first, last in exceptions.duplicates:
        wanted &= ~((offsets >= first) & (offsets <= last))
    if exceptions.released:
        wanted |= np.isin(offsets, list(exceptions.released))
    return wanted
