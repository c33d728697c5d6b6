"""Reading ranges of a changelog from its archive instead of the log, in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from everstate.archive import ArchiveReader, table_path
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss
from everstate.log.positions import Range


def archived_spans(
    config: Config,
    entity: str,
    spans: Mapping[int, Range],
    begins: Mapping[int, int],
    *,
    generation: int = 1,
) -> dict[int, Range]:
    """What of these spans the archive has: it trails the log, and a span must not go past its end.

    ``begins`` is where the log begins now. Raises DataLoss when neither of the two has the start
    of a span, and ArchiveError when the archive cannot be read.
    """
    ends = ArchiveReader(config, entity).position().get(generation, {})
    for partition, span in spans.items():
        begin, end = begins[partition], ends.get(partition, 0)
        if max(span.start, end) < begin:
            raise DataLoss(
                f"{entity}: offsets {max(span.start, end):,} to {begin:,} of partition "
                f"{partition} are neither in the log nor in the archive; nothing was skipped."
            )
    return {
        partition: Range(span.start, min(span.end, ends[partition]))
        for partition, span in spans.items()
        if ends.get(partition, 0) > span.start
    }


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
    table = spark.read.format("delta").load(table_path(config, entity_type.name))
    return (
        table.where(F.col("generation") == generation)
        .where(reduce(lambda left, right: left | right, wanted))
        .repartition(len(spans), "partition")
        .sortWithinPartitions("partition", "offset")
    )
