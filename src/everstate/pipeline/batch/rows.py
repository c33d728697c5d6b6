"""The batch side of a view: the rows that its definition gives for the accepted changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DecimalType

from everstate.changes import EntityType
from everstate.changes.arrow import change_columns
from everstate.pipeline.spark.functions import leaving_a_slot
from everstate.views.kinds import ViewPlan
from everstate.views.tables import Sum
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
        names = [each.name for each in change_columns(self._entity_type.arrow_schema)]
        own = [F.col(name) for name in names if name != "event"]
        event = F.get_json_object("event", "$.type").alias("event")
        fields = [name for name in self._entity_type.arrow_schema.names if name not in names]
        after = [F.col("current")[name].alias(name) for name in fields]
        return self.changes.select(*own, event, *after)


@dataclass(frozen=True)
class LiveOnly:
    """Only the live entities, where the changes that made them are not available."""

    live: DataFrame


def entities_read(plan: ViewPlan) -> tuple[str, ...]:
    """The entity types whose accepted changes the batch of a view reads, in its order."""
    return tuple(part.entity for part in plan.parts) or (plan.entity,)


@contextmanager
def batch_rows(
    plan: ViewPlan, accepted: Sequence[Accepted | LiveOnly], *, for_table: bool = False
) -> Iterator[DataFrame]:
    """Rows of a view at the position of the accepted changes, in the columns of `plan.compared`.

    ``accepted``: of each of its inputs. ``for_table``: in the columns of its table, where sums
    have a row for each shard, and where rows that are not `present` end others.
    """
    sources: list[DataFrame] = [getattr(each, plan.source) for each in accepted]
    with _named(plan, sources) as tables:
        rows = sources[0].sparkSession.sql(plan.batch(tables))
        if plan.has_times and "present" in rows.columns and not for_table:
            rows = rows.where("present").drop("present")
        if (function := plan.function) is not None:
            kinds = [("key", pa.string()), (PLACE, pa.int32()), *function.returned]
            # A task has all changes of its keys.
            changes = leaving_a_slot(rows)
            rows = changes.mapInArrow(InBatch(function), from_arrow_schema(pa.schema(kinds)))
        elif plan.sums_kept is not None:
            groups, sums = plan.sums_kept
            rows = _sums(rows, (*groups, *(("shard",) if for_table else ())), sums)
        yield rows


def as_written(plan: ViewPlan, accepted: Sequence[Accepted], sql: str) -> DataFrame:
    """Rows of the author's SQL, or of a form of it, over the accepted changes of each input.

    Its tables have other names here: the session may have some of these names, or another thread.
    """
    rows = [each.as_changes if plan.source == "changes" else each.live for each in accepted]
    with _named(plan, rows) as tables:
        # Spark resolves the names of tables here, so the temporary tables may be dropped after it.
        return rows[0].sparkSession.sql(plan.over(sql, tables))


@contextmanager
def _named(plan: ViewPlan, sources: Sequence[DataFrame]) -> Iterator[list[str]]:
    """Temporary Spark SQL tables of a view's inputs, by their names."""
    tables = [f"everstate_{plan.name}_{uuid4().hex}" for _ in sources]
    for rows, table in zip(sources, tables, strict=True):
        rows.createOrReplaceTempView(table)
    try:
        yield tables
    finally:
        for table in tables:
            sources[0].sparkSession.catalog.dropTempView(table)


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
