"""Live entities from `latest`, for a view whose archive lacks the log's first changes (C15).

Spark's tasks read them in one exported snapshot; the view begins at the core's position in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.config import Config
from everstate.pipeline.spark.states import state_read
from everstate.postgres import SharedSnapshot, shared_snapshot
from everstate.views.control import Control
from everstate.views.kinds import LatestPlan

_ROWS_PER_TASK: Final = 100_000
_FETCHED: Final = 10_000
_READ: Final = pa.schema(
    {"key": pa.string(), "version": pa.int64(), "partition": pa.int32(), "state": pa.string()}
)


@dataclass(frozen=True, slots=True)
class LatestRows:
    """A snapshot of `latest`: how to read it, and the core's position in it."""

    snapshot: SharedSnapshot
    query: str
    rows: int
    vector: dict[int, int]


@contextmanager
def latest_snapshot(config: Config, entity: str) -> Iterator[LatestRows]:
    """Hold a snapshot of the views' database; tasks can read in it as long as the block lasts."""
    with shared_snapshot(config.views_dsn) as (connection, snapshot):
        control = Control(connection, config.views.schema_name)
        table = control.table(LatestPlan.of(entity).table(1).name)
        query = f"SELECT key, version, partition, state::text FROM {table} WHERE state IS NOT NULL"
        rows = control.value(f"SELECT count(*) FROM {table}")
        yield LatestRows(snapshot, query, rows, control.core_vector(entity))


def live_of(spark: SparkSession, entity_type: EntityType, found: LatestRows) -> DataFrame:
    """Live entities in the columns of `Accepted.live`; what does not fit the model is null."""
    buckets = 1 + found.rows // _ROWS_PER_TASK
    numbers = spark.range(0, buckets, 1, buckets)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _read(found, number, buckets)

    texts = numbers.mapInArrow(run, "key string, version long, partition int, state string")
    message = F.concat(F.lit('{"state":'), F.col("state"), F.lit("}"))
    state = state_read(message, "state", entity_type)
    read = texts.select("key", "version", "partition", state.alias("v"))
    fields = [F.col("v")[name].alias(name) for name in entity_type.arrow_schema.names]
    own = [F.col(name).alias(f"__{name}") for name in ("version", "partition")]
    return read.select(F.col("key").alias("__key"), *own, *fields)


def _read(found: LatestRows, bucket: int, buckets: int) -> Iterator[pa.RecordBatch]:
    condition = f"('x' || substr(md5(key), 1, 4))::bit(16)::int % {buckets} = {bucket}"
    with found.snapshot.joined() as connection, connection.cursor(name="latest") as cursor:
        cursor.execute(f"{found.query} AND {condition}".encode())
        while rows := cursor.fetchmany(_FETCHED):
            columns: list[Any] = list(zip(*rows, strict=True))
            yield pa.RecordBatch.from_arrays(
                [pa.array(c, f.type) for c, f in zip(columns, _READ, strict=True)], schema=_READ
            )
