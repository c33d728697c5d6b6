"""The keeper: reads and parses each changelog once, and lets each core judge its changes.

One step is one Spark job. For each entity type the bounded range after its core's position is read,
parsed and planned into row deltas. Each task judges one partition's range and writes `latest` and
the riders (views at the core's position) in one transaction (C11, C12). Only one line of counts
per partition is returned to the driver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from math import inf, isfinite
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from everstate.config import Config
from everstate.errors import (
    ArchiveError,
    DataLoss,
    EverstateError,
    LogIdentityChanged,
    LogTruncated,
    PipelineError,
    SparkLost,
    TopicResized,
)
from everstate.log.positions import Offsets, Range, check_ends
from everstate.log.topics import TopicIdentity, Topics, check_same_topic
from everstate.parts import Part, note
from everstate.pipeline.keeping.batches import CAREFUL, BatchSizes
from everstate.pipeline.keeping.changes import ChangesReader
from everstate.pipeline.keeping.declare import LATER, declare, retire_left, show_core
from everstate.pipeline.keeping.kept import (
    MEETING_CHANGES,
    EntityViews,
    KeptView,
    KeptViews,
    ViewWorker,
)
from everstate.pipeline.keeping.metrics import (
    STEP_SECONDS,
    VERDICTS,
    ViewReports,
    report_misfits,
    report_verdicts,
)
from everstate.pipeline.keeping.plan import planned
from everstate.pipeline.keeping.spans import Sources
from everstate.pipeline.keeping.task import ApplyTask
from everstate.pipeline.keeping.turns import Turns
from everstate.pipeline.spark.outcomes import OUTCOME, outcomes_of
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.source import fair_spans
from everstate.views.control import LIVE, Control
from everstate.views.models import check_models, model_changes
from everstate.views.project import Project
from everstate.views.stores import view_refusals
from everstate.views.tables import Core, latest_of
from everstate.views.versions import passed_by_all

logger = logging.getLogger(__name__)

_POOL: Final = "keep"
# After a record that is not plain, the next may not be: so many jobs judge record by record.
_CAREFUL_JOBS: Final = 100
_RIDER_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
# Not longer, because each retry moves the partitions that can proceed.
_CORE_RETRY_S: Final = (5.0, 15.0)
_NEVER: Final = (inf,)
_TRIM_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What one step did, over all entity types: the offsets that it passed, and its verdicts."""

    changes: int = 0
    applied: int = 0
    duplicate: int = 0
    held: int = 0
    dead: int = 0

    def __add__(self, other: KeptBatch) -> KeptBatch:
        return KeptBatch(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class _Unit:
    """The next ranges of one entity type's core, and the views that may ride."""

    views: EntityViews
    riders: tuple[KeptView, ...]
    core: Core
    sources: Sources
    careful: bool
    """Whether records are judged one by one; else only ranges of plain records are applied."""

    def cut(self, spans: Mapping[int, Range]) -> _Unit:
        """The same unit, with only these ranges."""
        return replace(self, sources=self.sources.cut(spans))

    @property
    def offsets(self) -> int:
        """How many offsets its ranges have."""
        return sum(map(len, self.sources.spans.values()))


class Keeper(ViewWorker):
    """Keeps the cores of a project, and the views that ride; :meth:`prepare` it, then step or run.

    Two keepers of one project do no harm: the one that moves the position first judges the range
    (C11). They keep the views in the database's registry, so an app that was started earlier keeps
    the views that a later one declared.
    """

    doing = "updating of the views"

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        project: Project,
        *,
        deployment: int | None = None,
        turns: Turns | None = None,
        on_prepared: Callable[[], None] = lambda: None,
    ) -> None:
        """``deployment``: the number of this start of the project; the last declares the views.

        ``turns``: those that it takes with the trailer of the same process. ``on_prepared`` is
        called when tables and positions are there.
        """
        super().__init__(config)
        self.idle_s = config.pipeline.poll_ms / 1000
        self.retry_s = (0.2, config.pipeline.retry_s_max)
        self._on_prepared = on_prepared
        self._spark, self._project = spark, project
        self._deployment, self._turns = deployment, turns or Turns()
        self._topics, self._offsets = Topics(config), Offsets(config)
        self._reader = ChangesReader(spark, config, project, self._offsets)
        self._kept = KeptViews(config, project)
        self._identities: dict[str, TopicIdentity] = {}
        """Entity type → its topic, for those that are kept."""
        self._is_prepared = False
        self._careful_jobs: dict[str, int] = {}
        """Entity type → number of next jobs that judge record by record."""
        self._sizes = BatchSizes(config.pipeline.batch_changes_max)
        self._trimmed_at = 0.0
        self._unshown: set[str] = set()
        """Entity types whose columns for readers are to be replaced; a reader may be in the way."""
        self._reports = ViewReports()

    def close(self) -> None:
        """Close the connections of this thread; the Spark session is the caller's."""
        super().close()
        self._offsets.close()
        self._topics.close()

    def open(self) -> None:
        """Prepare what a run needs, unless that was done; servers that are starting are awaited."""
        if not self._is_prepared:
            self.prepare()
        self._on_prepared()

    def prepare(self) -> None:
        """Create missing topics, tables and positions; idempotent.

        A view that is added when the core has judged changes, that changed in meaning, or that is
        declared again, gets a version that is built beside the one that readers see. An entity type
        that cannot be prepared stops alone, with its reason; the error of the first is raised when
        none is left. Raises InvalidModelChange, LogIdentityChanged, TopicResized, Unavailable.
        """
        self._topics.ensure(self._project.entities)
        with self._database.connected() as control:
            control.install()
            check_models(model_changes(control, self._project))
            later, failed = None, dict[str, Exception]()
            for name in self._project.entities:
                try:
                    with view_refusals():
                        later = self._prepare_one(control, name) or later
                except EverstateError as error:
                    if error.retryable or isinstance(error, SparkLost):
                        raise
                    failed[name] = error
            self._stop_for_good(failed)
            if self._deployment is not None and later is None:
                retire_left(control, self._project, self._deployment)
            self._unshown = self._project.entities.keys() - failed.keys()
            self._show_cores(control)
            report_misfits(control)
            if later is not None:
                note("declarations", Part("waiting", time.time(), LATER.format(later)))
        self._is_prepared = True

    def _prepare_one(self, control: Control, name: str) -> str | None:
        """Prepare one entity type; returns the later deployment that declares the views, if any."""
        topic = self._topics.names.changes(name)
        identity = self._topics.identity(topic)
        control.check_topic_identity(name, topic, identity)
        self._identities[name] = identity
        return declare(
            self._spark,
            self._config,
            control,
            self._project,
            self._project.entities[name],
            range(identity.partitions),
            deployment=self._deployment,
        )

    def _check_identities(self) -> None:
        """Stop the entity types whose topic is another one than that of their positions (C8)."""
        names = {self._topics.names.changes(name): name for name in self._identities}
        failed = dict[str, Exception]()
        for topic, found in self._topics.identities(list(names)).items():
            try:
                check_same_topic(topic, self._identities[names[topic]], found)
            except (LogIdentityChanged, TopicResized) as error:
                failed[names[topic]] = error
        self._stop_for_good(failed)

    def _stop_for_good(self, failed: Mapping[str, Exception]) -> None:
        """Let entity types stop until the next start; raises the first error if none is left."""
        for name in failed:
            self._identities.pop(name, None)
        if failed and not self._identities:
            raise next(iter(failed.values()))
        for name, error in failed.items():
            self._stop(latest_of(name), str(error), _NEVER)
            note(f"view {latest_of(name)}", Part("waiting", time.time(), str(error)))

    def may_pass(self, error: EverstateError) -> bool:
        """Whether a step may succeed later, in the same Spark session."""
        is_of_spark = isinstance(error, PipelineError) and not isinstance(error, SparkLost)
        return error.retryable or is_of_spark

    def step(self) -> KeptBatch | None:
        """Judge the records after the cores' positions; ``None`` when there are none.

        One Spark job, and one more for ranges with a record that is not plain; at most
        ``pipeline.batch_changes_max`` records per entity type. After every error each core is at a
        position up to which all records are judged. Raises LogIdentityChanged, TopicResized,
        Unavailable, PipelineError.

        An entity type whose core cannot proceed waits with its reason and is retried, while other
        entity types continue: records that the log lost at its beginning may be in the archive's
        next commit. An entity type whose log lost its end is not retried by this keeper, because
        the log's next records would hide the loss. A view that fails falls behind; no other does.
        """
        self._check_identities()
        with self._turns.judging(self._project.entities) as free:
            return self._step(free)

    def _step(self, entities: frozenset[str]) -> KeptBatch | None:
        begun = time.monotonic()
        units = self._units(entities)
        if not units:
            return None
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        try:
            return self._run(units)
        except SparkLost:
            raise
        except PipelineError:
            return sum(map(self._keep_alone, units), start=KeptBatch())
        finally:
            STEP_SECONDS.observe(time.monotonic() - begun)

    def _keep_alone(self, unit: _Unit) -> KeptBatch:
        """Judge one entity type's ranges in a job of their own; its core waits if that fails.

        An error of a view's SQL ends no job. Others, such as too little memory, do.
        """
        try:
            return self._run([unit])
        except SparkLost:
            raise
        except PipelineError as error:
            self._sizes.failed(unit.core.entity)
            self._stop(unit.core.view, str(error))
            return KeptBatch()

    def _run(self, units: Sequence[_Unit]) -> KeptBatch:
        """Apply the plain ranges of the units in one job, and judge the others in a second one.

        The second job reads at most `CAREFUL` records of each unit; the next steps continue there.
        """
        outcomes = self._collect(units)
        odd = {(o["entity"], o["partition"]) for o in outcomes if o["unjudged"]}
        plain, careful = [], []
        for unit in units:
            entity, spans = unit.core.entity, unit.sources.spans
            mine = {p: span for p, span in spans.items() if (entity, p) in odd}
            left = self._careful_jobs.get(entity, 0)
            self._careful_jobs[entity] = _CAREFUL_JOBS if mine else max(0, left - 1)
            if len(mine) < len(spans):
                plain.append(unit.cut({p: span for p, span in spans.items() if p not in mine}))
            if mine:
                starts = {p: span.start for p, span in mine.items()}
                ends = {p: span.end for p, span in mine.items()}
                few = unit.cut(fair_spans(starts, ends, CAREFUL))
                careful.append(replace(few, careful=True))
        done = self._settled(plain, [o for o in outcomes if not o["unjudged"]])
        return done + self._settled(careful, self._collect(careful)) if careful else done

    def _collect(self, units: Sequence[_Unit]) -> list[Any]:
        begun = time.monotonic()
        with spark_errors("keeping views"):
            outcomes = outcomes_of(reduce(DataFrame.unionAll, map(self._job, units)))
        seconds = time.monotonic() - begun
        for unit in units:
            entity = unit.core.entity
            held = sum(o["bytes"] for o in outcomes if o["entity"] == entity)
            self._sizes.took(entity, unit.offsets, held, seconds)
        return outcomes

    def _units(self, entities: frozenset[str]) -> list[_Unit]:
        """The units of some entity types, from the stored positions and the log's stable ends."""
        ends = self._offsets.stable_ends(list(map(self._topics.names.changes, self._identities)))
        with self._database.connected() as control:
            kept = self._kept.read(control)
            self._trim(control, kept)
            self._show_cores(control)
            there = control.readable([row.name for views in kept.values() for row in views.rows])
        until = {
            name: {
                p: end for (of, p), end in ends.items() if of == self._topics.names.changes(name)
            }
            for name in kept
        }
        self._reports.report(kept, until, there)
        units = []
        for name, views in kept.items():
            if name not in entities or not self._retries.is_due(latest_of(name)):
                continue
            try:
                unit = self._unit(views, self._topics.names.changes(name), until[name])
            except (DataLoss, ArchiveError) as error:
                lost_its_end = isinstance(error, LogTruncated)
                self._stop(latest_of(name), str(error), _NEVER if lost_its_end else _CORE_RETRY_S)
                continue
            if unit is not None:
                units.append(unit)
            elif self._retries.forget(latest_of(name)) or self._has_error(views):
                self._go_on(latest_of(name), "has nothing to wait for any more")
        return units

    def _unit(self, views: EntityViews, topic: str, until: Mapping[int, int]) -> _Unit | None:
        """The next ranges of one entity type's core; ``None``: there is nothing new."""
        check_ends(f"the views of {views.entity}", topic, views.vector, until)
        careful = self._careful_jobs.get(views.entity, 0) > 0
        size = self._sizes.next(views.entity, careful=careful)
        spans = fair_spans(views.vector, until, size)
        if not spans:
            return None
        riders = tuple(
            view
            for view in views.views
            if view.plan.rides
            # Without a view that lags, Spark would compile another plan, and all would wait.
            and (_lagging(view) or any(_may_ride(view, p, r.start) for p, r in spans.items()))
            and self._retries.is_due(view.table.name)
        )
        sources = self._reader.sources(views.entity, topic, spans)
        return _Unit(views, riders, self._kept.core(views, riders), sources, careful)

    def _job(self, unit: _Unit) -> DataFrame:
        """The part of the step's job for one entity type; gives one outcome row per partition."""
        config, entity = self._config, unit.core.entity
        schema = config.views.schema_name
        spans, careful = dict(unit.sources.spans), unit.careful
        task = ApplyTask(config.views_dsn, schema, unit.core, spans, judged=careful)
        parsed = self._reader.parsed(entity, unit.sources, judged=careful, headers=careful)
        views = [(view.plan, view.table) for view in unit.riders]
        return planned(parsed, views, caught=True).mapInArrow(task, OUTCOME)

    def _settled(self, units: Sequence[_Unit], outcomes: Sequence[Any]) -> KeptBatch:
        """Advance partitions without records, and store which core or rider is behind, and why."""
        answered = {(o["entity"], o["partition"]) for o in outcomes}
        with self._database.connected() as control:
            for unit in units:
                entity = unit.core.entity
                silent = {
                    partition: span
                    for partition, span in unit.sources.spans.items()
                    if (entity, partition) not in answered
                }
                if silent:
                    control.advance(unit.core, silent)
            riders = {
                (unit.core.entity, v.row.name, v.row.version): v
                for unit in units
                for v in unit.riders
            }
            starts = {unit.core.entity: unit.sources.spans for unit in units}
            for outcome in outcomes:
                entity, partition = outcome["entity"], outcome["partition"]
                for name, version, reason in outcome["failures"]:
                    view = riders[entity, name, version]
                    # One that lags already is retried by the trailer, which knows its last reason.
                    if _may_ride(view, partition, starts[entity][partition].start):
                        logger.error("view %s lags: %s", name, reason)
                        control.record(name, version, error=reason)
            if any(unit.careful for unit in units):
                report_misfits(control)
        failed = {o["entity"]: o["failure"] for o in outcomes if o["failure"] is not None}
        for unit in units:
            name = unit.core.view
            if unit.core.entity in failed:
                self._stop(name, failed[unit.core.entity])
            elif self._retries.forget(name) or self._has_error(unit.views):
                self._go_on(name, "makes progress again")
        report_verdicts(outcomes)
        verdicts = (sum(outcome[name] for outcome in outcomes) for name in VERDICTS)
        return KeptBatch(sum(unit.offsets for unit in units), *verdicts)

    def _has_error(self, views: EntityViews) -> bool:
        return views.status is not None and views.status.error is not None

    def _stop(self, view: str, reason: str, pauses_s: tuple[float, ...] = _CORE_RETRY_S) -> None:
        """Let the core of an entity type wait; other entity types continue."""
        pause = self._retries.failed(view, pauses_s)
        again = f"waits and is retried in {pause:.0f} s" if isfinite(pause) else "stopped"
        logger.error("%s %s: %s", view, again, reason)
        with self._database.connected() as control:
            control.record(view, 1, error=reason)

    def _go_on(self, view: str, how: str) -> None:
        """Clear the error of a core that waited and moves again, or has no record to judge."""
        logger.info("%s %s", view, how)
        with self._database.connected() as control:
            control.record(view, 1, error=None)

    def _show_cores(self, control: Control) -> None:
        """Let readers see `latest` in the columns of the models; again later where they wait."""
        for name in sorted(self._unshown):
            trying = f"showing {name}"
            if not self._retries.is_due(trying):
                continue
            if show_core(control, self._project.entities[name]):
                self._unshown.discard(name)
            else:
                self._retries.failed(trying, _RIDER_RETRY_S)

    def _trim(self, control: Control, kept: Mapping[str, EntityViews]) -> None:
        """Delete the bytes of held changes that every view and the archive have passed (V3, V4)."""
        if time.monotonic() - self._trimmed_at < _TRIM_S:
            return
        self._trimmed_at = time.monotonic()
        for entity in kept:
            try:
                below = self._reader.archived(entity)
            except ArchiveError as error:
                logger.warning("bytes of held changes of %s cannot be deleted: %s", entity, error)
                continue
            with control.installing(waits=False) as is_alone:
                if not is_alone:
                    return  # the core waits for no start and no command: it trims later
                # A version whose build begins meanwhile needs the bytes after its vector.
                places = ({p.partition: p.next_offset} for p in control.positions(entity))
                if below := passed_by_all(below, places):
                    control.trim(entity, 1, below)


def _may_ride(view: KeptView, partition: int, start: int) -> bool:
    """Whether a view may have reached a range's start when the range is written.

    A view that is a short step behind may catch up while the job runs. Were it not planned, each
    job would leave it behind again, for as long as one job follows the other.
    """
    position = view.vector.get(partition)
    if position is None or _lagging(view):
        return position == start
    return 0 <= start - position <= MEETING_CHANGES


def _lagging(view: KeptView) -> bool:
    return view.row.status == LIVE and view.row.error is not None
