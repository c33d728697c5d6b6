"""Which archived records are *the changes* of an entity type at a position (C6).

The batch side of every proof: no gate, no deltas, no state; only the archive, a position vector
and window functions. It shares nothing with the keeper but the parser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

Positions = Mapping[tuple[int, int], int]
"""(generation, partition) → next offset, exclusive."""


Places = Mapping[tuple[int, int], Sequence[int]]
"""(generation, partition) → offsets."""


def accepted_changes(
    archive: DataFrame, positions: Positions, refused: Places | None = None
) -> DataFrame:
    """The changes below a position vector that a right keeper has applied.

    Of several records with one key and version the first in log order counts; versions count as
    far as they are dense from 1; unreadable records never do, nor those at the places that the
    store ``refused`` (few: each is told to Spark). Same columns as the archive, and ``as_of``: the
    running maximum of ``occurred_at`` over the key's versions. Cost: one shuffle and sort by key.
    """
    readable = archive.where(_before(positions) & F.col("reason").isNull())
    for (generation, partition), offsets in (refused or {}).items():
        here = (F.col("generation") == generation) & (F.col("partition") == partition)
        readable = readable.where(~(here & F.col("offset").isin(list(offsets))))
    in_log_order = Window.partitionBy("key").orderBy("version", "generation", "offset")
    by_version = Window.partitionBy("key").orderBy("version")
    return (
        readable.withColumn("__previous", F.lag("version").over(in_log_order))
        .withColumn("__rank", F.dense_rank().over(by_version))
        .where(F.col("__rank") == F.col("version"))
        .where(F.col("__previous").isNull() | (F.col("__previous") < F.col("version")))
        .withColumn("as_of", F.max("occurred_at").over(by_version))
        .drop("__previous", "__rank")
    )


def newest(changes: DataFrame) -> DataFrame:
    """The newest change of each key, deleted entities included; columns as given."""
    columns = [name for name in changes.columns if name != "key"]
    row = F.max_by(F.struct(*columns), "version").alias("row")
    return changes.groupBy("key").agg(row).select("key", "row.*").select(*changes.columns)


def _before(positions: Positions) -> Column:
    """Whether a record lies before the position of its partition."""
    tests = [
        (F.col("generation") == generation)
        & (F.col("partition") == partition)
        & (F.col("offset") < end)
        for (generation, partition), end in positions.items()
    ]
    return reduce(lambda left, right: left | right, tests, F.lit(False))
