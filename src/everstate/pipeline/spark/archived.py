"""Reading a changelog from its archive instead of the log, in the same shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StringType, StructType

from everstate.archive import table_path
from everstate.archive.sums import require_sums
from everstate.changes import EntityType
from everstate.config import Config
from everstate.log.positions import Range
from everstate.pipeline.spark.parse import model_of, parse
from everstate.pipeline.spark.source import SOURCE_SCHEMA
from everstate.pipeline.spark.states import state_schema


def lake_table(
    spark: SparkSession, config: Config, entity: str, *, version: int | None = None
) -> DataFrame:
    """The table of an archive; its newest version, or an earlier one.

    Spark compares each file on a local disk with its sums, and a file in an object store with those
    of its pages. Raises ArchiveDamaged where a file on a local disk has none.
    """
    path = table_path(config, entity)
    require_sums(path)
    reader = spark.read.format("delta")
    return (reader if version is None else reader.option("versionAsOf", version)).load(path)


def read_archive(
    spark: SparkSession, config: Config, entity_type: EntityType, *, version: int | None = None
) -> DataFrame:
    """All archived records, in the columns of `parse`.

    The archive holds typed columns of the model at the time of archiving. A record that was
    archived under another model, or could not be read then, is parsed again by the present model.
    Cost: parsing for those records, reading columns for the others.
    """
    table = lake_table(spark, config, entity_type.name, version=version)
    typed = typed_rows(table, entity_type)
    if typed is None:
        return parsed_again(table, entity_type)
    # Filters that Parquet's statistics can decide: nearly always one side has nothing to read.
    model = F.col("model")
    other = model.isNull() | (model != model_of(entity_type)) | F.col("recorded_at").isNull()
    return typed.unionByName(parsed_again(table.where(other), entity_type))


def typed_rows(table: DataFrame, entity_type: EntityType) -> DataFrame | None:
    """The records of an archive's table whose typed columns were made by this model.

    In the columns of `parse`; ``None`` when the table's columns are not those of the model, so that
    each record is to be parsed again.
    """
    if not _fits(table, entity_type):
        return None
    if "misfits" not in table.columns:  # states that did not fit had a reason then
        table = table.withColumn("misfits", F.lit(None).cast(ArrayType(StringType())))
    rows = table.where((F.col("model") == model_of(entity_type)) & F.col("recorded_at").isNotNull())
    names = entity_type.arrow_schema.names
    for image in ("current", "original"):
        if table.schema[image].dataType != state_schema(entity_type):
            fields = F.struct(*(F.col(image)[name].alias(name) for name in names))
            rows = rows.withColumn(image, F.when(F.col(image).isNotNull(), fields))
    return rows


def _fits(table: DataFrame, entity_type: EntityType) -> bool:
    """Whether the table's typed columns have the fields of the model, with the same types."""
    if "model" not in table.columns:
        return False
    kept = table.schema["current"].dataType
    known = {field.name: field.dataType for field in kept} if isinstance(kept, StructType) else {}
    return all(known.get(f.name) == f.dataType for f in state_schema(entity_type))


def parsed_again(
    table: DataFrame, entity_type: EntityType, *, kept: Sequence[str] = ()
) -> DataFrame:
    """Records of an archive from their raw bytes; ``kept``: more columns of the table to keep."""
    records = table.select(
        F.col("raw_key").alias("key"),
        F.col("raw_value").alias("value"),
        F.concat(F.lit(".g"), F.col("generation").cast("string")).alias("topic"),
        F.col("partition"),
        F.col("offset"),
        F.col("timestamp"),
        F.col("timestamp_type").alias("timestampType"),
        F.col("raw_headers").cast(SOURCE_SCHEMA["headers"].dataType).alias("headers"),
        *kept,
    )
    return parse(records, entity_type, kept=kept)


def read_archived(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    spans: Mapping[int, Range],
    *,
    generation: int = 1,
) -> DataFrame:
    """Archived records of these ranges in the columns of `parse`, each partition in one task.

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
