"""The plan half on Spark: parsed changes with the row deltas of every view beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.pipeline.parse import parsed_schema
from everstate.pipeline.session import spark_errors
from everstate.views.plan import LinearPlan, ViewPlan
from everstate.views.stores.postgres.group import PlannedView, planned_column

_KEPT = (
    "partition",
    "offset",
    "key",
    "version",
    "id",
    "kind",
    "occurred_at",
    "recorded_at",
    "schema_version",
    "reason",
    "raw_value",
)
_DEAD_ONLY = ("raw_key", "raw_headers")


def planned(parsed: DataFrame, views: Sequence[PlannedView]) -> DataFrame:
    """Parsed records with a struct per view and image, named by :func:`planned_column`.

    Null where the view has no part in that image. Key and headers as bytes travel only with
    unreadable records, which are rare.
    """
    application = parsed.sparkSession.sparkContext.applicationId
    return parsed.select(*_selection(tuple(views), application))


@lru_cache(maxsize=64)
def _selection(views: tuple[PlannedView, ...], _application: str) -> list[Column]:
    """The columns of `planned`, built once for each Spark application."""
    columns: list[Column] = [F.col(name) for name in _KEPT]
    unreadable = F.col("reason").isNotNull()
    columns += [F.when(unreadable, F.col(name)).alias(name) for name in _DEAD_ONLY]
    for view in views:
        name = view.plan.name
        if isinstance(view.plan, LinearPlan):
            before = F.expr(view.plan.columns("original"))
            columns.append(before.alias(planned_column(name, "original")))
        after = F.expr(view.plan.columns("current"))
        columns.append(after.alias(planned_column(name, "current")))
    return columns


def column_types(
    spark: SparkSession, entity_type: EntityType, plan: ViewPlan
) -> Mapping[str, pa.DataType]:
    """Types that Spark gives the physical columns of a view.

    Raises PipelineError on bad SQL, and InvalidView when Spark says that the same image would not
    always give the same row: what is added could then not be taken away again (C16).
    """
    with spark_errors(f"view {plan.name}"):
        empty = spark.createDataFrame([], parsed_schema(entity_type))
        made = empty.select(F.expr(plan.columns("current")).alias("row")).select("row.*")
        analysed = made._jdf.queryExecution().analyzed()  # noqa: SLF001 - PySpark cannot be asked
        if not analysed.deterministic():
            raise InvalidView(
                plan.name,
                "Spark holds a part of it for non-deterministic.",
                advice="Store the value with the entity.",
            )
        return {field.name: to_arrow_type(field.dataType, timezone="UTC") for field in made.schema}
