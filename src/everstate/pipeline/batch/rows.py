"""The batch side of a view: the rows that its definition gives for the accepted changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DecimalType

from everstate.changes import EntityType
from everstate.pipeline.spark.functions import leaving_a_slot
from everstate.views.grammar import change_schema
from everstate.views.kinds import ViewPlan
from everstate.views.kinds.composed import ComposedPlan
from everstate.views.kinds.join_sums import JoinSumsPlan
from everstate.views.kinds.python import PythonPlan
from everstate.views.parsing import reading
from everstate.views.tables import Merge, Sum, SumTable
from everstate.views.whole_keys import PLACE, InBatch


class Accepted:
    """The accepted changes of an entity type at one position, in the forms that a batch reads."""

    def __init__(self, entity_type: EntityType, changes: DataFrame) -> None:
        self._entity_type, self.changes = entity_type, changes

    @cached_property
    def newest(self) -> DataFrame:
        """The newest change of each key, deleted entities included."""
        return self.changes.where("is_newest")

    @cached_property
    def live(self) -> DataFrame:
        """Live entities: `__key`, `__version`, `__partition`, and the fields."""
        names = self._entity_type.arrow_schema.names
        fields = [F.col("current")[name].alias(name) for name in names]
        own = [F.col(name).alias(f"__{name}") for name in ("key", "version", "partition")]
        return self.newest.where(F.col("current").isNotNull()).select(*own, *fields)

    @property
    def as_changes(self) -> DataFrame:
        """Changes as an author's SQL sees them: `FROM <entity>_changes`."""
        names = change_schema(self._entity_type.arrow_schema).names
        own = [F.col(name) for name in names if name != "event"]
        event = F.get_json_object("event", "$.type").alias("event")
        fields = [name for name in self._entity_type.arrow_schema.names if name not in names]
        after = [F.col("current")[name].alias(name) for name in fields]
        return self.changes.select(*own, event, *after)


@dataclass(frozen=True)
class LiveOnly:
    """Only the live entities, where the changes that made them are not available."""

    live: DataFrame


@contextmanager
def batch_rows(
    plan: ViewPlan, accepted: Accepted | LiveOnly, *, for_table: bool = False
) -> Iterator[DataFrame]:
    """Rows of a view at the position of the accepted changes, in the columns of `plan.kept`.

    ``for_table``: in the columns of its table, where sums have a row for each shard.
    """
    source: DataFrame = getattr(accepted, plan.source)
    with named(source, f"everstate_{plan.name}_{uuid4().hex}") as table:
        rows = source.sparkSession.sql(plan.batch_sql(table))
        if isinstance(plan, PythonPlan):
            yield _by_function(rows, plan)
            return
        yield _MERGED[plan.table(0).merge](rows, plan, for_table)


@contextmanager
def composed_tables(
    plan: ComposedPlan, accepted: Mapping[str, Accepted]
) -> Iterator[dict[str, str]]:
    """The names of temporary Spark SQL tables of a view's inputs, by the names of the inputs."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                named(getattr(each, plan.reads), f"everstate_{name}_{uuid4().hex}")
            )
            for name, each in accepted.items()
        }


def composed_rows(spark: SparkSession, plan: ComposedPlan, tables: Mapping[str, str]) -> DataFrame:
    """Rows of a view over other views, in the columns of `plan.compared`."""
    rows = spark.sql(plan.batch(tables))
    if isinstance(plan, JoinSumsPlan):
        return _sums(rows, plan.group_names, [(name, kind) for name, kind, _ in plan.sums])
    return rows


def rows_as_shown(plan: ViewPlan, accepted: Callable[[str], Accepted]) -> DataFrame:
    """Rows that readers see of a view that has a text of them; ``accepted``: by entity type."""
    if not isinstance(plan, ComposedPlan):
        return as_written(plan, accepted(plan.entity), plan.batch_as_shown)
    of_parts = {part.name: part.entity for part in plan.parts}
    inputs = {name: accepted(of_parts.get(name, plan.entity)) for name in plan.inputs}
    # Spark resolves the names of tables here, so the temporary tables may be dropped after it.
    with composed_tables(plan, inputs) as tables:
        spark = next(iter(inputs.values())).changes.sparkSession
        return spark.sql(plan.as_shown(tables))


def as_written(plan: ViewPlan, accepted: Accepted, sql: str) -> DataFrame:
    """Rows of the author's SQL, or of a form of it, over the accepted changes.

    Its table has another name here: the session may have one of that name, or another thread.
    """
    rows = accepted.as_changes if plan.source == "changes" else accepted.live
    with named(rows, f"everstate_{plan.name}_{uuid4().hex}") as table:
        # Spark resolves the names of tables here, so the temporary table may be dropped after it.
        return rows.sparkSession.sql(reading(sql, table))


@contextmanager
def named(rows: DataFrame, name: str) -> Iterator[str]:
    """Rows as a temporary Spark SQL table with this name."""
    rows.createOrReplaceTempView(name)
    try:
        yield name
    finally:
        rows.sparkSession.catalog.dropTempView(name)


def _by_function(changes: DataFrame, plan: PythonPlan) -> DataFrame:
    """Rows that the function of a Python view returns; a task has all changes of its keys."""
    kinds = [("key", pa.string()), (PLACE, pa.int32()), *plan.columns_given]
    changes = leaving_a_slot(changes)
    return changes.mapInArrow(InBatch(plan.table(0)), from_arrow_schema(pa.schema(kinds)))


def _as_they_are(rows: DataFrame, _plan: ViewPlan, _for_table: bool) -> DataFrame:
    return rows


def _summed(inputs: DataFrame, plan: ViewPlan, for_table: bool) -> DataFrame:
    """Groups and sums in the store's order."""
    table = plan.table(0)
    assert isinstance(table, SumTable)
    return _sums(inputs, (*table.groups, *(("shard",) if for_table else ())), table.sums)


def _sums(inputs: DataFrame, groups: Sequence[str], wanted: Sequence[tuple[str, Sum]]) -> DataFrame:
    """Inputs summed by groups; whole numbers are summed beyond 64 bits."""
    kinds = {field.name: field.dataType for field in inputs.schema}
    sums = []
    for name, kind in wanted:
        if kind in ("max", "min"):
            sums.append(getattr(F, kind)(name).alias(name))
            continue
        if name not in kinds:
            sums.append(F.count(F.lit(1)).alias(name))
            continue
        whole = not isinstance(kinds[name], DecimalType)
        value = F.col(name).cast("decimal(38, 0)") if whole else F.col(name)
        sums.append(F.coalesce(F.sum(value), F.lit(0)).alias(name))
    return inputs.groupBy(*groups).agg(*sums)


_MERGED: Final[Mapping[Merge, Callable[[DataFrame, ViewPlan, bool], DataFrame]]] = {
    "row": _as_they_are,
    "sum": _summed,
    "append": _as_they_are,
}
