"""Publishing in the views' database: implements the protocol of `everstate.views.publishing`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import InUse, InvalidView
from everstate.pipeline.keeping.elsewhere import readers_duty, show_elsewhere
from everstate.pipeline.keeping.kept import MEETING_CHANGES
from everstate.views.control import BUILDING, LIVE, Control, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.plan import plan_of
from everstate.views.publishing import InTheWay, stands_with_core
from everstate.views.stores import ViewTables, versioned_store, view_refusals
from everstate.views.tables import HOME, latest_of

logger = logging.getLogger(__name__)

_LATE: Final = (
    "built; waits until it is where the readers' version is, or, if they see none in its store, "
    "{:,} offsets behind the core, and where the core was when it was asked for"
)


class _PublishedAnother(Exception):
    """Another process published a version of the view first; nothing is changed."""


class ViewPublisher:
    """Publishes through the connection of a `Control`, in autocommit mode."""

    def __init__(self, control: Control, config: Config) -> None:
        self._control, self._config = control, config

    def vectors(self, row: ViewVersion) -> tuple[dict[int, int], dict[int, int]]:
        """Positions of the core and of a version, read in one statement.

        A view over other views counts as caught up when all of them are published and kept. No
        core waits for a view in another store: instead of the core's position, it must reach that
        of the version that readers see there, or be near the core where they see none, and that of
        the core when it was built or asked for; and its last try must not have failed.
        """
        if row.inputs:
            kept = {r.name for r in self._control.versions() if r.published and r.status == LIVE}
            places = range(len(row.inputs))
            return (
                dict.fromkeys(places, 1),
                {place: int(row.inputs[place] in kept) for place in places},
            )
        found = defaultdict[tuple[str, int], dict[int, int]](dict)
        for place in self._control.positions(row.entity):
            found[place.view, place.version][place.partition] = place.next_offset
        core, mine = found[latest_of(row.entity), 1], found[row.name, row.version]
        if row.store != HOME:
            seen = self.seen(row.name)
            same = {} if seen is None or seen.store != row.store else found[row.name, seen.version]
            if (now := self._sound(row)) is None:
                return core, {}
            asked = (now.built or {}).get("core", {})
            core = {
                p: max(same.get(p, 0) if same else at - MEETING_CHANGES, asked.get(str(p), 0))
                for p, at in core.items()
            }
        return core, mine

    def _sound(self, row: ViewVersion) -> ViewVersion | None:
        """A version in another store as it is now; ``None``: built anew, failed or gone."""
        rows = (each for each in self._control.versions(row.name) if each.version == row.version)
        now = next(rows, None)
        return now if now and now.error is None and now.attempt == row.attempt else None

    def seen(self, name: str) -> ViewVersion | None:
        """The version that readers see."""
        return next((row for row in self._control.versions(name) if row.published), None)

    def caught_up(self, row: ViewVersion) -> str | None:
        """Record that a version caught up; returns a reader with an older snapshot, or none."""
        if row.store != HOME:
            return None
        return self._control.caught_up(row.name, row.version)

    def fell_behind(self, row: ViewVersion) -> None:
        """Clear the record that a version caught up with the core, and what it waited for.

        One in another store waits for a position that its progress does not name.
        """
        is_late = row.store != HOME and self._sound(row) is not None
        waits_for = _LATE.format(MEETING_CHANGES) if is_late else None
        self._control.record(row.name, row.version, met_at=None, waits_for=waits_for)

    def different_rows(self, seen: ViewVersion, row: ViewVersion, plan: ViewPlan) -> int | None:
        """How many rows differ between the two versions; stored with the new version.

        ``None`` for rows in another store, where both versions move by themselves.
        """
        if row.store != HOME:
            return None
        known = (row.built or {}).get("different")
        if known is not None:
            return int(known)
        found = ViewTables(self._control).different_rows(plan, seen.version, row.version)
        self._control.add_built(row.name, row.version, {"different": found})
        logger.info("view %s: %s rows differ from the published version", row.name, found)
        return found

    def set_waits_for(self, row: ViewVersion, waits_for: str) -> None:
        """Store why a version is not published."""
        self._control.record(row.name, row.version, waits_for=waits_for)

    def point(self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan) -> bool:
        """Point the view's name to a version, in a short transaction that waits for no reader.

        False when the version is not at the core's position any more, or another one was published
        first; raises InTheWay when a reader holds the lock, and ViewFailed. No call to another
        store is made in the transaction: readers there see the version before it, once a trial of
        it was rolled back. :func:`show_elsewhere` makes good what one without effect leaves. In a
        store that the view leaves, `elsewhere.upkeep` does so each minute.
        """
        if row.store == HOME:
            return self._swap(seen, row, plan)
        with readers_duty(self._control, row.name, row.store):
            if not self._swap(seen, row, plan, is_trial=True):
                return False
            store = versioned_store(self._config, row.name, row.store, row.attempt)
            store.show(row.name, row.version)
            try:
                return self._swap(seen, row, plan)
            finally:
                if not self._control.connection.closed:  # else the first error says why
                    show_elsewhere(self._control, self._config, row.store, row.name)

    def _swap(
        self, seen: ViewVersion | None, row: ViewVersion, plan: ViewPlan, *, is_trial: bool = False
    ) -> bool:
        """The transaction of :meth:`point`, which a trial rolls back."""
        published, tables = None if seen is None else seen.version, ViewTables(self._control)
        begun = self._control.connection.transaction(force_rollback=is_trial)
        try:
            with view_refusals(), begun:
                # The core and the readers' version have gone on since the trial.
                is_tried = row.store != HOME and not is_trial
                if not (self._sound(row) if is_tried else stands_with_core(self, row)):
                    return False
                if row.store == HOME:
                    tables.point(plan, row.version)
                elif seen is not None and seen.store == HOME:
                    tables.drop_reader(row.name)
                if not self._control.swap_published(row.name, published, row.version):
                    raise _PublishedAnother
                return True
        except _PublishedAnother:
            return False
        except InUse as cause:
            readers = tables.holders(row.name)
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
