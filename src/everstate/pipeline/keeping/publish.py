"""Publishing in the views' database: implements the protocol of `everstate.views.publishing`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from everstate.changes import EntityType
from everstate.errors import InUse, InvalidView
from everstate.views.control import BUILDING, LIVE, Control, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.plan import plan_of
from everstate.views.publishing import InTheWay, stands_with_core
from everstate.views.stores import ViewTables, view_refusals
from everstate.views.tables import latest_of

logger = logging.getLogger(__name__)


class _PublishedAnother(Exception):
    """Another process published a version of the view first; nothing is changed."""


class ViewPublisher:
    """Publishes through the connection of a `Control`, in autocommit mode."""

    def __init__(self, control: Control) -> None:
        self._control, self._tables = control, ViewTables(control)

    def vectors(self, row: ViewVersion) -> tuple[dict[int, int], dict[int, int]]:
        """Positions of the core and of a version, read in one statement.

        A view over other views counts as caught up when all of them are published and kept.
        """
        if row.inputs:
            kept = {r.name for r in self._control.versions() if r.published and r.status == LIVE}
            places = range(len(row.inputs))
            return (
                dict.fromkeys(places, 1),
                {place: int(row.inputs[place] in kept) for place in places},
            )
        core, mine = dict[int, int](), dict[int, int]()
        for place in self._control.positions(row.entity):
            if place.view == latest_of(row.entity):
                core[place.partition] = place.next_offset
            elif (place.view, place.version) == (row.name, row.version):
                mine[place.partition] = place.next_offset
        return core, mine

    def seen(self, name: str) -> ViewVersion | None:
        """The version that readers see."""
        return next((row for row in self._control.versions(name) if row.published), None)

    def caught_up(self, row: ViewVersion) -> str | None:
        """Record that a version caught up; returns a reader with an older snapshot, or none."""
        return self._control.caught_up(row.name, row.version)

    def fell_behind(self, row: ViewVersion) -> None:
        """Clear the record that a version caught up with the core, and what it waited for."""
        self._control.record(row.name, row.version, met_at=None, waits_for=None)

    def different_rows(self, seen: ViewVersion, row: ViewVersion, plan: ViewPlan) -> int:
        """How many rows differ between the two versions; stored with the new version."""
        known = (row.built or {}).get("different")
        if known is not None:
            return int(known)
        found = self._tables.different_rows(plan, seen.version, row.version)
        self._control.add_built(row.name, row.version, {"different": found})
        logger.info("view %s: %s rows differ from the published version", row.name, found)
        return found

    def set_waits_for(self, row: ViewVersion, waits_for: str) -> None:
        """Store why a version is not published."""
        self._control.record(row.name, row.version, waits_for=waits_for)

    def point(self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan) -> bool:
        """Point the view's name to a version, in a short transaction that waits for no reader.

        False when the version is not at the core's position any more, or another one was published
        first; raises InTheWay when a reader holds the lock.
        """
        published = None if seen is None else seen.version
        try:
            with view_refusals(), self._control.connection.transaction():
                if not stands_with_core(self, row):
                    return False
                self._tables.point(plan, row.version)
                if not self._control.swap_published(row.name, published, row.version):
                    raise _PublishedAnother
                return True
        except _PublishedAnother:
            return False
        except InUse as cause:
            readers = self._tables.holders(row.name)
            raise InTheWay(readers[0] if readers else "a reader") from cause


def composed_waiting(
    control: Control, entity_types: Mapping[str, EntityType]
) -> Iterator[tuple[ViewVersion, ViewPlan]]:
    """Versions of views over other views that are published when all of these are."""
    for row in control.versions():
        if not row.inputs or row.status != BUILDING or row.entity not in entity_types:
            continue
        try:
            plan = plan_of(row, entity_types)
        except InvalidView as refused:
            control.record(row.name, row.version, waits_for=refused.message)
            continue
        # Only the sums of a join have a table of their own, which is filled first.
        if row.built is not None or plan.sums_kept is None:
            yield row, plan
