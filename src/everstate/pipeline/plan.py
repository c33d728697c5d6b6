"""The plan half on Spark: parsed changes with the row deltas of every view beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type

from everstate.changes import EntityType
from everstate.errors import InvalidView, PipelineError, SparkLost, Unavailable
from everstate.pipeline.parse import parsed_schema
from everstate.pipeline.sameness import changing
from everstate.pipeline.session import spark_errors
from everstate.views.plan import ViewPlan
from everstate.views.tables import KeptTable, planned_column

PlannedView = tuple[ViewPlan, KeptTable]
"""A plan, and the version's table that it is for."""

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
    """Parsed records with a struct per view and image, named by `planned_column`.

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
    for plan, table in views:
        for image in table.images:
            columns.append(F.expr(plan.columns(image)).alias(planned_column(table, image)))
    return columns


def column_types(
    spark: SparkSession, entity_type: EntityType, plan: ViewPlan
) -> Mapping[str, pa.DataType]:
    """Types that Spark gives the physical columns of a view.

    Raises InvalidView when Spark refuses the SQL, or says that the same image would not always
    give the same row: what is added could then not be taken away again (C16).
    """
    try:
        with spark_errors(f"view {plan.name}"):
            empty = spark.createDataFrame([], parsed_schema(entity_type))
            made = empty.select(F.expr(plan.columns("current")).alias("row")).select("row.*")
            analysed = made._jdf.queryExecution().analyzed()  # noqa: SLF001 - PySpark cannot be asked
            reason = changing(analysed)
            types = {f.name: to_arrow_type(f.dataType, timezone="UTC") for f in made.schema}
    except (SparkLost, Unavailable):
        raise
    except (PipelineError, PySparkException) as cause:
        told = str(cause).removeprefix(f"view {plan.name}: ")
        raise InvalidView(
            plan.name, told, advice="Spark must be able to compute each column of it."
        ) from cause
    if reason is not None:
        raise InvalidView(plan.name, reason, advice="Store the value with the entity.")
    return types
