"""Aggregates over joins: one worker recomputes the keys that have changed (C18).

Each refresh is one transaction with one snapshot: it reads which keys have changed, computes them
from both sides, and stores the positions of the two sides. Needs no Spark.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from everstate.config import Config
from everstate.errors import InUse, InvalidView, StatementRefused
from everstate.postgres import refusals
from everstate.runtime.worker import Worker
from everstate.views.control import BUILDING, LIVE, Control, ControlConnection, ViewVersion
from everstate.views.kinds.join_sums import JoinSumsPlan, join_sums_of
from everstate.views.plan import plan_of
from everstate.views.project import Project
from everstate.views.stores import JoinTables, marking, stop_marking, view_refusals
from everstate.views.tables import physical

logger = logging.getLogger(__name__)

_DUTY: Final = "refreshes"
_REST_S: Final = 60.0
"""How often the triggers of versions that are not refreshed any more are looked for."""


class Refresher(Worker):
    """Refreshes the aggregates over joins of a project; one per project at a time."""

    doing = "refreshing of the aggregates over joins"
    retry_s = (2.0, 2.0)

    def __init__(self, config: Config, project: Project) -> None:
        self._config, self._project = config, project
        self._database = ControlConnection(config)
        self._rest_due = 0.0
        self.idle_s = config.pipeline.poll_ms / 1000

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def step(self) -> int:
        """Refresh each view once; returns how many keys were recomputed. Raises Unavailable.

        For a view that cannot be refreshed the error is stored, and its positions do not move.
        """
        with self._database.connected() as control:
            rows = control.versions()
            joins = [row for row in rows if row.inputs]
            mine = [row for row in joins if row.status in (LIVE, BUILDING)]
            is_due = time.monotonic() >= self._rest_due and len(mine) < len(joins)
            if not mine and not is_due:
                return 0
            with control.duty(_DUTY) as is_mine:
                if not is_mine:
                    return 0
                if is_due:
                    self._let_rest(control, [row for row in joins if row not in mine])
                seen = {row.name: row for row in rows if row.published}
                return sum(self._refresh(control, row, seen) for row in mine)

    def _let_rest(self, control: Control, rows: Sequence[ViewVersion]) -> None:
        """Drop the triggers of versions that are not refreshed any more.

        The marks of what changes would grow for ever. When such a version is live again, its next
        refresh makes the triggers again and then computes all keys.
        """
        self._rest_due = time.monotonic() + _REST_S
        connection, schema = control.connection, self._config.views.schema_name
        resting = {physical(row.name, row.version): row for row in rows}
        for name in marking(connection, schema, resting):
            try:
                with refusals(), connection.transaction():
                    if control.mark_unrefreshed(resting[name].name, resting[name].version):
                        stop_marking(connection, schema, name)
            except InUse:
                logger.info("the triggers of %s are dropped later: a side is locked", name)

    def _refresh(self, control: Control, row: ViewVersion, seen: Mapping[str, ViewVersion]) -> int:
        if row.entity not in self._project.entities or not set(row.inputs) <= seen.keys():
            return 0
        try:
            plan = join_sums_of(plan_of(row, self._project.entities, self._project.views))
        except InvalidView as refused:
            control.record(row.name, row.version, error=refused.message)
            return 0
        if plan is None:
            return 0
        parts = [seen[name] for name in row.inputs]
        try:
            with view_refusals(), refusals():
                done = self._in_one_snapshot(control, row, plan, parts)
        except InUse:
            return 0  # another transaction committed first; the next step refreshes the view
        except StatementRefused as refused:
            logger.error("view %s cannot be refreshed: %s", row.name, refused)
            control.record(row.name, row.version, error=refused.message)
            return 0
        if row.error is not None:
            control.record(row.name, row.version, error=None)
        return done

    def _in_one_snapshot(
        self, control: Control, row: ViewVersion, plan: JoinSumsPlan, parts: list[ViewVersion]
    ) -> int:
        """Refresh one view; its new positions are those of the parts in the same snapshot."""
        names = [physical(part.name, part.version) for part in parts]
        built: Mapping[str, Any] = row.built or {}
        connection, schema = control.connection, self._config.views.schema_name
        tables = JoinTables(connection, schema, plan, row.version, names)
        is_full = built.get("tables") != names
        if is_full:
            with connection.transaction():
                tables.install()
        with control.snapshot():
            done = tables.refresh(is_full=is_full)
            positions = {
                part.name: {str(p): at for p, at in control.vector(part.name, part.version).items()}
                for part in parts
            }
            if is_full or positions != built.get("positions"):
                state = {"tables": names, "positions": positions}
                control.record(row.name, row.version, built=state)
        if is_full:
            logger.info("view %s: %d keys of the join were recomputed", row.name, done)
        return done
