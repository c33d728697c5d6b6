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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame, SparkSession

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, HeldOverflow, PipelineError, Unavailable
from everstate.log.positions import Offsets, Range
from everstate.log.topics import TopicIdentity, Topics
from everstate.pipeline.archived import archived_spans, read_archived
from everstate.pipeline.parse import parse
from everstate.pipeline.plan import column_types, planned
from everstate.pipeline.session import spark_errors
from everstate.pipeline.source import fair_spans, read_ranges
from everstate.pipeline.task import OUTCOME_DDL, ApplyTask
from everstate.telemetry import without_secret
from everstate.views import control
from everstate.views.project import Project, kept_always
from everstate.views.stores.postgres.apply import advance
from everstate.views.stores.postgres.group import (
    GroupPlan,
    PlannedView,
    group_plan,
    main_group,
    own_group,
    planned_fingerprint,
)
from everstate.views.stores.postgres.quarantine import quarantine, rejoin, start_alone
from everstate.views.stores.postgres.session import close as close_session
from everstate.views.stores.postgres.tables import install, install_entity

log = logging.getLogger(__name__)

_POOL: Final = "keep"
_RETRY_S_MIN: Final = 0.2
# What an operator mends while the keeper goes on with everything else.
_WAITED_FOR: Final = (PipelineError, HeldOverflow)
# A task costs 0.1 s of a core before its first change: a small batch is read by few.
_TASK_CHANGES: Final = 5_000
_TASK_PARTITIONS: Final = 4
_QUARANTINE_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What one step did, over all entity types and groups."""

    changes: int
    applied: int
    duplicate: int
    held: int
    dead: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Unit:
    """One read: a view group and the ranges after its position."""

    entity_type: EntityType
    topic: str
    group: GroupPlan
    spans: Mapping[int, Range]
    alone: bool
    """Whether it is a view's own group."""
    archived: bool
    """Whether the log no longer holds the start of a span, so that the archive is read."""


@dataclass(slots=True)
class _Stored:
    """What the database says: views, and each group's position vector and epoch."""

    views: Mapping[str, control.ViewRow]
    vectors: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    epochs: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Retry:
    """When a quarantined view is tried again."""

    failures: int = 0
    due: float = field(default=0.0)


