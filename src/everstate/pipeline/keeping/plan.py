"""Planning on Spark: adds the row deltas of each view as columns to parsed changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType

from everstate.changes import EntityType
from everstate.errors import InvalidView, PipelineError, SparkLost, Unavailable
from everstate.pipeline.batch.rules import treatment
from everstate.pipeline.batch.sameness import changing, rounding
from everstate.pipeline.spark.internals import analysed, or_null
from everstate.pipeline.spark.parse import parsed_schema
from everstate.pipeline.spark.session import spark_errors
from everstate.views.kinds import ViewPlan
from everstate.views.tables import KeptTable, packed_column, planned_column, rule_column

PlannedView = tuple[ViewPlan, KeptTable]
"""A view's plan, and the table of the version that it is for."""

_KEPT = (
    *("partition", "offset", "key", "version", "id", "kind", "occurred_at", "recorded_at"),
    *("schema_version", "reason", "raw_value", "raw_headers", "misfits"),
)


def planned(parsed: DataFrame, views: Sequence[PlannedView], *, caught: bool = False) -> DataFrame:
    """Parsed records with a struct per view and image, named by `planned_column`.

    A struct is null where the image gives the view no row. The key's bytes are kept only for
    unreadable records, which are rare. With ``caught`` an error of a view's SQL does not end the
    job: the columns of a view are packed into one struct, named by `packed_column`, which is null
    where the error was.
    """
    application = parsed.sparkSession.sparkContext.applicationId
    return parsed.select(*_selection(tuple(views), application, caught))


@lru_cache(maxsize=64)
def _selection(views: tuple[PlannedView, ...], _application: str, caught: bool) -> list[Column]:
    """The columns of `planned`, built once for each Spark application."""
    columns: list[Column] = [F.col(name) for name in _KEPT]
    unreadable = F.col("reason").isNotNull()
    columns.append(F.when(unreadable, F.col("raw_key")).alias("raw_key"))
    for plan, table in views:
        mine = []
        for image in table.images:
            row = F.expr(plan.columns(image))
            if plan.rules.trigger is not None and image == "original":
                # With a trigger each firing change is a fact: it adds, and subtracts nothing.
                row = F.when(F.lit(False), row)
            mine.append(row.alias(planned_column(table, image)))
        if table.has_rules:
            mine.append(treatment(plan).alias(rule_column(table)))
        if caught and mine:
            # What two columns have in common Spark computes once, before both, where nothing
            # catches its error; but not what lies in a branch that may not be taken.
            branch = F.when(F.col("offset") >= 0, F.struct(*mine))
            mine = [or_null(branch).alias(packed_column(table))]
        columns += mine
    return columns


def column_types(
    spark: SparkSession, entity_type: EntityType, plan: ViewPlan
) -> Mapping[str, pa.DataType]:
    """Types that Spark gives the physical columns of a view.

    Raises InvalidView when Spark refuses the SQL, when Spark would round a product of decimals, or
    when the same image would not always give the same row: then a later change could not subtract
    what an earlier one added (C16).
    """
    table = None if plan.inputs else plan.table(0)
    if table is None or not table.images or plan.function is not None:
        return {}
    try:
        with spark_errors(f"view {plan.name}"):
            empty = spark.createDataFrame([], parsed_schema(entity_type))
            rows = empty.select(F.expr(plan.columns(table.images[-1])).alias("row"))
            if isinstance(rows.schema["row"].dataType, ArrayType):
                rows = rows.select(F.explode("row").alias("row"))
            made = rows.select("row.*")
            plan_of_rows = analysed(made)
            reason, rounded = changing(plan_of_rows), rounding(plan_of_rows)
            types = {f.name: to_arrow_type(f.dataType, timezone="UTC") for f in made.schema}
    except (SparkLost, Unavailable):
        raise
    except (PipelineError, PySparkException) as cause:
        reason_text = str(cause).removeprefix(f"view {plan.name}: ")
        raise InvalidView(
            plan.name,
            reason_text,
            advice="Change the definition so that Spark can compute each of its columns.",
        ) from cause
    if reason is not None:
        raise InvalidView(plan.name, reason, advice="Store the value as a field of the entity.")
    if rounded is not None:
        raise InvalidView(
            plan.name,
            rounded,
            advice="Cast a side to fewer places, as in CAST(amount AS DECIMAL(20, 8)) * price.",
        )
    return types
