"""Publishing: readers of a name see another version, once it has caught up with the core (V13).

This module does not depend on a database: a store implements :class:`PublishingStore`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from everstate.errors import PublishRefused
from everstate.views.control import ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.tables import covers

logger = logging.getLogger(__name__)


class InTheWay(Exception):
    """A reader, named in the message, holds a lock on the name for too long; tried again later."""


class PublishingStore(Protocol):
    """The database operations that publishing needs."""

    def vectors(self, row: ViewVersion) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Positions of the core and of a version, in one snapshot."""

    def seen(self, name: str) -> ViewVersion | None:
        """The version that readers see."""

    def caught_up(self, row: ViewVersion) -> str | None:
        """Record once that a version caught up; returns a reader with an older snapshot.

        That reader would see an empty table, or older rows, once the name points to the version.
        """

    def fell_behind(self, row: ViewVersion) -> None:
        """Clear the record that a version caught up with the core, and what it waited for."""

    def different_rows(self, seen: ViewVersion, row: ViewVersion, plan: ViewPlan) -> int | None:
        """How many rows differ between two versions of one meaning; computed once.

        ``None``: this store cannot compare them at one position.
        """

    def set_waits_for(self, row: ViewVersion, waits_for: str) -> None:
        """Store why a version is not published."""

    def point(self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan) -> bool:
        """Let readers see a version instead of ``seen``, in one transaction.

        False, and nothing is changed, when another version was published first, or this one is not
        at the core's position. Raises InTheWay and PublishRefused.
        """


def publish(publisher: PublishingStore, row: ViewVersion, plan: ViewPlan) -> bool:
    """Publish a built version, if it is at the core's position; returns whether it was published.

    It waits while a reader's snapshot is older than the time at which the version caught up with
    the core (the option `force` does not wait). A version with the same meaning as the published
    one is compared with it when both are at the core's position; with the option `require_equal`
    it must have the same rows. The reason why a version is not published is stored. Raises
    InTheWay and PublishRefused: until a later try, other readers must not queue behind this one.
    """
    options = row.options or {}
    if not stands_with_core(publisher, row):
        publisher.fell_behind(row)
        return False
    reader = publisher.caught_up(row)
    if reader is not None and not options.get("force"):
        publisher.set_waits_for(
            row, f"built; waits for the transaction of {reader}, which began before it caught up"
        )
        return False
    seen = publisher.seen(row.name)
    if seen is not None and seen.fingerprint == row.fingerprint:
        reason = _unequal(publisher, seen, row, plan)
        if reason is not None and options.get("require_equal"):
            publisher.set_waits_for(row, reason)
            return False
    try:
        done = publisher.point(seen, row, plan)
    except InTheWay as reader:
        publisher.set_waits_for(row, f"built; waits for {reader}, which holds a lock on its name")
        raise
    except PublishRefused as refusal:
        publisher.set_waits_for(row, str(refusal))
        raise
    if done:
        logger.info("view %s: readers see version %d", row.name, row.version)
    return done


def _unequal(
    publisher: PublishingStore, seen: ViewVersion, row: ViewVersion, plan: ViewPlan
) -> str | None:
    """Why two versions of one meaning are not known to have the same rows; None: they have."""
    if not stands_with_core(publisher, seen):
        # Rows of an older position differ in any case, and the number would be kept.
        return f"built; waits for version {seen.version}, to compare the rows at one position"
    different = publisher.different_rows(seen, row, plan)
    if different is None:
        return f"built; rows in the store {row.store} are compared by `everstate views verify` only"
    if different:
        return (
            f"built; {different:,} rows differ from version {seen.version}, so it is not published"
        )
    return None


def stands_with_core(publisher: PublishingStore, row: ViewVersion) -> bool:
    """Whether a version is at the position of its core."""
    core, mine = publisher.vectors(row)
    return bool(mine) and covers(mine, core)
