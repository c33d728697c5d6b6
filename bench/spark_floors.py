"""The floors in Spark: the same topic read and parsed with its own functions, nothing kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STATE = (
    "struct<id: string, country: string, status: string, total: decimal(12,2), "
    "lines: array<struct<sku: string, qty: bigint>>>"
)
_ENVELOPE = (
    "id string, entity string, schemaVersion int, key string, version bigint, kind string, "
    "occurredAt timestamp, recordedAt timestamp, event string, provenance struct<apiVersion: "
    "string, serviceName: string, identifier: string, actor: string, reason: string, "
    "correlationId: string, causationId: string>, "
    f"currentEntityState {_STATE}, originalEntityState {_STATE}"
)


def parsed(spark: SparkSession, bootstrap_servers: str, topic: str) -> DataFrame:
    """A whole topic through Spark's Kafka reader and `from_json`, typed."""
    from pyspark.sql import functions as F

    return (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .load()
        .select("partition", "offset", F.from_json(F.col("value").cast("string"), _ENVELOPE))
    )


def read_and_parse(spark: SparkSession, bootstrap_servers: str, topic: str, count: int) -> float:
    """Changes a second of Kafka → from_json → noop.

    The schema is looked at first: what parses to nothing is quick.
    """
    one = parsed(spark, bootstrap_servers, topic).limit(1).collect()[0][2]
    assert one.currentEntityState.lines[0].sku, "the floor's schema does not fit the changes"
    began = time.perf_counter()
    parsed(spark, bootstrap_servers, topic).write.format("noop").mode("overwrite").save()
    return count / (time.perf_counter() - began)


def aggregate(spark: SparkSession, archive: str) -> DataFrame:
    """The bench's view by hand: what each change takes from one group and gives to another."""
    return spark.sql(
        f"""
        SELECT state.country, state.status, sum(weight) AS purchases,
               sum(weight * state.total) AS total
        FROM delta.`{archive}` LATERAL VIEW
            inline(array(
                named_struct('weight', -1, 'state', original),
                named_struct('weight', 1, 'state', current)
            )) AS weight, state
        WHERE state IS NOT NULL
        GROUP BY state.country, state.status
        HAVING sum(weight) <> 0
        """
    )
