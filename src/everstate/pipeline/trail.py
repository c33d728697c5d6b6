"""Views that are behind their core: they catch up, and a new version is published when it has.

One step is one Spark job for each view that is behind. It reads what the core has judged already,
and applies the accepted changes in the view's own transaction (see `everstate.views.trailing`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, PipelineError, SparkLost
from everstate.log.positions import Offsets, Range
from everstate.log.topics import TopicNames
from everstate.parts import waits, works
from everstate.pipeline.changes import ChangesReader
from everstate.pipeline.kept import EntityViews, KeptView, KeptViews
from everstate.pipeline.plan import planned
from everstate.pipeline.publish import publish
from everstate.pipeline.retries import Retries
from everstate.pipeline.session import spark_errors
from everstate.pipeline.source import fair_spans
from everstate.pipeline.task import OUTCOME_DDL, ApplyTask
from everstate.views.control import BUILDING, LIVE, Control
from everstate.views.database import ViewsDatabase
from everstate.views.project import Project
from everstate.views.stores import close_store
from everstate.views.tables import Core

log = logging.getLogger(__name__)

_POOL: Final = "trail"
_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
_RETRY_S_MIN: Final = 0.2
# In a last step that is this short the core stands still, so that the view meets it (V7).
_MEETING_CHANGES: Final = 20_000


class Trailer:
    """Lets every view that is behind catch up; :meth:`step` it, or run it beside the keeper."""

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config = spark, config
        self._offsets = Offsets(config)
        self._names = TopicNames(config.log.prefix)
        self._reader = ChangesReader(spark, config, project, self._offsets)
        self._kept = KeptViews(config, project)
        self._retries = Retries()
        self._database = ViewsDatabase(config.views_dsn)

    def close(self) -> None:
        """Give up the connections of this thread; the Spark session is the caller's."""
        close_store(self._config.views_dsn)
        self._database.close()
        self._offsets.close()

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set; what may pass by itself is told and tried again."""
        pause, poll_s = _RETRY_S_MIN, self._config.pipeline.poll_ms / 1000
        try:
            while not stop.is_set():
                try:
                    if not self.step():
                        stop.wait(poll_s)
                    works()
                    pause = _RETRY_S_MIN
                except EverstateError as error:
                    if isinstance(error, SparkLost) or not error.retryable:
                        raise
                    log.warning("views that are behind wait %.1f s: %s", pause, error)
                    waits(error, pause)
                    stop.wait(pause)
                    pause = min(2 * pause, self._config.pipeline.retry_s_max)
        finally:
            close_store(self._config.views_dsn)

    def step(self) -> int:
        """Bring each view that is behind one batch further; how many offsets were passed.

        A version that was built and has met its core is published. A view that cannot go on stays
        where it is, with its reason, and is tried again with growing pauses. Raises Unavailable,
        SparkLost.
        """
        with self._database.connected() as connection:
            control = Control(connection, self._config.views.schema_name)
            kept = self._kept.read(control)
            passed = 0
            for views in kept.values():
                for view in views.behind:
                    if self._retries.is_due(view.table.name):
                        passed += self._catch_up(control, views, view)
            for views in kept.values():
                for view in views.views:
                    if view.row.status == BUILDING:
                        publish(control, view)
        return passed

    def _catch_up(self, control: Control, views: EntityViews, view: KeptView) -> int:
        """Apply one batch to one view; its trouble is its own."""
        try:
            spans = fair_spans(view.vector, views.vector, self._config.pipeline.batch_changes_max)
            failure = self._apply(control, views, view, spans)
        except SparkLost:
            raise
        except (PipelineError, DataLoss) as error:
            failure = str(error)
        if failure is not None:
            pause = self._retries.failed(view.table.name, _RETRY_S)
            log.error(
                "view %s is behind and is tried again in %.0f s: %s", view.row.name, pause, failure
            )
            control.set_reason(view.row.name, view.row.version, failure)
            return 0
        self._retries.forget(view.table.name)
        if view.row.reason is not None and view.row.status == LIVE:
            log.info("view %s goes on", view.row.name)
        if view.row.reason is not None:
            control.set_reason(view.row.name, view.row.version, None)
        return sum(map(len, spans.values()))

    def _apply(
        self, control: Control, views: EntityViews, view: KeptView, spans: Mapping[int, Range]
    ) -> str | None:
        """One job; why the view cannot go on, or ``None``."""
        core = self._kept.core(views)
        topic = self._names.changes(views.entity)
        sources = self._reader.sources(views.entity, topic, spans)
        spans = sources.spans
        freed = [
            (partition, *change)
            for partition, span in spans.items()
            for change in control.released_changes(core, partition, span.start, span.end)
        ]
        meets = frozenset(
            partition
            for partition, span in spans.items()
            if len(span) <= _MEETING_CHANGES and span.end == views.vector[partition]
        )
        config = self._config
        task = ApplyTask(config.views_dsn, config.views.schema_name, core, spans, view.table, meets)
        parsed = self._reader.parsed(views.entity, sources, judged=True, freed=freed)
        planned_views = [] if view.plan is None else [(view.plan, view.table)]
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        with spark_errors(f"view {view.row.name}"):
            job = planned(parsed, planned_views).mapInArrow(task, OUTCOME_DDL)
            outcomes = job.collect()
        self._advance(control, core, view, spans, {o["partition"] for o in outcomes})
        return next((str(o["failure"]) for o in outcomes if o["failure"] is not None), None)

    def _advance(
        self,
        control: Control,
        core: Core,
        view: KeptView,
        spans: Mapping[int, Range],
        heard: set[Any],
    ) -> None:
        """Pass ranges in which no record was served (C12)."""
        for partition, span in spans.items():
            if partition not in heard:
                control.take_view(view.table, core.generation, partition, span.start, span.end)
