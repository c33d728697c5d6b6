"""Reading a changelog from its archive instead of the log, in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from everstate.archive import table_path
from everstate.changes import EntityType
from everstate.config import Config
from everstate.log.positions import Range
from everstate.pipeline.parse import parse, state_schema
from everstate.pipeline.source import SOURCE_SCHEMA


def read_archive(
    spark: SparkSession, config: Config, entity_type: EntityType, *, version: int | None = None
) -> DataFrame:
    """All archived records: what `parse` would give, and `generation`.

    The typed columns are those of the model at the time of archiving. Where the model has changed
    since, the raw messages are parsed again by the present one. Cost: then that of parsing.
    """
    reader = spark.read.format("delta")
    if version is not None:
        reader = reader.option("versionAsOf", version)
    table = reader.load(table_path(config, entity_type.name))
    if _shape(table) == state_schema(entity_type).simpleString():
        return table
    records = table.select(
        F.col("raw_key").alias("key"),
        F.col("raw_value").alias("value"),
        F.lit(entity_type.name).alias("topic"),
        F.col("partition"),
        F.col("offset"),
        F.col("timestamp"),
        F.lit(0).alias("timestampType"),
        F.col("raw_headers").cast(SOURCE_SCHEMA["headers"].dataType).alias("headers"),
    )
    # A changelog has one generation today; `parse` keeps no column that it does not know.
    return parse(records, entity_type).withColumn("generation", F.lit(1))


def _shape(table: DataFrame) -> str:
    if "current" not in table.columns:
        return ""
    return table.schema["current"].dataType.simpleString()


def read_archived(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    spans: Mapping[int, Range],
    *,
    generation: int = 1,
) -> DataFrame:
    """Archived records of these ranges: what `parse` would give, each partition in one task.

    In offset order within a partition (C12). Cost: a shuffle, which reading the log does not need.
    """
    wanted = [
        (F.col("partition") == partition)
        & (F.col("offset") >= span.start)
        & (F.col("offset") < span.end)
        for partition, span in spans.items()
    ]
    table = read_archive(spark, config, entity_type)
    return (
        table.where(F.col("generation") == generation)
        .where(reduce(lambda left, right: left | right, wanted))
        .repartition(len(spans), "partition")
        .sortWithinPartitions("partition", "offset")
    )
