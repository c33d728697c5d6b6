"""Histories at random, kept as views of every kind by the store under test, without a pipeline.

Spark plans the changes of all histories in one job, as the keeper has it done. Each history is then
applied on its own: in random ranges, its partitions in random order, some views riding and some
trailing. Whoever knows what readers must see is the oracle; nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID, uuid5

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pydantic import BaseModel
from pyspark.sql import SparkSession

from everstate.changes import Change, ChangeCodec, EntityType, Kind, Provenance
from everstate.log.positions import Range
from everstate.pipeline.keeping.plan import column_types, planned
from everstate.pipeline.spark.parse import parse
from everstate.pipeline.spark.source import SOURCE_SCHEMA
from everstate.views.control import Control
from everstate.views.core import apply_range
from everstate.views.kinds import HistoryPlan, LatestPlan, ViewPlan
from everstate.views.kinds.join_sums import JoinSumsPlan
from everstate.views.stores import (
    JoinTables,
    PostgresViewStore,
    ViewTables,
    close_store,
)
from everstate.views.tables import Core, KeptTable, physical
from everstate.views.trailing import trail_range
from everstate.views.versions import registered
from kit.view_postgres import core_tables

SCHEMA = "kinds"
START = datetime(2026, 3, 1, tzinfo=UTC)
SERVICES = ("desk", "web", "import")
_PARTITIONS_MAX = 4


@dataclass(frozen=True)
class Step:
    """One change of a history, and its place."""

    key: str
    version: int
    original: BaseModel | None
    current: BaseModel | None
    occurred_at: datetime
    recorded_at: datetime
    service: str
    partition: int

    @property
    def kind(self) -> Kind:
        """What it did."""
        if self.current is None:
            return Kind.DELETED
        return Kind.CREATED if self.original is None else Kind.UPDATED


@dataclass
class Story:
    """One history of one entity type, in the order in which it happened."""

    entity: str
    partitions: int
    steps: list[Step] = field(default_factory=list)

    @property
    def alive(self) -> dict[str, BaseModel]:
        """States of what is there at the end."""
        last = {step.key: step.current for step in self.steps}
        return {key: state for key, state in last.items() if state is not None}

    def of(self, partition: int) -> list[Step]:
        """Its changes in one partition."""
        return [step for step in self.steps if step.partition == partition]


def story(random: Random, entity: str, states: Sequence[tuple[str, BaseModel | None]]) -> Story:
    """A history of keys and their new states; ``None`` deletes what is there."""
    made = Story(entity, random.randint(1, _PARTITIONS_MAX))
    last: dict[str, tuple[int, BaseModel | None]] = {}
    home: dict[str, int] = {}
    now = START
    for key, state in states:
        version, before = last.get(key, (0, None))
        if before is None and state is None:
            continue
        now += timedelta(seconds=random.choice((0, 1, 60, 1800)))
        late = timedelta(minutes=random.choice((0, 0, 0, 1, 50, 200)))
        partition = home.setdefault(key, random.randrange(made.partitions))
        service = random.choice(SERVICES)
        made.steps.append(
            Step(key, version + 1, before, state, now - late, now, service, partition)
        )
        last[key] = (version + 1, state)
    return made


def tabled(views: Sequence[ViewPlan], entity: str) -> list[ViewPlan]:
    """What is kept of an entity type: views with a table, and the parts of the others."""
    every = {plan.name: plan for view in views for plan in (view, *view.parts)}
    return [plan for plan in every.values() if plan.entity == entity and not plan.inputs]


def plan_changes(
    spark: SparkSession,
    entity_type: EntityType,
    stories: Sequence[Story],
    views: Sequence[ViewPlan],
) -> list[dict[int, pa.Table]]:
    """For each history its planned changes by partition, with offsets from 0; one Spark job."""
    codec, rows = ChangeCodec(entity_type), []
    for number, each in enumerate(stories):
        offsets = dict.fromkeys(range(each.partitions), 0)
        for step in each.steps:
            key, value, headers = codec.encode(change_of(entity_type, number, step))
            place = number * _PARTITIONS_MAX + step.partition
            listed = [(name, text) for name, text in headers]
            rows.append((key, value, "t", place, offsets[step.partition], None, 0, listed))
            offsets[step.partition] += 1
    records = spark.createDataFrame(rows, SOURCE_SCHEMA).coalesce(1)
    mine = [(view, view.table(1)) for view in tabled(views, entity_type.name)]
    made = planned(parse(records, entity_type), mine)
    # As tasks get them: `toArrow` would cast structs that are null.
    batches: Any = made
    whole = pa.Table.from_batches(batches._collect_as_arrow()).combine_chunks()
    assert whole["reason"].null_count == whole.num_rows, pc.unique(whole["reason"])
    found = []
    for number, each in enumerate(stories):
        places = range(number * _PARTITIONS_MAX, number * _PARTITIONS_MAX + each.partitions)
        found.append(
            {
                place - places.start: whole.filter(pc.equal(whole["partition"], place))
                for place in places
            }
        )
    return found


def change_of(entity_type: EntityType, number: int, step: Step) -> Change[Any]:
    return Change(
        id=uuid5(UUID(int=number), f"{step.key}/{step.version}"),
        entity=entity_type.name,
        schema_version=1,
        key=step.key,
        version=step.version,
        kind=step.kind,
        occurred_at=step.occurred_at,
        recorded_at=step.recorded_at,
        provenance=Provenance(
            api_version="v1", service_name=step.service, identifier="t", reason=f"r{step.version}"
        ),
        current=step.current,
        original=step.original,
    )


@dataclass
class KeptKinds:
    """Views of some entity types in a database; the store may be a double with a defect."""

    dsn: str
    connection: psycopg.Connection[Any]
    plans: Mapping[str, Sequence[ViewPlan]]
    """Plans with a table by entity type, `history` among them."""
    views: Sequence[ViewPlan]
    store: type[PostgresViewStore] = PostgresViewStore

    @classmethod
    @contextmanager
    def installed(
        cls,
        dsn: str,
        spark: SparkSession,
        entity_types: Mapping[str, EntityType],
        views: Sequence[ViewPlan],
    ) -> Iterator[KeptKinds]:
        """Make all tables, and what readers see of them."""
        with psycopg.connect(dsn, autocommit=True, options="-c TimeZone=UTC") as connection:
            control = Control(connection, SCHEMA)
            control.install()
            tables, plans = ViewTables(control), dict[str, list[ViewPlan]]()
            for name, entity_type in entity_types.items():
                plans[name] = [HistoryPlan.of(name), *tabled(views, name)]
                with connection.transaction():
                    core_tables(control, entity_type)
                    for plan in plans[name]:
                        tables.install(plan, 1, column_types(spark, entity_type, plan))
                        tables.point(plan, 1)
            kept = cls(dsn, connection, plans, views)
            with connection.transaction():
                for sums in kept.join_sums:
                    sums.install()
                for plan in views:
                    if plan.inputs:
                        tables.point(plan, 1)
            connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(SCHEMA)))
            try:
                yield kept
            finally:
                close_store(dsn)

    @property
    def join_sums(self) -> list[JoinTables]:
        """Aggregates over joins."""
        return [
            JoinTables(self.connection, SCHEMA, p, 1, [physical(name) for name in p.inputs])
            for p in self.views
            if isinstance(p, JoinSumsPlan)
        ]

    def refresh(self) -> None:
        """Let aggregates over joins be computed again, each in one snapshot."""
        for sums in self.join_sums:
            self.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            sums.refresh(is_full=False)
            self.connection.execute("COMMIT")

    def reset(self, partitions: Mapping[str, int]) -> None:
        """Begin again with empty views at offset 0."""
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        names = [name for (name,) in self.connection.execute(query, (SCHEMA,))]
        listed = sql.SQL(", ").join(sql.Identifier(name) for name in names)
        self.connection.execute(sql.SQL("TRUNCATE {}").format(listed))
        control = Control(self.connection, SCHEMA)
        for entity, count in partitions.items():
            control.open_core(entity, range(count))
            offsets = dict.fromkeys(range(count), 0)
            for plan in (LatestPlan.of(entity), *self.plans[entity]):
                control.add_version(registered(plan, 1, published=True))
                control.open_positions(plan.name, 1, entity, plan.fingerprint, offsets)

    def apply(self, random: Random, told: Story, changes: Mapping[int, pa.Table]) -> None:
        """Let core, riders and trailing views take a whole history, somehow."""
        control, at = Control(self.connection, SCHEMA), dict.fromkeys(changes, 0)
        kept = [plan.table(1) for plan in self.plans[told.entity]]
        store = self.store(self.dsn, SCHEMA)
        while left := [p for p, rows in changes.items() if at[p] < rows.num_rows]:
            partition = random.choice(left)
            rows, start = changes[partition], at[partition]
            at[partition] = end = random.randint(start + 1, rows.num_rows)
            able = [plan.table(1) for plan in self.plans[told.entity] if plan.rides]
            riders = [t for t in able if t.merge == "history" or random.random() < 0.8]
            core = self._core(told.entity, kept, riders)
            # Delivered from anywhere before: the position drops what is read twice.
            first = random.randint(0, start)
            apply_range(store, core, partition, Range(first, end), _between(rows, first, end))
            if random.random() < 0.2:
                self.refresh()
            for table in kept:
                if random.random() < 0.2:
                    self._trail(random, store, control, told.entity, table, changes)
        for table in kept:
            while self._trail(random, store, control, told.entity, table, changes):
                pass

    def _trail(
        self,
        random: Random,
        store: PostgresViewStore,
        control: Control,
        entity: str,
        table: KeptTable,
        changes: Mapping[int, pa.Table],
    ) -> bool:
        """Let a view that is behind take one range; whether it was behind."""
        ahead, mine = control.core_vector(entity), control.vector(table.view, table.version)
        behind = [p for p, offset in ahead.items() if mine[p] < offset]
        if not behind:
            return False
        partition = random.choice(behind)
        start, end = mine[partition], random.randint(mine[partition] + 1, ahead[partition])
        core = self._core(entity, [table], [])
        span, rows = Range(start, end), _between(changes[partition], start, end)
        trail_range(store, core, table, partition, span, rows, meets=end == ahead[partition])
        return True

    def _core(self, entity: str, kept: Sequence[KeptTable], riders: Sequence[KeptTable]) -> Core:
        ids = next((table for table in kept if table.merge == "history"), None)
        return Core(entity, "t", tuple(riders), ids=ids)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query, as readers get them."""
        return self.connection.execute(query.encode()).fetchall()


def _between(rows: pa.Table, start: int, end: int) -> pa.Table:
    return rows.slice(start, end - start)
