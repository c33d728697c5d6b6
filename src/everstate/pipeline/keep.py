"""The keeper: reads each changelog once, parses once, and lets every core judge its part.

One step is one Spark job. For each entity type the bounded range after its core's position is read,
parsed and planned into row deltas, and each task judges one partition's range and writes `latest`
and the views that ride, in one transaction (C11, C12). Only one line of counts per partition comes
back to the driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isfinite
from typing import Any, Final

import orjson
from prometheus_client import Counter, Gauge, Histogram
from pyspark.sql import DataFrame, SparkSession

from everstate.config import Config
from everstate.errors import (
    ArchiveError,
    DataLoss,
    EverstateError,
    LogTruncated,
    PipelineError,
    SparkLost,
)
from everstate.log.positions import Offsets, check_ends
from everstate.log.topics import TopicIdentity, Topics
from everstate.parts import Part, note, waits, works
from everstate.pipeline.changes import ChangesReader
from everstate.pipeline.declare import declare
from everstate.pipeline.kept import EntityViews, KeptView, KeptViews
from everstate.pipeline.plan import planned
from everstate.pipeline.retries import Retries
from everstate.pipeline.session import spark_errors
from everstate.pipeline.source import fair_spans
from everstate.pipeline.spans import Sources
from everstate.pipeline.task import OUTCOME_DDL, ApplyTask
from everstate.views.control import Control
from everstate.views.database import ViewsDatabase
from everstate.views.project import Project
from everstate.views.stores import close_store
from everstate.views.tables import Core, latest_of

log = logging.getLogger(__name__)

JUDGED = Counter("everstate_views_changes", "Changes that were judged", ["entity", "outcome"])
BEHIND = Gauge("everstate_view_behind", "1 while a view is behind and says why", ["view"])
STEP_SECONDS = Histogram("everstate_keeper_step_seconds", "Time of one step of the keeper")

_POOL: Final = "keep"
_RETRY_S_MIN: Final = 0.2
# Where one record needed the rules, the next may: so many jobs are planned with them.
_JUDGED_JOBS: Final = 100
_RIDER_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
# Not longer: at each try the partitions that can go on do.
_CORE_RETRY_S: Final = (5.0, 15.0)
_NEVER: Final = (inf,)
_TRIM_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What one step did, over all entity types."""

    changes: int
    applied: int
    duplicate: int
    held: int
    dead: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one entity type's core reads next, and the views that may ride."""

    views: EntityViews
    riders: tuple[KeptView, ...]
    core: Core
    sources: Sources


