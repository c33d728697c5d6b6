"""The keeper: reads each changelog once, parses once, and gives every view group its part.

One step is one Spark job. For each entity type the bounded range after its groups' positions is
read, parsed and planned into row deltas, and each task applies one partition's range to each group
in one transaction of that group (C11, C12). Only one line of counts per partition and group comes
back to the driver.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame, SparkSession

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, PipelineError, SparkLost
from everstate.log.positions import Offsets, Range
from everstate.log.topics import TopicIdentity, Topics
from everstate.pipeline.archived import read_archived
from everstate.pipeline.parse import parse
from everstate.pipeline.plan import column_types, planned
from everstate.pipeline.session import spark_errors
from everstate.pipeline.source import fair_spans, read_ranges
from everstate.pipeline.spans import ArchivedOffsets, Sources, divided
from everstate.pipeline.task import OUTCOME_DDL, UNJUDGED, ApplyTask
from everstate.pipeline.units import (
    Stored,
    Unit,
    check_same_views,
    kept_rows,
    only_view,
    read_stored,
    view_groups,
)
from everstate.views import control
from everstate.views.database import connect_views, views_errors
from everstate.views.project import Project
from everstate.views.stores.postgres.apply import advance
from everstate.views.stores.postgres.group import (
    GroupPlan,
    PlannedView,
    main_group,
    own_group,
)
from everstate.views.stores.postgres.membership import register_views
from everstate.views.stores.postgres.quarantine import quarantine, rejoin
from everstate.views.stores.postgres.session import close as close_session
from everstate.views.stores.postgres.tables import install, install_entity

log = logging.getLogger(__name__)

_POOL: Final = "keep"
_RETRY_S_MIN: Final = 0.2
# A task costs 0.1 s of a core before its first change: a small batch is read by few.
_TASK_CHANGES: Final = 5_000
_TASK_PARTITIONS: Final = 4
# Where one record needed the rules, the next may: so many jobs are planned with them.
_JUDGED_JOBS: Final = 100
_ARCHIVE_SPARE_S: Final = 15.0
_QUARANTINE_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
# Not longer: at each try the partitions that can go on do.
_STOPPED_RETRY_S: Final = (5.0, 15.0)


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What one step did, over all entity types and groups."""

    changes: int
    applied: int
    duplicate: int
    held: int
    dead: int
    seconds: float


@dataclass(slots=True)
class _Retry:
    """When a view that was put aside, or a stopped group, is tried again."""

    failures: int = 0
    due: float = field(default=0.0)


