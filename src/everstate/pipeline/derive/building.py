"""Building a version of a derived topic: every accepted change of the archive, in order.

Spark reads and sorts; a thread fetches the rows, a partition at a time, and queues them in parts
that the publisher sends between its live batches. Memory is bounded by a few parts.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.changes.derived import read_message
from everstate.config import Config
from everstate.pipeline.batch.accepted import Places, accepted_changes, only_changes
from everstate.pipeline.derive.reading import AcceptedChange
from everstate.pipeline.spark.archived import read_archive
from everstate.pipeline.spark.progress import Progress, progress
from everstate.pipeline.spark.session import spark_errors

logger = logging.getLogger(__name__)

_PART_CHANGES: Final = 2_000
_PARTS_AHEAD: Final = 4
_POOL: Final = "build"
_PUT_S: Final = 0.2


def accepted_in_order(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    vector: Mapping[int, int],
    refused: Places,
) -> DataFrame:
    """Accepted changes below a vector, partition by partition in the order of acceptance.

    A held change was accepted with the change that released it: at the highest offset of its key's
    versions up to its own.
    """
    positions = {(1, partition): offset for partition, offset in vector.items()}
    archive = read_archive(spark, config, entity_type)
    changes = only_changes(accepted_changes(archive, positions, refused))
    upto = Window.partitionBy("key").orderBy("version")
    return changes.withColumn("accepted_at", F.max("offset").over(upto))


class TopicBuild:
    """Reads the changes that a version is built from; :meth:`part` returns the next of them."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        entity_type: EntityType,
        vector: Mapping[int, int],
        refused: Places,
    ) -> None:
        self.vector = dict(vector)
        self._parts: queue.Queue[list[AcceptedChange] | None] = queue.Queue(_PARTS_AHEAD)
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._begun, self._done = time.monotonic(), 0
        given: Any = (spark, config, entity_type, self.vector, refused)
        name = f"build-{entity_type.name}"
        threading.Thread(target=self._run, args=given, name=name, daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()

    def part(self) -> list[AcceptedChange] | None:
        """The next changes; `[]` while none are read yet, ``None`` after the last ones.

        Raises the error that ended the reading thread.
        """
        try:
            found = self._parts.get_nowait()
        except queue.Empty:
            return []
        if found is None and self._failure is not None:
            raise self._failure
        self._done += len(found or ())
        return found

    def progress(self) -> Progress:
        """How many of the changes were returned by :meth:`part`."""
        changes = sum(self.vector.values())
        share, seconds = self._done / max(1, changes), time.monotonic() - self._begun
        return progress("building", share, seconds, changes)

    def _run(self, spark: SparkSession, *given: Any) -> None:
        try:
            if any(self.vector.values()):
                for part in self._read(spark, *given):
                    if not self._put(part):
                        return
        except Exception as error:  # part() raises it in the caller's thread
            self._failure = error
        self._put(None)

    def _put(self, part: list[AcceptedChange] | None) -> bool:
        while not self._ended.is_set():
            try:
                self._parts.put(part, timeout=_PUT_S)
            except queue.Full:
                continue
            return True
        return False

    def _read(self, spark: SparkSession, *given: Any) -> Iterator[list[AcceptedChange]]:
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        with spark_errors("building a derived topic"):
            rows = (
                accepted_in_order(spark, *given)
                .withColumn("at", F.unix_millis("timestamp"))
                .select(
                    "partition", "offset", "at", "raw_key", "raw_value", "accepted_at", "version"
                )
                .repartition(len(self.vector), "partition")
                .sortWithinPartitions("partition", "accepted_at", "version")
            )
            part: list[AcceptedChange] = []
            for row in rows.toLocalIterator():
                key = None if row.raw_key is None else bytes(row.raw_key)
                message = read_message(bytes(row.raw_value))
                part.append(AcceptedChange(row.partition, row.offset, row.at, key, message))
                if len(part) >= _PART_CHANGES:
                    yield part
                    part = []
            if part:
                yield part
