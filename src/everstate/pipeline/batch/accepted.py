"""Which archived records are *the changes* of an entity type at a position (C6, V5).

The batch side of every proof: no gate, no deltas, no state; only the archive, a position vector,
the places of the records that the core could not read, and window functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final
from uuid import uuid4

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

PartitionOffsets = Mapping[tuple[int, int], int]
"""(generation, partition) → next offset, exclusive."""
Places = Mapping[tuple[int, int], Sequence[int]]
"""(generation, partition) → offsets."""

REVIVED: Final = "dead for the core, and readable now"
_PLACE: Final = ("generation", "partition", "offset")


def accepted_changes(
    archive: DataFrame, positions: PartitionOffsets, dead: Places | None = None
) -> DataFrame:
    """The changes below a position vector that a correct keeper has applied; and a few others.

    Of several records with one key and version the first in log order counts. Versions count as
    far as they are dense from 1. Records at the places in ``dead`` never count: the core has
    dead-lettered them, and its verdict decides, whatever the present model can read. Returns the
    columns of the archive, and ``as_of``: the running maximum of ``occurred_at`` over the key's
    versions; and ``is_newest``: whether the key has no later version.

    Rows with a ``reason`` are no changes; they are returned so that they can be reported: records
    that the core accepted and the present model cannot read, and dead-lettered records that it can
    read (`REVIVED`). Cost: one shuffle and sort by key.
    """
    mine = _judged(archive.where(before(positions)), dead or {})
    in_log_order = Window.partitionBy("key").orderBy("version", "generation", "offset")
    by_version = Window.partitionBy("key").orderBy("version")
    first = F.col("__previous").isNull() | (F.col("__previous") < F.col("version"))
    dense = F.col("__rank") == F.col("version")
    readable = F.col("reason").isNull()
    # Unreadable records get a group of their own, so that none comes between two versions.
    apart = mine.withColumn("key", F.when(readable, F.col("key")))
    return (
        apart.withColumn("__previous", F.lag("version").over(in_log_order))
        .withColumn("__rank", F.dense_rank().over(by_version))
        .where(~readable | (dense & first))
        .withColumn("as_of", F.max("occurred_at").over(by_version))
        .withColumn("is_newest", readable & F.lead("version").over(by_version).isNull())
        .drop("__previous", "__rank")
    )


def only_changes(found: DataFrame) -> DataFrame:
    """Only the changes; a record that the core accepted and that cannot be read fails the job.

    The check is a metric of the job (`observe`), so it sees every record whatever columns and rows
    the job needs: no filter behind a metric can remove a record before it is counted.
    """
    is_lost = F.col("reason").isNotNull() & (F.col("reason") != REVIVED)
    place = F.concat_ws(
        " ",
        F.lit("offset"),
        "offset",
        F.lit("of partition"),
        "partition",
        F.lit("generation"),
        "generation",
    )
    message = F.concat_ws(
        "", F.lit("a change that the core accepted cannot be read ("), "reason", F.lit("): "), place
    )
    counted = F.count(F.when(is_lost, F.raise_error(message).cast("int"))).alias("lost")
    observed = found.observe(f"lost-{uuid4()}", counted)
    return observed.where(F.col("reason").isNull())


def mark_newest(changes: DataFrame) -> DataFrame:
    """Changes after some were filtered out, with ``is_newest`` computed again for the others."""
    by_version = Window.partitionBy("key").orderBy("version")
    return changes.withColumn("is_newest", F.lead("version").over(by_version).isNull())


def _judged(records: DataFrame, dead: Places) -> DataFrame:
    """Records without those that the core dead-lettered and the present model cannot read either.

    A dead-lettered record that the present model can read gets the reason `REVIVED`.
    """
    rows = [(*place, offset) for place, offsets in dead.items() for offset in offsets]
    if not rows:
        return records
    spark = records.sparkSession
    known = spark.createDataFrame(rows, "generation int, partition int, offset long")
    marked = records.join(
        F.broadcast(known.withColumn("__dead", F.lit(True))), list(_PLACE), "left"
    )
    is_dead = F.col("__dead").isNotNull()
    reason = F.when(is_dead, F.lit(REVIVED)).otherwise(F.col("reason"))
    kept = marked.where(~is_dead | F.col("reason").isNull()).withColumn("reason", reason)
    return kept.select(*records.columns)


def before(positions: PartitionOffsets) -> Column:
    """Whether a record lies before the position of its partition."""
    tests = [
        (F.col("generation") == generation)
        & (F.col("partition") == partition)
        & (F.col("offset") < end)
        for (generation, partition), end in positions.items()
    ]
    return reduce(lambda left, right: left | right, tests, F.lit(False))
