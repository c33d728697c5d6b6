"""What a keeper reports: to the metrics, and to `everstate status` and `everstate run`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

from everstate.parts import Part, PartState, note
from everstate.pipeline.keeping.kept import EntityViews
from everstate.views.control import BUILDING, WAITING, Control, ViewVersion
from everstate.views.tables import HOME, Vector, covers
from everstate.views.versions import REFUSED

JUDGED: Final = Counter(
    "everstate_views_changes",
    "Changes by the core's decision: applied, duplicate, held or dead",
    ["entity", "outcome"],
)
BEHIND: Final = Gauge(
    "everstate_view_behind",
    "1 while a view cannot be updated; `everstate views list` shows why",
    ["view"],
)
VERSION_FIELDS: Final = Gauge(
    "everstate_view_versions",
    "Versions of a view for which `everstate views list` shows an error, waits_for, progress or "
    "status_reason",
    ["view", "field"],
)
_NOT_THERE: Final = "nobody can read it: there is no view of that name in the schema of the views"
_VERSION_FIELDS: Final = ("error", "waits_for", "progress", "status_reason")
MISFITS: Final = Gauge(
    "everstate_view_misfits",
    "States with a value that does not fit the model, which is NULL in typed columns",
    ["entity", "field", "schema_version"],
)
STEP_SECONDS: Final = Histogram(
    "everstate_keeper_step_seconds", "Time of one batch that updates cores and riding views"
)


VERDICTS: Final = ("applied", "duplicate", "held", "dead")


def report_verdicts(outcomes: Sequence[Any]) -> None:
    """Report what a job decided, by entity type."""
    for outcome in outcomes:
        for what in VERDICTS:
            JUDGED.labels(outcome["entity"], what).inc(max(0, outcome[what]))


def report_misfits(control: Control) -> None:
    """Report how many values do not fit the models."""
    for each in control.misfits():
        MISFITS.labels(each.entity, each.field, each.schema_version).set(each.count)


class ViewReports:
    """The state of each view, as it was reported last; a view that is gone is reported no more.

    A view runs from when readers see the rows of the declared version, with all that the log held
    when this process first looked.
    """

    def __init__(self) -> None:
        self._first_ends: dict[str, Vector] = {}
        """Entity type → where its log ended at the first look."""
        self._told: set[str] = set()
        """Views that once ran, or waited."""
        self._known: set[str] = set()
        """Views whose versions were reported last."""
        self._shown: set[str] = set()
        """Views that readers see, as they were reported last."""
        self._failed: set[str] = set()
        """Parts of versions that cannot be built, as they were reported last."""

    def report(
        self, kept: Mapping[str, EntityViews], ends: Mapping[str, Vector], there: Collection[str]
    ) -> None:
        """Report the state of each view of some entity types, which are all that are kept.

        ``ends``: entity type → where its log ends; ``there``: names that can be read.
        """
        known, shown, failed = self._known, self._shown, self._failed
        self._known, self._shown, self._failed = set(), set(), set()
        for entity, views in kept.items():
            self._first_ends.setdefault(entity, ends[entity])
            self._report_one(views, there)
        for name in known - self._known:
            for field in _VERSION_FIELDS:
                VERSION_FIELDS.remove(name, field)
        for name in shown - self._shown:
            BEHIND.remove(name)
            note(f"view {name}", None)
            self._told.discard(name)
        for part in failed - self._failed:
            note(part, None)

    def _report_one(self, views: EntityViews, there: Collection[str]) -> None:
        for name, mine in groupby(views.rows, key=lambda row: row.name):
            versions = list(mine)
            self._known.add(name)
            for field in _VERSION_FIELDS:
                count = sum(getattr(row, field) is not None for row in versions)
                VERSION_FIELDS.labels(name, field).set(count)
        for row in views.rows:
            if (how := _not_built(row)) is not None:
                part = f"view {row.name}, version {row.version}"
                self._failed.add(part)
                note(part, how)
        rows = [(view.row, view.vector) for view in views.views if view.row.published]
        if views.status is not None:
            rows.append((views.status, views.vector))
        for row, vector in rows:
            self._shown.add(row.name)
            why, advice = row.error or (None if row.store == HOME else row.waits_for), None
            BEHIND.labels(row.name).set(int(why is not None))
            if why is None and row.store == HOME and row.name not in there:
                why, advice = _NOT_THERE, "Start the pipeline again."
                if row is not views.status:
                    advice = f"Run `everstate views rebuild {row.name}`."
            is_read = covers(vector, self._first_ends[views.entity])
            if row.name in self._told or why is not None or (is_read and _is_newest(row, views)):
                self._told.add(row.name)
                state: PartState = "running" if why is None else "waiting"
                note(f"view {row.name}", Part(state, time.time(), why, advice))


def _is_newest(row: ViewVersion, views: EntityViews) -> bool:
    """Whether readers see the rows and columns that are declared now, and not earlier ones."""
    later = (r for r in views.rows if r.name == row.name and r.version > row.version)
    return row.waits_for is None and all(r.status not in (BUILDING, WAITING) for r in later)


def _not_built(row: ViewVersion) -> Part | None:
    """How a version is that cannot be built; ``None``: it is built, or can be."""
    if row.status == WAITING and (row.status_reason or "").startswith(REFUSED):
        return Part("stopped", time.time(), row.status_reason)
    if row.status == BUILDING and row.built is None and row.error is not None:
        return Part("waiting", time.time(), row.error)
    return None
