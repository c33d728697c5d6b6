"""Lets views that are behind their core catch up, and publishes new versions that have.

One step is one Spark job for each view that is behind. It reads records that the core has judged,
and applies the accepted changes in the view's own transaction (see `everstate.views.trailing`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Final

from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.errors import (
    ArchiveError,
    DataLoss,
    InvalidView,
    LogError,
    LogIdentityChanged,
    PipelineError,
    PublishRefused,
    SparkLost,
    StatementRefused,
    ViewFailed,
)
from everstate.log.positions import Offsets, Range
from everstate.log.topics import Topics
from everstate.pipeline.keeping.batches import CAREFUL
from everstate.pipeline.keeping.changes import ChangesReader
from everstate.pipeline.keeping.kept import (
    MEETING_CHANGES,
    EntityViews,
    ForeignVersion,
    KeptView,
    KeptViews,
    StalledVersions,
    ViewWorker,
)
from everstate.pipeline.keeping.plan import planned
from everstate.pipeline.keeping.publish import ViewPublisher, composed_waiting
from everstate.pipeline.keeping.task import UNCOMPUTED, ApplyTask
from everstate.pipeline.keeping.turns import Turns
from everstate.pipeline.spark.functions import leaving_a_slot, sharing_slots, ship_functions
from everstate.pipeline.spark.outcomes import OUTCOME, outcomes_of
from everstate.pipeline.spark.progress import progress
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.source import fair_spans
from everstate.views.control import BUILDING, Control, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.project import Project
from everstate.views.publishing import InTheWay, publish
from everstate.views.stores import store_of, view_refusals
from everstate.views.tables import HOME

logger = logging.getLogger(__name__)

_POOL: Final = "trail"
_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
_FAILED_POLL_S: Final = 1.0
_IN_THE_WAY_S: Final = (0.5, 1.0, 2.0, 5.0, 15.0)
_STILL_S: Final = 10.0
"""A view that this app cannot compute, and that has not moved for so long, is kept by nobody."""


class Trailer(ViewWorker):
    """Lets every view that is behind catch up; :meth:`step` it, or run it beside the keeper."""

    doing = "updating of the views that lag"

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        project: Project,
        turns: Turns | None = None,
        *,
        failed: bool | None = None,
        store: str | None = None,
    ) -> None:
        """``turns``: those that it takes with the keeper of the same process.

        ``failed``: keep only the views whose last try failed, or only the others, so that none of
        these waits while a failed one is tried again; ``None``: all. ``store``: keep only the views
        in that store, so that no other waits for it; ``None``: those in all stores.
        """
        super().__init__(config)
        self._failed, self._store = failed, store
        self.idle_s = _FAILED_POLL_S if failed else config.pipeline.poll_ms / 1000
        self.retry_s = (0.2, config.pipeline.retry_s_max)
        self._spark, self._turns = spark, turns or Turns()
        ship_functions(project)
        self._offsets = Offsets(config)
        self._topics = Topics(config)
        self._reader = ChangesReader(spark, config, project, self._offsets)
        self._kept, self._entities = KeptViews(config, project), project.entities
        self._begun: dict[str, tuple[float, int]] = {}
        """When a view began to catch up, and the sum of its offsets at that time."""
        self._stalled = StalledVersions()

    def close(self) -> None:
        """Close the connections of this thread; the Spark session is the caller's."""
        super().close()
        self._offsets.close()
        self._topics.close()

    def step(self) -> int:
        """Move each view that is behind by one batch; returns how many offsets were passed.

        A built version that has caught up with its core is published. A view that cannot proceed
        keeps its position, its error is stored, and it is retried with growing pauses. Raises
        Unavailable, SparkLost.
        """
        with self._database.connected() as control:
            kept = self._kept.read(control)
            passed = 0
            for views in kept.values():
                for view in views.behind:
                    is_tried = self._failed in (None, view.row.error is not None)
                    is_mine = is_tried and self._is_here(view.plan)
                    if self.stop.is_set():
                        return passed  # what a store is given now may take minutes
                    if not is_mine or not self._retries.is_due(view.table.name):
                        continue
                    if _meets(views, view):
                        passed += self._meet(control, view)
                    else:
                        passed += self._catch_up(control, views, view)
            for views in kept.values() if not self._failed else ():
                self._report_foreign(control, views.foreign)
                behind = views.behind
                for view in views.views:
                    if self.stop.is_set() or not self._is_here(view.plan):
                        continue
                    if view not in behind:
                        self._go_on(control, view, "is at the core's position")
                        if view.row.progress is not None:  # another process let it catch up
                            control.record(view.row.name, view.row.version, progress=None)
                    if view.row.status == BUILDING:
                        self._publish(control, view.row, view.plan)
            for row, plan in composed_waiting(control, self._entities) if not self._failed else ():
                if self._is_here(plan):
                    self._publish(control, row, plan)
        return passed

    def _is_here(self, plan: ViewPlan) -> bool:
        """Whether the rows of a view are in a store whose views this one moves."""
        return self._store in (None, plan.store)

    def _publish(self, control: Control, row: ViewVersion, plan: ViewPlan) -> None:
        """Publish a version, if it can be; what is wrong with one view stops no other.

        Pauses grow while a reader, or what depends on the name, is in the way: others queue behind
        each try.
        """
        name = f"publishing {row.name}"
        if not self._retries.is_due(name):
            return
        try:
            with view_refusals():
                publish(ViewPublisher(control, self._config), row, plan)
        except (InTheWay, PublishRefused):
            self._retries.failed(name, _IN_THE_WAY_S)
        except (StatementRefused, ViewFailed, InvalidView) as refused:
            pause = self._retries.failed(name, _RETRY_S)
            logger.error(
                "view %s is not published, and is retried in %.0f s: %s", row.name, pause, refused
            )
            waits_for = f"built; not published: {refused}"
            control.record(row.name, row.version, waits_for=waits_for)
        else:
            self._retries.forget(name)

    def _meet(self, control: Control, view: KeptView) -> int:
        """Let a view that is nearly there reach its core, which waits meanwhile.

        A built version that does not ride afterwards is published before the core goes on. The
        version that readers see does not ride either: it comes along, so that both have the same
        position when their rows are compared.
        """
        entity = view.row.entity
        with self._turns.meeting(entity):
            views = self._kept.read(control)[entity]
            place = (view.row.name, view.row.version)
            found = (each for each in views.behind if (each.row.name, each.row.version) == place)
            nearest = next(found, None)
            if nearest is None:
                return 0
            passed = self._catch_up(control, views, nearest)
            if passed and nearest.row.status == BUILDING and not nearest.plan.rides:
                for seen in views.behind:
                    if _is_seen(seen, nearest) and self._is_near(views, seen):
                        self._catch_up(control, views, seen)
                self._publish(control, nearest.row, nearest.plan)
            return passed

    def _is_near(self, views: EntityViews, view: KeptView) -> bool:
        """Whether one batch brings a view to its core, and the view does not wait for a retry."""
        return self._retries.is_due(view.table.name) and _left(views, view) <= MEETING_CHANGES

    def _catch_up(self, control: Control, views: EntityViews, view: KeptView) -> int:
        """Apply one batch to one view; its failure does not affect other views."""
        if view.plan.store != HOME:
            with control.writing(view.row.name, view.row.version) as is_free:
                pass
            if not is_free:  # a proof has the right to write meanwhile, and a job would do nothing
                return 0
        try:
            most = min(self._config.pipeline.batch_changes_max, CAREFUL)
            spans = fair_spans(view.vector, views.vector, most)
            failure, passed = self._apply(control, views, view, spans)
        except SparkLost:
            raise
        except (PipelineError, DataLoss, ArchiveError, LogIdentityChanged, LogError) as error:
            failure, passed = str(error), 0
        if failure is not None:
            pause = self._retries.failed(view.table.name, _RETRY_S)
            logger.error("view %s lags and is retried in %.0f s: %s", view.row.name, pause, failure)
            self._begun.pop(view.table.name, None)
            control.record(view.row.name, view.row.version, progress=None, error=failure)
            return 0
        if passed:  # else another process moves it
            self._retries.forget(view.table.name)
            self._note_progress(control, views, view, passed)
            self._go_on(control, view, "makes progress again")
        return passed

    def _go_on(self, control: Control, view: KeptView, how: str) -> None:
        """Clear the error of a view whose position moves, or is the core's."""
        if view.row.error is not None:
            logger.info("view %s %s", view.row.name, how)
            control.record(view.row.name, view.row.version, error=None)

    def _report_foreign(self, control: Control, views: Iterable[ForeignVersion]) -> None:
        """Store why this app cannot keep a view, once it is clear that no other app keeps it."""
        for view in views:
            if self._stalled.seconds(view, time.monotonic()) >= _STILL_S:
                control.record(view.row.name, view.row.version, error=view.why)

    def _note_progress(
        self, control: Control, views: EntityViews, view: KeptView, passed: int
    ) -> None:
        """Store the progress of a view that needs more steps; clear it when it has caught up."""
        name, mine = view.table.name, sum(view.vector.values()) + passed
        left = sum(views.vector.values()) - mine
        if left <= 0:
            self._begun.pop(name, None)
            control.record(view.row.name, view.row.version, progress=None)
            return
        begun, first = self._begun.setdefault(name, (time.monotonic(), mine - passed))
        seconds, done = time.monotonic() - begun, mine - first
        seen = progress("catching up", done / (done + left), seconds, done + left)
        control.record(view.row.name, view.row.version, progress=seen.note())

    def _apply(
        self, control: Control, views: EntityViews, view: KeptView, spans: Mapping[int, Range]
    ) -> tuple[str | None, int]:
        """Run one job; returns why the view cannot proceed, or ``None``, and the offsets passed."""
        core = self._kept.core(views)
        topic = self._topics.names.changes(views.entity)
        control.check_topic_identity(views.entity, topic, self._topics.identity(topic))
        sources = self._reader.sources(views.entity, topic, spans)
        spans = sources.spans
        released = [
            (partition, *change)
            for partition, span in spans.items()
            for change in control.released_changes(core, partition, span.start, span.end)
        ]
        meets = frozenset(
            partition
            for partition, span in spans.items()
            if _may_meet(view)
            and len(span) <= MEETING_CHANGES
            and span.end == views.vector[partition]
        )
        config = self._config
        store = store_of(config, view.row.name, view.row.store, view.row.attempt)
        home = (config.views_dsn, config.views.schema_name)
        task = ApplyTask(*home, core, spans, view.table, store, meets)
        parsed = self._reader.parsed(views.entity, sources, judged=True, released=released)
        if not view.plan.may_ride and view.plan.store == HOME:  # its function may take long
            parsed = leaving_a_slot(parsed)
        sharing = nullcontext(parsed) if view.plan.store == HOME else sharing_slots(parsed)
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        mine = [(view.plan, view.table)]
        with spark_errors(f"view {view.row.name}"), sharing as parsed:
            # A job that ends by an error takes its worker of Python with it, and the core's next
            # task would have to prepare another one's session for all views that ride.
            job = planned(parsed, mine, caught=True).mapInArrow(task, OUTCOME)
            outcomes = outcomes_of(job)
            if any(UNCOMPUTED in (o["failure"] or "") for o in outcomes):
                # Fails without a worker, and says why.
                planned(parsed, mine).write.format("noop").mode("append").save()
        passed = {o["partition"] for o in outcomes if not o["moved"]}
        # Ranges in which the log served no record (C12).
        silent = spans.keys() - {o["partition"] for o in outcomes}
        place = (view.table, core.generation)
        passed |= {p for p in silent if control.take_view(*place, p, spans[p].start, spans[p].end)}
        failure = next((str(o["failure"]) for o in outcomes if o["failure"] is not None), None)
        return failure, sum(len(span) for p, span in spans.items() if p in passed)


def _may_meet(view: KeptView) -> bool:
    """Whether the core waits for a view. One that never rides does so once, before it is published.

    No core waits for another store, nor for a view whose last try failed: it may fail again, and
    take its time for that.
    """
    waits_for_it = view.plan.rides or (view.row.status == BUILDING and view.plan.store == HOME)
    return view.row.error is None and waits_for_it


def _meets(views: EntityViews, view: KeptView) -> bool:
    """Whether the next step of a view is the last one to its core."""
    return _may_meet(view) and _left(views, view) <= MEETING_CHANGES


def _left(views: EntityViews, view: KeptView) -> int:
    """How many offsets a view is behind its core."""
    return sum(max(0, end - view.vector.get(p, end)) for p, end in views.vector.items())


def _is_seen(view: KeptView, other: KeptView) -> bool:
    """Whether readers see a view's version instead of ``other``, which has the same meaning."""
    mine, its = view.row, other.row
    return (mine.name, mine.fingerprint) == (its.name, its.fingerprint) and mine.published
