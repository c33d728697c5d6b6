"""Throttled changes of views: applied at the view's rate, oldest first, in order per key.

Other changes go first: a part is applied while the core does not write its partition, and after
each part as much time is left to the core as the part has taken. A core that always writes waits
for a part now and then, so that the rest does not grow without end.

No Spark job is needed: deferred changes are planned already, and are merged by the same code as
changes that are not deferred.
"""

from __future__ import annotations

import logging
import time
from math import ceil, inf
from typing import Final

from everstate.config import Config
from everstate.errors import StatementRefused
from everstate.pipeline.keeping.kept import EntityViews, KeptView, KeptViews, ViewWorker
from everstate.views.control import Control
from everstate.views.control.deferring import PART_CHANGES
from everstate.views.project import Project
from everstate.views.stores import PostgresViewStore, view_refusals

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1
_IDLE_S: Final = 0.5
_REFUSED: Final = "throttled changes cannot be applied: "
_PAUSES_S: Final = (1.0, 5.0, 30.0)
_PATIENCE_S: Final = 5.0
"""A core that is always writing waits for a part of a view this long after the view's last one."""


class Releaser(ViewWorker):
    """Lets every throttled view apply its deferred changes; :meth:`step` it, or run it."""

    doing = "the work on throttled changes"
    idle_s = _IDLE_S
    retry_s = (1.0, 1.0)

    def __init__(self, config: Config, project: Project) -> None:
        super().__init__(config)
        self._kept = KeptViews(config, project)
        self._due: dict[str, float] = {}
        """When each view may apply its next part, by :attr:`_now`."""
        self._taken_at: dict[str, float] = {}
        """When each view applied its last part, or was first found to wait (monotonic time)."""
        self._now = 0.0
        """Seconds of all steps."""
        self._at = time.monotonic()

    def pause_s(self, done: object) -> float:
        """Views whose changes wait get their next part soon, and not at once: they have a rate."""
        return _POLL_S if done else _IDLE_S

    def step(self, seconds: float | None = None) -> int:
        """Apply the changes that the time since the last step allows; returns how many still wait.

        ``seconds``: use that time instead. The error of a view that PostgreSQL refuses is stored,
        and its changes wait. Raises Unavailable.
        """
        now = time.monotonic()
        passed = now - self._at if seconds is None else seconds
        self._at, self._now = now, self._now + passed
        with self._database.connected() as control:
            counts = control.deferred()
            if not counts:
                self._taken_at.clear()
                return 0
            left = 0
            for views in self._kept.read(control).values():
                for view in views.views:
                    here = counts.get((view.row.name, view.row.version))
                    if here:
                        left += sum(count for count, _ in here.values()) - self._tried(
                            control, views, view, passed
                        )
            return left

    def _tried(self, control: Control, views: EntityViews, view: KeptView, passed: float) -> int:
        """How many changes one view has applied; its failure is its own (C13)."""
        name, version, error = view.row.name, view.row.version, view.row.error
        if not self._retries.is_due(view.table.name):
            return 0
        try:
            with view_refusals():
                taken = self._take(views, view, passed)
        except StatementRefused as refused:
            pause = self._retries.failed(view.table.name, _PAUSES_S)
            reason = f"{_REFUSED}{refused}"
            logger.error("view %s: %s; next try in %.0f s", name, reason, pause)
            control.record(name, version, error=reason)
            return 0
        self._retries.forget(view.table.name)
        if error is not None and error.startswith(_REFUSED):
            control.record(name, version, error=None)
        return taken

    def _take(self, views: EntityViews, view: KeptView, passed: float) -> int:
        """Let one view apply parts while its rate allows, the oldest first."""
        # Without a rate no change is deferred any more: those that still wait are applied at once.
        name, rate = view.table.name, view.plan.rules.per_second or inf
        most = ceil(min(rate, PART_CHANGES))  # no more than a second's changes at once
        store = PostgresViewStore(self._config.views_dsn, self._config.views.schema_name)
        core, taken = self._kept.core(views), 0
        # What was not used is dropped, but for a second's changes.
        self._due[name] = max(self._due.get(name, self._now - passed), self._now - 1.0)
        while self._due[name] < self._now:
            begun = time.monotonic()
            waits = begun - self._taken_at.setdefault(name, begun) > _PATIENCE_S
            found = store.take_deferred(core, view.table, most, waits=waits)
            if not found:
                break
            self._due[name], taken = self._due[name] + found / rate, taken + found
            self._taken_at[name] = time.monotonic()
            time.sleep(self._taken_at[name] - begun)
        return taken