class Keeper:
    """Keeps the cores of a project, and the views that ride; :meth:`prepare` it, then step or run.

    Two keepers of one project do no harm: each range is judged by the one that moves the position
    first (C11). They keep what the database says, so that an app that was started earlier keeps
    what a later one declared.
    """

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._topics, self._offsets = Topics(config), Offsets(config)
        self._reader = ChangesReader(spark, config, project, self._offsets)
        self._kept = KeptViews(config, project)
        self._identities: dict[str, TopicIdentity] = {}
        self._retries = Retries()
        self._judged_jobs: dict[str, int] = {}
        """Entity types whose next jobs judge each record by the rules, and how many."""
        self._database = ViewsDatabase(config.views_dsn)
        self._trimmed_at = 0.0

    def close(self) -> None:
        """Give up the connections of this thread; the Spark session is the caller's."""
        close_store(self._config.views_dsn)
        self._database.close()
        self._offsets.close()
        self._topics.close()

    def prepare(self) -> None:
        """Make topics, tables and positions where they are missing; idempotent.

        A view that is new beside kept changes, changed in meaning, or comes back, gets a version
        that is built beside the one that readers see. Raises InvalidView, LogIdentityChanged,
        TopicResized, Unavailable.
        """
        self._topics.ensure(self._project.entities)
        with self._database.connected() as connection:
            control = Control(connection, self._config.views.schema_name)
            control.install()
            for name, entity_type in self._project.entities.items():
                topic = self._topics.names.changes(name)
                identity = self._topics.identity(topic)
                control.check_topic_identity(name, topic, identity)
                self._identities[topic] = identity
                partitions = range(identity.partitions)
                declare(self._spark, self._config, control, self._project, entity_type, partitions)

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set; what may pass by itself is told and tried again."""
        pause, poll_s = _RETRY_S_MIN, self._config.pipeline.poll_ms / 1000
        try:
            while not stop.is_set():
                try:
                    if self.step() is None:
                        stop.wait(poll_s)
                    works()
                    pause = _RETRY_S_MIN
                except EverstateError as error:
                    may_pass = error.retryable or isinstance(error, PipelineError)
                    if isinstance(error, SparkLost) or not may_pass:
                        raise
                    log.warning("the keeper waits %.1f s: %s", pause, error)
                    waits(error, pause)
                    stop.wait(pause)
                    pause = min(2 * pause, self._config.pipeline.retry_s_max)
        finally:
            close_store(self._config.views_dsn)

    def step(self) -> KeptBatch | None:
        """Judge what came since the cores' positions; ``None`` when there is nothing to do.

        One Spark job; at most ``pipeline.batch_changes_max`` records an entity type. After every
        error each core is at its position or past the whole range, never between. Raises
        LogIdentityChanged, TopicResized, Unavailable, PipelineError. An entity type whose core
        cannot go on waits alone, with its reason, and is tried again: what the log lost of its
        beginning may be in the archive's next commit. One whose log lost its end is not tried
        again by this keeper, because what the log takes next hides the loss. A view that fails is
        behind, alone.
        """
        begun = time.monotonic()
        self._topics.check_identity(self._identities)
        units = self._units()
        if not units:
            return None
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        outcomes = self._keep_together(units)
        for outcome in outcomes:
            for what in ("applied", "duplicate", "held", "dead"):
                JUDGED.labels(outcome["entity"], what).inc(max(0, outcome[what]))
        STEP_SECONDS.observe(time.monotonic() - begun)
        return KeptBatch(
            changes=sum(len(span) for unit in units for span in unit.sources.spans.values()),
            applied=sum(o["applied"] for o in outcomes),
            duplicate=sum(o["duplicate"] for o in outcomes),
            held=sum(o["held"] for o in outcomes),
            dead=sum(o["dead"] for o in outcomes),
            seconds=time.monotonic() - begun,
        )

    def _keep_together(self, units: Sequence[_Unit]) -> list[Any]:
        """Judge all entity types' ranges in one job; lines of outcome."""
        try:
            outcomes = self._run(units)
        except SparkLost:
            raise
        except PipelineError:
            if self._blamed(units):
                raise  # the next step goes on without the views to blame
            return self._keep_each(units)
        self._settle(units, outcomes)
        return outcomes

    def _keep_each(self, units: Sequence[_Unit]) -> list[Any]:
        """Judge each entity type's ranges in a job of its own; what fails waits alone."""
        outcomes = []
        for unit in units:
            try:
                found = self._run([unit])
            except SparkLost:
                raise
            except PipelineError as error:
                self._stop(unit.core.view, str(error))
                continue
            self._settle([unit], found)
            outcomes += found
        return outcomes

    def _run(self, units: Sequence[_Unit]) -> list[Any]:
        """Judge the units' ranges in one job; in one more where records need the rules."""
        for unit in units:
            entity = unit.core.entity
            self._judged_jobs[entity] = max(0, self._judged_jobs.get(entity, 0) - 1)
        outcomes = self._collect(units)
        left = {_place(outcome) for outcome in outcomes if outcome["unjudged"]}
        if not left:
            return outcomes
        entities = {entity for entity, _ in left}
        self._judged_jobs |= dict.fromkeys(entities, _JUDGED_JOBS)
        again = self._collect([unit for unit in units if unit.core.entity in entities])
        return [
            *(outcome for outcome in outcomes if _place(outcome) not in left),
            *(outcome for outcome in again if _place(outcome) in left),
        ]

    def _collect(self, units: Sequence[_Unit]) -> list[Any]:
        with spark_errors("keeping views"):
            return list(reduce(DataFrame.unionAll, map(self._job, units)).collect())

    def _units(self) -> list[_Unit]:
        """What there is to read, from the stored positions and the log's stable ends."""
        ends = self._offsets.stable_ends(list(self._identities))
        with self._database.connected() as connection:
            control = Control(connection, self._config.views.schema_name)
            kept = self._kept.read(control)
            self._trim(control, kept)
        units = []
        for name, views in kept.items():
            self._say_how_views_are(views)
            if not self._retries.is_due(latest_of(name)):
                continue
            topic = self._topics.names.changes(name)
            until = {partition: end for (of, partition), end in ends.items() if of == topic}
            try:
                unit = self._unit(views, topic, until)
            except (DataLoss, ArchiveError) as error:
                lost_its_end = isinstance(error, LogTruncated)
                self._stop(latest_of(name), str(error), _NEVER if lost_its_end else _CORE_RETRY_S)
                continue
            if unit is not None:
                units.append(unit)
            elif self._retries.forget(latest_of(name)):
                self._go_on(latest_of(name))
        return units

    def _unit(self, views: EntityViews, topic: str, until: Mapping[int, int]) -> _Unit | None:
        """What one entity type's core reads next; ``None``: there is nothing new."""
        check_ends(f"the views of {views.entity}", topic, views.vector, until)
        spans = fair_spans(views.vector, until, self._config.pipeline.batch_changes_max)
        if not spans:
            return None
        riders = tuple(
            view
            for view in views.views
            if any(view.vector.get(p) == span.start for p, span in spans.items())
            and self._retries.is_due(view.table.name)
        )
        sources = self._reader.sources(views.entity, topic, spans)
        return _Unit(views, riders, self._kept.core(views, riders), sources)

    def _job(self, unit: _Unit) -> DataFrame:
        """The part of the step's job for one entity type: a line of outcome per partition."""
        config, entity = self._config, unit.core.entity
        schema = config.views.schema_name
        task = ApplyTask(config.views_dsn, schema, unit.core, dict(unit.sources.spans))
        judged = self._judged_jobs.get(entity, 0) > 0
        parsed = self._reader.parsed(entity, unit.sources, judged=judged)
        views = [(view.plan, view.table) for view in unit.riders if view.plan is not None]
        return planned(parsed, views).mapInArrow(task, OUTCOME_DDL)

    def _settle(self, units: Sequence[_Unit], outcomes: Sequence[Any]) -> None:
        """Advance where no record came, and note which core or rider is behind, and why."""
        heard = {(o["entity"], o["partition"]) for o in outcomes}
        with self._database.connected() as connection:
            control = Control(connection, self._config.views.schema_name)
            for unit in units:
                entity = unit.core.entity
                silent = {
                    partition: span
                    for partition, span in unit.sources.spans.items()
                    if (entity, partition) not in heard
                }
                if silent:
                    control.advance(unit.core, silent)
            for outcome in outcomes:
                for view, version, reason in orjson.loads(outcome["failures"] or b"[]"):
                    log.error("view %s is behind: %s", view, reason)
                    control.set_reason(view, version, reason)
        failed = {o["entity"]: o["failure"] for o in outcomes if o["failure"] is not None}
        for unit in units:
            name = unit.core.view
            if unit.core.entity in failed:
                self._stop(name, failed[unit.core.entity])
            elif self._retries.forget(name) or self._has_reason(unit.views):
                self._go_on(name)

    def _has_reason(self, views: EntityViews) -> bool:
        return views.status is not None and views.status.reason is not None

    def _stop(self, view: str, reason: str, pauses_s: tuple[float, ...] = _CORE_RETRY_S) -> None:
        """Let the core of an entity type wait; other entity types go on."""
        pause = self._retries.failed(view, pauses_s)
        again = f"waits and is tried again in {pause:.0f} s" if isfinite(pause) else "stopped"
        log.error("%s %s: %s", view, again, reason)
        with self._database.connected() as connection:
            Control(connection, self._config.views.schema_name).set_reason(view, 1, reason)

    def _go_on(self, view: str) -> None:
        """Note that a core that waited moves again."""
        log.info("%s goes on", view)
        with self._database.connected() as connection:
            Control(connection, self._config.views.schema_name).set_reason(view, 1, None)

    def _say_how_views_are(self, views: EntityViews) -> None:
        """Write how each view is where `everstate status` and `everstate run` show it."""
        rows = [view.row for view in views.views if view.row.published]
        if views.status is not None:
            rows.append(views.status)
        for row in rows:
            BEHIND.labels(row.name).set(int(row.reason is not None))
            if row.reason is None:
                note(f"view {row.name}", Part("running", time.time()))
                continue
            note(f"view {row.name}", Part("waiting", time.time(), row.reason))

    def _blamed(self, units: Sequence[_Unit]) -> bool:
        """Find the views whose SQL fails on these records, and leave them behind.

        The job failed as a whole before anything was told apart; each view is evaluated alone.
        """
        found = False
        for unit in units:
            parsed = self._reader.parsed(unit.core.entity, unit.sources, judged=False)
            for view in unit.riders:
                if view.plan is None:
                    continue
                try:
                    with spark_errors(f"view {view.table.view}"):
                        job = planned(parsed, [(view.plan, view.table)])
                        job.write.format("noop").mode("append").save()
                except PipelineError as blamed:
                    found = True
                    self._retries.failed(view.table.name, _RIDER_RETRY_S)
                    log.error("view %s is behind: %s", view.table.view, blamed)
                    with self._database.connected() as connection:
                        control = Control(connection, self._config.views.schema_name)
                        control.set_reason(view.row.name, view.row.version, str(blamed))
        return found

    def _trim(self, control: Control, kept: Mapping[str, EntityViews]) -> None:
        """Drop what the core noted, once every view and the archive have passed it (V3, V4)."""
        if time.monotonic() - self._trimmed_at < _TRIM_S:
            return
        self._trimmed_at = time.monotonic()
        for entity in kept:
            try:
                below = self._reader.archived(entity)
            except ArchiveError as error:
                log.warning("the exceptions of %s are kept for now: %s", entity, error)
                continue
            for place in control.positions(entity):
                offset = min(below.get(place.partition, 0), place.next_offset)
                below[place.partition] = offset
            if below:
                control.trim(entity, 1, below)


def _place(outcome: Any) -> tuple[str, int]:
    return outcome["entity"], outcome["partition"]
