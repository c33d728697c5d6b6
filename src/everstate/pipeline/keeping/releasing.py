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
from collections.abc import Mapping
from math import ceil, inf
from typing import Final

from everstate.config import Config
from everstate.errors import StatementRefused
from everstate.pipeline.keeping.kept import EntityViews, KeptView, KeptViews, ViewWorker
from everstate.views.control import Control
from everstate.views.control.deferring import PART_CHANGES
from everstate.views.project import Project
from everstate.views.stores import view_refusals, view_store

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
        self._allowed: dict[str, tuple[float, float]] = {}
        """How many changes each view may apply now, less than 0 after a part; and its rate."""
        self._last: dict[str, int] = {}
        """The partition from which each view has applied its last part."""
        self._taken_at: dict[str, float] = {}
        """When each view applied its last part, or was first found to wait (monotonic time)."""
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
        self._at = now
        self._pass(passed)
        with self._database.connected() as control:
            counts = control.deferred_counts()
            if not counts:
                self._taken_at.clear()
                return 0
            left = 0
            for views in self._kept.read(control).values():
                for view in views.views:
                    here = counts.get((view.row.name, view.row.version))
                    if here:
                        left += sum(here.values())
                        left -= self._tried(control, views, view, here, passed)
            return left

    def _pass(self, seconds: float) -> None:
        """Let allowances grow; what a view has applied beyond its own is made up for by waiting."""
        for name, (allowed, rate) in list(self._allowed.items()):
            self._allowed[name] = (min(allowed + rate * seconds, rate), rate)

    def _tried(
        self,
        control: Control,
        views: EntityViews,
        view: KeptView,
        here: Mapping[int, int],
        passed: float,
    ) -> int:
        """How many changes one view has applied; its failure is its own (C13)."""
        name, version, error = view.row.name, view.row.version, view.row.error
        if not self._retries.is_due(view.table.name):
            return 0
        try:
            with view_refusals():
                taken = self._take(views, view, here, passed)
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

    def _take(
        self, views: EntityViews, view: KeptView, here: Mapping[int, int], passed: float
    ) -> int:
        """Let one view apply parts while its rate allows, from its partitions in turn."""
        name, rate = view.table.name, view.plan.rules.per_second
        if rate is None:
            # No change is deferred any more: those that still wait are applied at once.
            allowed, most = inf, PART_CHANGES
        else:
            allowed, _ = self._allowed.get(name, (rate * passed, rate))
            most = min(ceil(rate), PART_CHANGES)  # no more than a second's changes at once
        store = view_store(self._config.views_dsn, self._config.views.schema_name)
        core, table = self._kept.core(views), view.table
        taken, open_ones = 0, _after(sorted(here), self._last.get(name))
        try:
            while open_ones and allowed > 0:
                for partition in list(open_ones):
                    if allowed <= 0:
                        break
                    begun = time.monotonic()
                    waits = begun - self._taken_at.setdefault(name, begun) > _PATIENCE_S
                    found = store.take_deferred(core, table, partition, most, waits=waits)
                    if not found:
                        open_ones.remove(partition)
                        continue
                    allowed, taken = allowed - found, taken + found
                    self._taken_at[name], self._last[name] = time.monotonic(), partition
                    time.sleep(self._taken_at[name] - begun)
        finally:
            if rate is not None:
                # What was not used is dropped, but for a second's changes.
                self._allowed[name] = (min(allowed, rate), rate)
        return taken


def _after(partitions: list[int], last: int | None) -> list[int]:
    """The partitions in turn, those after the last one first."""
    if last is None:
        return partitions
    return [p for p in partitions if p > last] + [p for p in partitions if p <= last]
