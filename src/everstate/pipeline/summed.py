"""The batch side of a view: what its definition comes to over live entities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DecimalType

from everstate.changes import EntityType
from everstate.views.plan import LinearPlan


@contextmanager
def live_entities(
    spark: SparkSession, newest: DataFrame, entity_type: EntityType, view: str
) -> Iterator[str]:
    """Live entities as a table that Spark SQL can name: `__key`, `__version`, and the fields."""
    table = f"everstate_live_{view}"
    fields = [F.col("current")[f.name].alias(f.name) for f in entity_type.arrow_schema]
    live = newest.where(F.col("current").isNotNull())
    key, version = F.col("key").alias("__key"), F.col("version").alias("__version")
    live.select(key, version, *fields).createOrReplaceTempView(table)
    try:
        yield table
    finally:
        spark.catalog.dropTempView(table)


def summed_up(inputs: DataFrame, plan: LinearPlan) -> DataFrame:
    """Groups and sums in the store's column order; whole numbers are summed beyond 64 bits."""
    kinds = {field.name: field.dataType for field in inputs.schema}
    sums = []
    for accumulator in plan.accumulators:
        name = accumulator.name
        if accumulator.spark_sql is None:
            sums.append(F.count(F.lit(1)).alias(name))
            continue
        whole = not isinstance(kinds[name], DecimalType)
        value = F.col(name).cast("decimal(38, 0)") if whole else F.col(name)
        sums.append(F.coalesce(F.sum(value), F.lit(0)).alias(name))
    return inputs.groupBy(*(column.name for column in plan.group)).agg(*sums)
