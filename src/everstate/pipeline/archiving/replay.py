"""Writes a whole topic again from the archive, byte for byte (law 5), with Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from everstate.archive import ArchiveLog, Ledger, frozen
from everstate.archive.ordered import RECORD_COLUMNS
from everstate.config import Config
from everstate.errors import ArchiveError, LogError
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.pipeline.archiving.selection import Replayed, out_records
from everstate.pipeline.archiving.targets import prepare
from everstate.pipeline.spark.archived import lake_table
from everstate.pipeline.spark.outcomes import OUTCOME, outcome_rows, outcomes_of
from everstate.pipeline.spark.session import spark_errors

_BATCH_ROWS: Final = 5_000


def replay(
    spark: SparkSession,
    config: Config,
    entity: str,
    topic: str,
    *,
    generation: int = 1,
) -> Replayed:
    """Write every archived record of an entity type to ``topic``, byte for byte.

    Partition, order, key (or its absence), value (tombstones included), headers and timestamp are
    the same; unreadable records are written too. Offsets are dense in the new topic: offsets for
    which the log never served a record (markers, aborted records) are not reproduced. A missing
    topic is created without a retention limit. Raises LogError when the topic is one of the
    project's own, is not empty or has another number of partitions, NoArchive, ArchiveError for
    a generation that is not archived, Unavailable. Cost: one sort by offset; each partition is
    written by one task.
    """
    began = time.monotonic()
    version, note = frozen(ArchiveLog(config, entity), Ledger(config, entity))
    if generation not in note.positions:
        known = ", ".join(map(str, sorted(note.positions)))
        raise ArchiveError(
            f"the archive of {entity} has no generation {generation}.",
            advice=f"Generations that the archive has: {known}.",
        )
    partitions = len(note.positions[generation])
    if (existing := prepare(config, topic, partitions)) != partitions:
        raise LogError(
            f"topic {topic} has {existing} partitions, and the archive has {partitions}; nothing "
            "was written.",
            advice="Name a topic that does not exist yet.",
        )
    rows = (
        lake_table(spark, config, entity, version=version)
        .where(F.col("generation") == generation)
        .select(*RECORD_COLUMNS)
        .repartition(partitions, "partition")
        .sortWithinPartitions("partition", "offset")
    )
    write = _WritePartitions(config, topic)
    with spark_errors(f"replaying {entity} to {topic}"):
        counts = outcomes_of(rows.mapInArrow(lambda batches: write(batches), OUTCOME))
    return Replayed(
        entity=entity,
        to=topic,
        records=sum(count["records"] for count in counts),
        partitions=partitions,
        seconds=time.monotonic() - began,
        restamped=sum(count["restamped"] for count in counts),
    )


@dataclass(frozen=True)
class _WritePartitions:
    """Writes the rows of a Spark task, which are whole partitions in order."""

    config: Config
    topic: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written, restamped = 0, 0
        skips = self._already_written()
        with Producer(self.config, client_id="everstate-replay") as producer:
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    for record in out_records(self.topic, batch.slice(start, _BATCH_ROWS)):
                        written += 1
                        restamped += record.timestamp_ms == 0
                        partition = record.partition or 0
                        if skips.get(partition, 0) > 0:
                            skips[partition] -= 1
                        else:
                            producer.send(record)
            producer.flush(300)
        yield outcome_rows([{"records": written, "restamped": restamped}])

    def _already_written(self) -> dict[int, int]:
        """Records per partition that an earlier attempt of this task wrote.

        They are the end offsets of its partitions, because the topic was empty.
        """
        context = TaskContext.get()
        if context is None or context.attemptNumber() == 0:
            return {}
        with Offsets(self.config) as offsets:
            ends = offsets.high_watermarks([self.topic])
        return {partition: end for (_, partition), end in ends.items()}