class Keeper:
    """Keeps all views of a project in PostgreSQL; :meth:`prepare` it, then :meth:`step` or run.

    Two keepers of one project do no harm: each range is applied by the one that moves the
    position first (C11).
    """

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._schema = config.views.schema_name
        self._topics, self._offsets = Topics(config), Offsets(config)
        self._views = {
            name: tuple(
                PlannedView(plan, number)
                for number, plan in enumerate(
                    plan for plan in project.views.values() if plan.entity == name
                )
            )
            for name in project.entities
        }
        self._identities: dict[str, TopicIdentity] = {}
        self._retries: dict[str, _Retry] = {}
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

        A view that is new beside kept ones starts alone at version 1 and joins when it has caught
        up (C15). Raises InvalidView, LogIdentityChanged, Unavailable.
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
                install_entity(connection, self._schema, entity_type)
                partitions = range(self._topics.partitions(topic))
                begin = dict.fromkeys(partitions, 0)
                control.init_positions(connection, self._schema, main_group(name), name, begin)
                for kept in kept_always(self._project, name):
                    own = f"{name}_{kept}"
                    row = control.ViewRow(own, name, 1, main_group(name), {"keeps": kept}, kept)
                    control.register_view(connection, self._schema, row)
                for view in self._views[name]:
                    self._open_view(connection, entity_type, view, begin)

    def _open_view(
        self,
        connection: psycopg.Connection[Any],
        entity_type: EntityType,
        view: PlannedView,
        begin: Mapping[int, int],
    ) -> None:
        """Install and register a view; beside kept changes a new one starts alone (C15)."""
        plan, entity = view.plan, entity_type.name
        install(connection, self._schema, plan, column_types(self._spark, entity_type, plan))
        known = control.views(connection, self._schema, plan.name)
        row = control.ViewRow(
            plan.name, entity, view.version, main_group(entity), {"sql": plan.sql}, plan.fingerprint
        )
        control.register_view(connection, self._schema, row)
        main = control.positions(connection, self._schema, main_group(entity))
        if not known and any(position.next_offset > 0 for position in main):
            start_alone(connection, self._schema, entity, plan.name, begin)
            log.info("view %s is new: it catches up alone, then joins", plan.name)

    def run(self, stop: threading.Event) -> None:
        """Step until ``stop`` is set; what may pass by itself is told and tried again."""
        pause, poll_s = _RETRY_S_MIN, self._config.pipeline.poll_ms / 1000
        try:
            while not stop.is_set():
                try:
                    if self.step() is None:
                        stop.wait(poll_s)
                    pause = _RETRY_S_MIN
                except EverstateError as error:
                    if not error.retryable and not isinstance(error, _WAITED_FOR):
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
        LogIdentityChanged, Unavailable, PipelineError, and HeldOverflow (all else was
        applied).
        """
        begun = time.monotonic()
        self._topics.check_identity(self._identities)
        units = self._units()
        if not units:
            return None
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        outcomes = self._keep_together([unit for unit in units if not unit.alone])
        overflow = self._overflow(outcomes)
        for unit in units:
            if unit.alone:
                outcomes += self._keep_alone(unit)
        if overflow is not None:
            raise overflow
        main = [o for o in outcomes if o["view_group"] == o["entity"]]
        return KeptBatch(
            changes=sum(len(span) for unit in units for span in unit.spans.values()),
            applied=sum(o["applied"] for o in main),
            duplicate=sum(o["duplicate"] for o in main),
            held=sum(o["held"] for o in main),
            dead=sum(o["dead"] for o in main),
            seconds=time.monotonic() - begun,
        )

    def _keep_together(self, units: Sequence[_Unit]) -> list[Any]:
        """Apply the main groups' ranges in one job; lines of outcome."""
        if not units:
            return []
        try:
            outcomes = self._run(units)
        except PipelineError:
            self._quarantine_blamed(units)
            raise
        self._settle(units, outcomes)
        return outcomes

    def _keep_alone(self, unit: _Unit) -> list[Any]:
        """Apply the range of views that are kept alone; their trouble is theirs only."""
        try:
            outcomes = self._run([unit])
        except PipelineError as error:
            self._quarantine(unit.group.entity, _only_view(unit.group), str(error))
            return []
        self._settle([unit], outcomes)
        overflow = self._overflow(outcomes)
        if overflow is not None:
            self._quarantine(unit.group.entity, _only_view(unit.group), str(overflow))
        return outcomes

    def _run(self, units: Sequence[_Unit]) -> list[Any]:
        with spark_errors("keeping views"):
            return list(reduce(DataFrame.unionAll, map(self._job, units)).collect())

    def _units(self) -> list[_Unit]:
        """What there is to read, from the stored positions and the log's stable ends."""
        ends = self._offsets.stable_ends(list(self._identities))
        with self._connected() as connection:
            stored = self._stored(connection)
            if self._rejoin(connection, stored):
                stored = self._stored(connection)
        units = []
        for name, entity_type in self._project.entities.items():
            topic = self._topics.names.changes(name)
            until = {partition: end for (of, partition), end in ends.items() if of == topic}
            for group in self._groups(entity_type, topic, stored):
                retry = self._retries.get(group.view_group)
                if retry is not None and retry.due > time.monotonic():
                    continue
                limit, alone = until, group.view_group != main_group(name)
                if alone:
                    # It reads as far as the main group is, so that both meet there.
                    main = stored.vectors[main_group(name)]
                    limit = {p: min(end, main[p]) for p, end in until.items()}
                vector = stored.vectors[group.view_group]
                spans = fair_spans(vector, limit, self._config.pipeline.batch_changes_max)
                if not spans:
                    continue
                try:
                    archived = self._archived(entity_type, topic, spans)
                except DataLoss as error:
                    if not alone:
                        raise
                    self._quarantine(name, _only_view(group), str(error))
                    continue
                read = spans if archived is None else archived
                units.append(_Unit(entity_type, topic, group, read, alone, archived is not None))
        return units

    def _stored(self, connection: psycopg.Connection[Any]) -> _Stored:
        """Positions and views as the database has them now."""
        stored = _Stored({row.name: row for row in control.views(connection, self._schema)})
        for row in control.positions(connection, self._schema):
            stored.vectors[row.view_group][row.partition] = row.next_offset
            stored.epochs[row.view_group] = row.epoch
        return stored

    def _groups(self, entity_type: EntityType, topic: str, stored: _Stored) -> list[GroupPlan]:
        """The main group of an entity type, then each view that is kept alone."""
        name, planned_views = entity_type.name, self._views[entity_type.name]
        group_of = {v.plan.name: stored.views[v.plan.name].view_group for v in planned_views}

        def make(views: Sequence[PlannedView], alone: str | None) -> GroupPlan:
            view_group = main_group(name) if alone is None else own_group(name, alone)
            return group_plan(
                entity_type,
                views,
                topic=topic,
                schema_name=self._schema,
                fingerprint=planned_fingerprint(entity_type, planned_views),
                alone=alone,
                history=self._project.keeps_history(name),
                epoch=stored.epochs[view_group],
                held_max=self._config.pipeline.held_max,
            )

        together = [v for v in planned_views if group_of[v.plan.name] == main_group(name)]
        others = [v for v in planned_views if group_of[v.plan.name] != main_group(name)]
        return [make(together, None), *(make([view], view.plan.name) for view in others)]

    def _rejoin(self, connection: psycopg.Connection[Any], stored: _Stored) -> bool:
        """Let views that are as far as the main group, and hold nothing back, join it again."""
        joined = False
        for row in stored.views.values():
            if row.view_group == main_group(row.entity) or row.name not in self._project.views:
                continue
            if row.view_group in self._retries:
                continue  # it has to take the change that it failed on first
            if stored.vectors[row.view_group] == stored.vectors[main_group(row.entity)]:
                joined |= rejoin(connection, self._schema, row.entity, row.name)
        return joined

    def _archived(
        self, entity_type: EntityType, topic: str, spans: Mapping[int, Range]
    ) -> Mapping[int, Range] | None:
        """The part of these spans to read from the archive; ``None``: the log has all of them."""
        found = self._offsets.beginnings([topic])
        begins = {partition: begin for (_, partition), begin in found.items()}
        if all(span.start >= begins[partition] for partition, span in spans.items()):
            return None
        return archived_spans(self._config, entity_type.name, spans, begins)

    def _job(self, unit: _Unit) -> DataFrame:
        """The part of the step's job for one unit: a line of outcome per partition and group."""
        # Only views of this unit: one that is put aside must not fail the others' job.
        kept = {t.view for t in unit.group.rows} | {t.view for t in unit.group.linears}
        views = [v for v in self._views[unit.entity_type.name] if v.plan.name in kept]
        task = ApplyTask(self._config.views_dsn, unit.group, dict(unit.spans))
        return planned(self._parsed(unit), views).mapInArrow(task, OUTCOME_DDL)

    def _parsed(self, unit: _Unit) -> DataFrame:
        if unit.archived:
            return read_archived(self._spark, self._config, unit.entity_type, unit.spans)
        records = read_ranges(self._spark, self._config, {unit.topic: unit.spans})
        tasks = max(
            math.ceil(len(unit.spans) / _TASK_PARTITIONS),
            math.ceil(sum(map(len, unit.spans.values())) / _TASK_CHANGES),
        )
        return parse(records.coalesce(tasks), unit.entity_type)

    def _settle(self, units: Sequence[_Unit], outcomes: Sequence[Any]) -> None:
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
        for outcome in outcomes:
            trouble = outcome["failed_view"] is not None or outcome["held_over"] is not None
            if not trouble and outcome["view_group"] not in failed:
                self._retries.pop(outcome["view_group"], None)

    def _overflow(self, outcomes: Sequence[Any]) -> HeldOverflow | None:
        """The error of a partition that would hold more than it may; it changed nothing."""
        for outcome in outcomes:
            if outcome["held_over"] is not None:
                limit = self._config.pipeline.held_max
                return HeldOverflow(outcome["view_group"], outcome["held_over"], limit)
        return None

    def _quarantine(self, entity: str, view: str, reason: str) -> None:
        """Keep a failing view alone, at its own position; it is tried again with growing pauses."""
        retry = self._retries.setdefault(own_group(entity, view), _Retry())
        pause = _QUARANTINE_RETRY_S[min(retry.failures, len(_QUARANTINE_RETRY_S) - 1)]
        retry.failures, retry.due = retry.failures + 1, time.monotonic() + pause
        log.error("view %s is quarantined and tried again in %.0f s: %s", view, pause, reason)
        with self._connected() as connection:
            quarantine(connection, self._schema, entity, view, reason)

    def _quarantine_blamed(self, units: Sequence[_Unit]) -> None:
        """Find the views whose SQL fails on these records, and put them aside.

        The job failed as a whole before anything was told apart; each view is evaluated alone.
        Nothing found: the caller's error stands.
        """
        for unit in units:
            parsed = self._parsed(unit)
            for view in self._views[unit.entity_type.name]:
                try:
                    with spark_errors(f"view {view.plan.name}"):
                        planned(parsed, [view]).write.format("noop").mode("append").save()
                except PipelineError as blamed:
                    self._quarantine(unit.entity_type.name, view.plan.name, str(blamed))

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """The driver's own connection, made again after it was lost."""
        dsn = self._config.views_dsn
        try:
            if self._database is None or self._database.closed:
                self._database = psycopg.connect(dsn, autocommit=True)
            yield self._database
        except psycopg.OperationalError as cause:
            if self._database is not None:
                self._database.close()
            raise Unavailable(
                f"the views' database does not answer ({without_secret(dsn)}): "
                f"{str(cause).strip().splitlines()[0]}"
            ) from cause


def _only_view(group: GroupPlan) -> str:
    """The view of a group that keeps one view alone."""
    return group.view_group.rpartition("/")[2]
