"""Reading known ranges of the log into Spark: bounded, committed records only, loss is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, TimestampType

from everstate.config import Config
from everstate.log.client import spark_options
from everstate.log.positions import Range
from everstate.pipeline.spark.states import HEADERS, struct

Ranges = Mapping[str, Mapping[int, Range]]
"""topic → partition → offsets."""

SOURCE_SCHEMA: Final = struct(
    *(("key", BinaryType()), ("value", BinaryType()), ("topic", StringType())),
    *(("partition", IntegerType()), ("offset", LongType())),
    *(("timestamp", TimestampType()), ("timestampType", IntegerType()), ("headers", HEADERS)),
)
"""The output of Spark's Kafka reader, and the input of
:func:`everstate.pipeline.spark.parse.parse`."""


def read_ranges(
    spark: SparkSession,
    config: Config,
    ranges: Ranges,
    *,
    headers: bool = True,
    slices: int | None = None,
) -> DataFrame:
    """Records of exactly these offset ranges; one Spark task per partition, in offset order (C12).

    ``slices``: at least so many tasks, each with a slice of a partition; the slices of a partition
    are in the order of their offsets. Only for callers that put them together again.

    Out: columns of :data:`SOURCE_SCHEMA`; without ``headers`` all but that one, which takes an
    eighth less time. Empty ranges are left out; when all are empty, so is the result. Markers and
    aborted records inside a range give no rows. A range that the log no longer holds fails the job
    (C8); run the job inside ``spark_errors`` to get DataLoss. The group id is fixed, so that
    executors keep their consumers and prefetched records from one batch to the next.
    """
    wanted = {
        topic: {partition: span for partition, span in partitions.items() if len(span) > 0}
        for topic, partitions in ranges.items()
    }
    wanted = {topic: partitions for topic, partitions in wanted.items() if partitions}
    if not wanted:
        return spark.createDataFrame([], SOURCE_SCHEMA)
    split = {} if slices is None else {"minPartitions": str(slices)}
    return (
        spark.read.format("kafka")
        .options(**spark_options(config), **split)
        .option("assign", json.dumps({topic: sorted(spans) for topic, spans in wanted.items()}))
        .option("startingOffsets", _offsets(wanted, "start"))
        .option("endingOffsets", _offsets(wanted, "end"))
        .option("includeHeaders", str(headers).lower())
        .option("kafka.group.id", f"{config.log.prefix}-spark")
        # The task waits so long for a broker that does not answer.
        .option("kafkaConsumer.pollTimeoutMs", "30000")
        # A fetch at the end of the log waits this long; the default of 500 ms was most of a batch.
        .option("kafka.fetch.max.wait.ms", "5")
        .load()
    )


def _offsets(ranges: Ranges, side: str) -> str:
    return json.dumps(
        {
            topic: {str(partition): getattr(span, side) for partition, span in spans.items()}
            for topic, spans in ranges.items()
        }
    )


def fair_spans(
    position: Mapping[int, int], ends: Mapping[int, int], changes_max: int
) -> dict[int, Range]:
    """Offsets to read from each partition: all new ones, or a fair share of ``changes_max``."""
    waiting = {p: end - position.get(p, 0) for p, end in ends.items() if end > position.get(p, 0)}
    spans = {}
    left = changes_max
    for rank, partition in enumerate(sorted(waiting, key=lambda p: waiting[p])):
        take = min(waiting[partition], max(1, left // (len(waiting) - rank)))
        left = max(0, left - take)
        start = position.get(partition, 0)
        spans[partition] = Range(start, start + take)
    return spans
