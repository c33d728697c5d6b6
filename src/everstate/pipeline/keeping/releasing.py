"""Throttled changes of views: applied at the view's rate, oldest first, in order per key.

Other changes go first: a part is applied while the core does not write its partition, and after
each part as much time is left to the core as the part has taken. A core that always writes waits
for a part now and then, so that the rest does not grow without end.

No Spark job is needed: deferred changes are planned already, and are merged by the same code as
changes that are not deferred.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from everstate.config import Config
from everstate.errors import EverstateError
from everstate.parts import waits, works
from everstate.pipeline.keeping.kept import EntityViews, KeptView, KeptViews
from everstate.views.control import Control
from everstate.views.database import ViewsDatabase
from everstate.views.project import Project
from everstate.views.stores import close_store, take_part

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1
_IDLE_S: Final = 0.5
_RETRY_S: Final = 1.0
_PATIENCE_S: Final = 5.0
"""A core that is always writing waits for a part of a view this long after the view's last one."""


class Releaser:
    """Lets every throttled view apply its deferred changes; :meth:`step` it, or run it."""

    def __init__(self, config: Config, project: Project) -> None:
        self._config = config
        self._kept = KeptViews(config, project)
        self._database = ViewsDatabase(config.views_dsn)
        self._allowed: dict[str, float] = {}
        """How many changes each view may apply now."""
        self._taken_at: dict[str, float] = {}
        """When each view applied its last part, or was first found to wait (monotonic time)."""
        self._at = time.monotonic()

    def close(self) -> None:
        """Close the connections of this thread."""
        close_store(self._config.views_dsn)
        self._database.close()

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set; retryable errors are retried."""
        try:
            while not stop.is_set():
                try:
                    waiting = self.step()
                    works()
                    stop.wait(_POLL_S if waiting else _IDLE_S)
                except EverstateError as error:
                    if not error.retryable:
                        raise
                    logger.warning("throttled changes cannot be applied now: %s", error)
                    waits(error, _RETRY_S)
                    stop.wait(_RETRY_S)
        finally:
            close_store(self._config.views_dsn)

    def step(self, seconds: float | None = None) -> int:
        """Apply the changes that the time since the last step allows; returns how many still wait.

        ``seconds``: use that time instead. Raises Unavailable.
        """
        now = time.monotonic()
        passed = now - self._at if seconds is None else seconds
        self._at = now
        with self._database.connected() as connection:
            control = Control(connection, self._config.views.schema_name)
            counts = control.deferred_counts()
            if not counts:
                self._allowed.clear()
                self._taken_at.clear()
                return 0
            left = 0
            for views in self._kept.read(control).values():
                for view in views.views:
                    here = counts.get((view.row.name, view.row.version))
                    if here:
                        left += sum(here.values()) - self._take(views, view, here, passed)
            return left

    def _take(
        self, views: EntityViews, view: KeptView, here: Mapping[int, int], passed: float
    ) -> int:
        """Let one view apply parts while its rate allows, from its partitions in turn."""
        name, rate = view.table.name, view.plan.rules.per_second
        # Without a rate no change is deferred any more: those that still wait are applied at once.
        allowed = float("inf") if rate is None else self._allowed.get(name, 0.0) + rate * passed
        core, place = (
            self._kept.core(views),
            (self._config.views_dsn, self._config.views.schema_name),
        )
        taken, open_ones = 0, list(here)
        while open_ones and allowed > 0:
            for partition in list(open_ones):
                if allowed <= 0:
                    break
                begun = time.monotonic()
                waits = begun - self._taken_at.setdefault(name, begun) > _PATIENCE_S
                found = take_part(*place, core, view.table, partition, waits=waits)
                if not found:
                    open_ones.remove(partition)
                    continue
                allowed, taken = allowed - found, taken + found
                self._taken_at[name] = time.monotonic()
                time.sleep(self._taken_at[name] - begun)
        # Changes beyond the allowance are charged to later steps; an unused allowance is dropped.
        self._allowed[name] = min(allowed, rate or 0.0)
        return taken