class Keeper:
    """Keeps all views of a project in PostgreSQL; :meth:`prepare` it, then :meth:`step` or run.

    Two keepers of one project do no harm: each range is applied by the one that moves the
    position first (C11). One whose project declares other views ends the older one.
    """

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._schema = config.views.schema_name
        self._topics, self._offsets = Topics(config), Offsets(config)
        self._archived = ArchivedOffsets(config)
        self._views = {
            name: tuple(PlannedView(plan) for plan in project.views.values() if plan.entity == name)
            for name in project.entities
        }
        self._identities: dict[str, TopicIdentity] = {}
        self._retries: dict[str, _Retry] = {}
        self._stopped: set[str] = set()
        self._judged_jobs: dict[str, int] = {}
        """Entity types whose next jobs judge each record by the rules, and how many."""
        self._database: psycopg.Connection[Any] | None = None

    def close(self) -> None:
        """Give up the connections of this thread; the Spark session is the caller's."""
        close_session(self._config.views_dsn)
        if self._database is not None:
            self._database.close()
        self._offsets.close()
        self._topics.close()

    def prepare(self) -> None:
        """Make topics, tables and positions where they are missing; idempotent.

        A view that is new beside kept ones, or comes back after it was left out, starts alone at
        version 1 and joins when it has caught up (C15). Raises InvalidView, LogIdentityChanged,
        Unavailable.
        """
        self._topics.ensure(self._project.entities)
        with self._connected() as connection:
            control.install(connection, self._schema)
            for name, entity_type in self._project.entities.items():
                topic = self._topics.names.changes(name)
                identity = self._topics.identity(topic)
                control.check_topic_identity(
                    connection, self._schema, topic, identity.cluster_id, identity.topic_id
                )
                self._identities[topic] = identity
                self._open(connection, entity_type, range(self._topics.partitions(topic)))

    def _open(
        self, connection: psycopg.Connection[Any], entity_type: EntityType, partitions: range
    ) -> None:
        """Make the tables of an entity type's views and register them, in one transaction."""
        name, views = entity_type.name, self._views[entity_type.name]
        types = [column_types(self._spark, entity_type, view.plan) for view in views]
        with connection.transaction():
            install_entity(connection, self._schema, entity_type)
            for view, columns in zip(views, types, strict=True):
                install(connection, self._schema, view.plan, columns, view.version)
            wanted = kept_rows(self._project, name, views)
            register_views(connection, self._schema, name, wanted, dict.fromkeys(partitions, 0))

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set; what may pass by itself is told and tried again.

        What the log lost may be in the archive's next commit: DataLoss is raised when it is
        there for longer than a trigger of the archive.
        """
        pause, poll_s = _RETRY_S_MIN, self._config.pipeline.poll_ms / 1000
        lost_since: float | None = None
        try:
            while not stop.is_set():
                try:
                    if self.step() is None:
                        stop.wait(poll_s)
                    pause, lost_since = _RETRY_S_MIN, None
                except EverstateError as error:
                    if isinstance(error, DataLoss):
                        lost_since = lost_since or time.monotonic()
                        waited_s = time.monotonic() - lost_since
                        if waited_s > self._config.archive.trigger_s + _ARCHIVE_SPARE_S:
                            raise
                    elif isinstance(error, SparkLost):
                        raise
                    elif not error.retryable and not isinstance(error, PipelineError):
                        raise
                    log.warning("the keeper waits %.1f s: %s", pause, error)
                    stop.wait(pause)
                    pause = min(2 * pause, self._config.pipeline.retry_s_max)
        finally:
            close_session(self._config.views_dsn)

    def step(self) -> KeptBatch | None:
        """Apply what came since the positions; ``None`` when there is nothing to do.

        One Spark job, and one more for each view that is kept alone; at most
        ``pipeline.batch_changes_max`` records an entity type in each. After every error each group
        is at its position or past the whole range, never between. Raises DataLoss,
        LogIdentityChanged, Unavailable, PipelineError, and Fenced when a keeper of other views was
        prepared since. A group that cannot go on is stopped, and tried again, alone.
        """
        begun = time.monotonic()
        self._topics.check_identity(self._identities)
        units = self._units()
        if not units:
            return None
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        outcomes = self._keep_together([unit for unit in units if not unit.alone])
        for unit in units:
            if unit.alone:
                outcomes += self._keep_alone(unit)
        main = [o for o in outcomes if o["view_group"] == o["entity"]]
        return KeptBatch(
            changes=sum(len(span) for unit in units for span in unit.spans.values()),
            applied=sum(o["applied"] for o in main),
            duplicate=sum(o["duplicate"] for o in main),
            held=sum(o["held"] for o in main),
            dead=sum(o["dead"] for o in main),
            seconds=time.monotonic() - begun,
        )

    def _keep_together(self, units: Sequence[Unit]) -> list[Any]:
        """Apply the main groups' ranges in one job; lines of outcome."""
        if not units:
            return []
        try:
            outcomes = self._run(units)
        except SparkLost:
            raise
        except PipelineError:
            if self._quarantine_blamed(units):
                raise
            return self._keep_each(units)
        self._settle(units, outcomes)
        return outcomes

    def _keep_each(self, units: Sequence[Unit]) -> list[Any]:
        """Apply each main group's ranges in a job of its own; what fails stops alone."""
        outcomes = []
        for unit in units:
            try:
                found = self._run([unit])
            except SparkLost:
                raise
            except PipelineError as error:
                self._stop(unit.group.view_group, str(error))
                continue
            self._settle([unit], found)
            outcomes += found
        return outcomes

    def _keep_alone(self, unit: Unit) -> list[Any]:
        """Apply the range of views that are kept alone; their trouble is theirs only."""
        try:
            outcomes = self._run([unit])
        except SparkLost:
            raise
        except PipelineError as error:
            self._quarantine(unit.group.entity, only_view(unit.group), str(error))
            return []
        self._settle([unit], outcomes)
        return outcomes

    def _run(self, units: Sequence[Unit]) -> list[Any]:
        """Apply the units' ranges in one job; in one more where records must be judged."""
        for entity in {unit.entity_type.name for unit in units}:
            self._judged_jobs[entity] = max(0, self._judged_jobs.get(entity, 0) - 1)
        outcomes = self._collect(units)
        left = {_place(outcome) for outcome in outcomes if outcome["unjudged"]}
        if not left:
            return outcomes
        self._judged_jobs |= dict.fromkeys((entity for entity, _, _ in left), _JUDGED_JOBS)
        view_groups = {view_group for _, view_group, _ in left}
        again = self._collect([each for each in units if each.group.view_group in view_groups])
        return [
            *(outcome for outcome in outcomes if _place(outcome) not in left),
            *(outcome for outcome in again if _place(outcome) in left),
        ]

    def _collect(self, units: Sequence[Unit]) -> list[Any]:
        with spark_errors("keeping views"):
            return list(reduce(DataFrame.unionAll, map(self._job, units)).collect())

    def _units(self) -> list[Unit]:
        """What there is to read, from the stored positions and the log's stable ends."""
        ends = self._offsets.stable_ends(list(self._identities))
        with self._connected() as connection:
            stored = read_stored(connection, self._schema)
            if self._rejoin(connection, stored):
                stored = read_stored(connection, self._schema)
        self._stopped = stored.stopped
        units = []
        for name, entity_type in self._project.entities.items():
            topic, views = self._topics.names.changes(name), self._views[name]
            check_same_views(stored, name, kept_rows(self._project, name, views))
            until = {partition: end for (of, partition), end in ends.items() if of == topic}
            for group in view_groups(
                self._config, self._project, entity_type, views, topic, stored
            ):
                retry = self._retries.get(group.view_group)
                if retry is not None and retry.due > time.monotonic():
                    continue
                unit = self._unit(entity_type, topic, group, stored, until)
                if unit is not None:
                    units.append(unit)
        return units

    def _unit(
        self,
        entity_type: EntityType,
        topic: str,
        group: GroupPlan,
        stored: Stored,
        until: Mapping[int, int],
    ) -> Unit | None:
        """What a group reads next; ``None`` when it is where it may go, or was put aside."""
        name = entity_type.name
        alone = group.view_group != main_group(name)
        if alone:
            # It reads as far as the main group is, so that both meet there.
            main = stored.vectors[main_group(name)]
            until = {p: min(end, main[p]) for p, end in until.items()}
        vector = stored.vectors[group.view_group]
        spans = fair_spans(vector, until, self._config.pipeline.batch_changes_max)
        if not spans:
            return None
        try:
            return Unit(entity_type, topic, group, self._sources(name, topic, spans), alone)
        except DataLoss as error:
            if not alone:
                raise
            self._quarantine(name, only_view(group), str(error))
            return None

    def _rejoin(self, connection: psycopg.Connection[Any], stored: Stored) -> bool:
        """Let views that are as far as the main group, and hold nothing back, join it again."""
        joined = False
        for row in stored.views.values():
            alone = row.status != control.LEFT and row.view_group != main_group(row.entity)
            if not alone or row.entity not in self._project.entities:
                continue
            if row.view_group in self._retries:
                continue  # it has to take the change that it failed on first
            if stored.vectors[row.view_group] == stored.vectors[main_group(row.entity)]:
                joined |= rejoin(connection, self._schema, row.entity, row.name)
        return joined

    def _sources(self, entity: str, topic: str, spans: Mapping[int, Range]) -> Sources:
        """Where to read the spans; the archive is asked only when the log begins too late."""
        begins = {p: offset for (_, p), offset in self._offsets.beginnings([topic]).items()}
        if all(span.start >= begins[partition] for partition, span in spans.items()):
            return Sources(log=spans)
        return divided(topic, spans, begins, self._archived.of(entity))

    def _job(self, unit: Unit) -> DataFrame:
        """The part of the step's job for one unit: a line of outcome per partition and group."""
        # Only views of this unit: one that is put aside must not fail the others' job.
        task = ApplyTask(self._config.views_dsn, unit.group, dict(unit.spans))
        return planned(self._parsed(unit), self._views_of(unit)).mapInArrow(task, OUTCOME_DDL)

    def _parsed(self, unit: Unit) -> DataFrame:
        parts = []
        if spans := unit.sources.log:
            records = read_ranges(self._spark, self._config, {unit.topic: spans})
            tasks = max(
                math.ceil(len(spans) / _TASK_PARTITIONS),
                math.ceil(sum(map(len, spans.values())) / _TASK_CHANGES),
            )
            judged = self._judged_jobs.get(unit.entity_type.name, 0) > 0
            records = records.coalesce(tasks)
            parts.append(parse(records, unit.entity_type, unjudged=None if judged else UNJUDGED))
        if spans := unit.sources.archive:
            parts.append(read_archived(self._spark, self._config, unit.entity_type, spans))
        # An archive that was written before a field came has no column of it.
        return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts)

    def _settle(self, units: Sequence[Unit], outcomes: Sequence[Any]) -> None:
        """Advance where no record came, and put views that failed aside."""
        heard = {(o["view_group"], o["partition"]) for o in outcomes}
        for unit in units:
            silent = {
                partition: span
                for partition, span in unit.spans.items()
                if (unit.group.view_group, partition) not in heard
            }
            advance(self._config.views_dsn, unit.group, silent)
        failed = {o["failed_view"]: o for o in outcomes if o["failed_view"] is not None}
        for view, outcome in failed.items():
            self._quarantine(outcome["entity"], view, outcome["failure"])
        fallen = [o for o in outcomes if o["failed_view"] is None and o["failure"] is not None]
        stuck = {outcome["view_group"]: outcome for outcome in fallen}
        for view_group, outcome in stuck.items():
            if view_group == main_group(outcome["entity"]):
                self._stop(view_group, outcome["failure"])
            else:
                view = view_group.rpartition("/")[2]
                self._quarantine(outcome["entity"], view, outcome["failure"])
        # Who lost a race did not take the change that it failed on: that is tried again.
        idle = {o["view_group"] for o in outcomes if o["failure"] is not None or o["moved"]}
        for unit in units:
            if unit.group.view_group not in idle:
                self._retries.pop(unit.group.view_group, None)
                self._go_on(unit.group.view_group)

    def _pause(self, view_group: str, pauses_s: Sequence[float]) -> float:
        """When a group is tried again; seconds from now, more after each failure."""
        retry = self._retries.setdefault(view_group, _Retry())
        pause = pauses_s[min(retry.failures, len(pauses_s) - 1)]
        retry.failures, retry.due = retry.failures + 1, time.monotonic() + pause
        return pause

    def _stop(self, view_group: str, reason: str) -> None:
        """Let the main group of an entity type wait; other entity types go on."""
        pause = self._pause(view_group, _STOPPED_RETRY_S)
        log.error("%s is stopped and tried again in %.0f s: %s", view_group, pause, reason)
        with self._connected() as connection:
            control.set_group_status(connection, self._schema, view_group, control.STOPPED, reason)

    def _go_on(self, view_group: str) -> None:
        """Note that a main group that was stopped moves again."""
        if view_group not in self._stopped:
            return
        log.info("%s goes on", view_group)
        with self._connected() as connection:
            control.set_group_status(connection, self._schema, view_group, "live", None)

    def _quarantine(self, entity: str, view: str, reason: str) -> None:
        """Keep a failing view alone, at its own position; it is tried again with growing pauses."""
        pause = self._pause(own_group(entity, view), _QUARANTINE_RETRY_S)
        log.error("view %s is quarantined and tried again in %.0f s: %s", view, pause, reason)
        with self._connected() as connection:
            quarantine(connection, self._schema, entity, view, reason)

    def _quarantine_blamed(self, units: Sequence[Unit]) -> bool:
        """Find the views whose SQL fails on these records, and put them aside; whether any does.

        The job failed as a whole before anything was told apart; each view is evaluated alone.
        """
        found = False
        for unit in units:
            parsed = self._parsed(unit)
            for view in self._views_of(unit):
                try:
                    with spark_errors(f"view {view.plan.name}"):
                        planned(parsed, [view]).write.format("noop").mode("append").save()
                except PipelineError as blamed:
                    found = True
                    self._quarantine(unit.entity_type.name, view.plan.name, str(blamed))
        return found

    def _views_of(self, unit: Unit) -> list[PlannedView]:
        kept = {t.view for t in unit.group.rows} | {t.view for t in unit.group.linears}
        return [v for v in self._views[unit.entity_type.name] if v.plan.name in kept]

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """The driver's own connection, made again after it was lost."""
        dsn = self._config.views_dsn
        with views_errors(dsn):
            try:
                if self._database is None or self._database.closed:
                    self._database = connect_views(dsn)
                yield self._database
            except psycopg.OperationalError:
                if self._database is not None:
                    self._database.close()
                raise


def _place(outcome: Any) -> tuple[str, str, int]:
    return outcome["entity"], outcome["view_group"], outcome["partition"]
