"""Moving a changelog into its archive: exactly once, because the position is in the commit."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from everstate.archive import (
    ArchiveLog,
    Commit,
    CommitNote,
    CommittedRange,
    Ledger,
    app_id,
    last_commit,
    table_path,
)
from everstate.archive.layout import TABLE_PROPERTIES
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, Fenced
from everstate.log.positions import Offsets, check_ends
from everstate.log.topics import TopicIdentity, Topics
from everstate.pipeline.spark.parse import parse, parsed_schema
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.source import fair_spans, read_ranges
from everstate.runtime.worker import Worker

logger = logging.getLogger("everstate.archive")

_LEDGER_APPENDS: Final = 50
_LEDGER_S: Final = 86_400
_RETENTION_TIMES_MAX: Final = 8
_POOL: Final = "archive"


ARCHIVED = Counter("everstate_archive_records", "Records that were archived", ["entity"])


@dataclass(frozen=True, slots=True)
class ArchivedBatch:
    """What one step archived, from the statistics of its commit."""

    entity: str
    epoch: int
    commit_version: int
    rows: int
    unreadable: int
    seconds: float
    caught_up: bool
    """Whether this batch reached the end that the log had when it began."""


class Archiver(Worker):
    """Archives one entity type; one process at a time, a second one is fenced.

    A step reads the position from the table and the end offsets from the log, and commits the
    records between them in one Spark job. After a kill at any point, either the rows with their
    position are committed or nothing is. There is nothing to close: ``offsets`` and ``topics``
    belong to the caller.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        entity_type: EntityType,
        *,
        offsets: Offsets,
        topics: Topics,
        generation: int = 1,
    ) -> None:
        self._spark, self._config, self._entity_type = spark, config, entity_type
        self._offsets, self._topics, self._generation = offsets, topics, generation
        self._entity = entity_type.name
        self.doing = f"archiving of {self._entity}"
        self.retry_s = (0.5, config.pipeline.retry_s_max)
        self._round_due = time.monotonic() + config.archive.trigger_s
        """When the next round begins, which archives up to the end of the log."""
        self._topic = topics.names.changes(self._entity, generation)
        self._path = table_path(config, self._entity)
        self._log = ArchiveLog(config, self._entity)
        self._ledger = Ledger(config, self._entity)
        self._copied: tuple[int, float] | None = None
        self._writer = uuid.uuid4().hex
        self._schema: StructType | None = None

    def step(self) -> ArchivedBatch | None:
        """Archive the records since the last commit, at most ``archive.batch_changes_max``.

        Returns ``None`` when there is nothing new. Raises Fenced when another process archives
        this entity type, LogIdentityChanged, TopicResized or DataLoss when the log is not the one
        the archive belongs to or lost records (nothing is skipped), ArchiveError when the table or
        its ledger cannot be read or written, ArchiveFull, Unavailable;
        after every error the table is as it was. Cost: one Spark job, about 1 s and 10 µs a
        record on one core.
        """
        begun = time.monotonic()
        last = self._last()
        note = last.note
        assert note is not None, "a position comes with its note"
        self._fill_ledger(note.epoch)
        self._topics.check_identity({self._topic: archived_topic(note, self._generation)})
        position = note.positions[self._generation]
        self._check_begin(position)
        ends = self._ends()
        check_ends(f"the archive of {self._entity}", self._topic, position, ends)
        spans = fair_spans(position, ends, self._config.archive.batch_changes_max)
        if not spans:
            return None
        self._check_retention(position)
        ranges = tuple(
            CommittedRange(self._generation, partition, span.start, span.end)
            for partition, span in sorted(spans.items())
        )
        moved = {**position, **{partition: span.end for partition, span in spans.items()}}
        commit = self._append(
            parse(read_ranges(self._spark, self._config, {self._topic: spans}), self._entity_type),
            CommitNote(
                entity=self._entity,
                epoch=note.epoch + 1,
                writer=self._writer,
                ranges=ranges,
                positions={**note.positions, self._generation: moved},
                topics=note.topics,
            ),
        )
        ARCHIVED.labels(self._entity).inc(sum(file.rows for file in commit.added))
        batch = ArchivedBatch(
            entity=self._entity,
            epoch=note.epoch + 1,
            commit_version=commit.version,
            rows=sum(file.rows for file in commit.added),
            unreadable=sum(file.unreadable for file in commit.added),
            seconds=time.monotonic() - begun,
            caught_up=all(moved[partition] >= end for partition, end in ends.items()),
        )
        logger.info(
            "archived %d changes of %s in %.1f s (commit %d)",
            *(batch.rows, batch.entity, batch.seconds, batch.commit_version),
        )
        return batch

    def pause_s(self, done: object) -> float:
        """None until the end of the log; then until ``archive.trigger_s`` after the last round."""
        if isinstance(done, ArchivedBatch) and not done.caught_up:
            return 0.0
        now = time.monotonic()
        pause_s = max(0.0, self._round_due - now)
        self._round_due = now + pause_s + self._config.archive.trigger_s
        return pause_s

    def run(self, stop: threading.Event) -> None:
        """Archive every ``archive.trigger_s`` until ``stop`` is set, and once more then."""
        super().run(stop)
        try:
            self.step()
        except EverstateError as error:
            if not error.retryable:
                raise
            logger.warning("%s stops with records left: %s", self.doing, error)

    def catch_up(self) -> int:
        """Step until a batch reaches the end of the log; returns the records archived."""
        rows = 0
        while (batch := self.step()) is not None:
            rows += batch.rows
            if batch.caught_up:
                break
        return rows

    def _last(self) -> Commit:
        """The commit with the archive's position: the table's own, never a checkpoint (C25)."""
        return last_commit(self._log, self._ledger) or self._create()

    def _create(self) -> Commit:
        """The first commit: an empty table with the offsets at which the log began at that time."""
        begins = {p: offset for (_, p), offset in self._offsets.beginnings([self._topic]).items()}
        identity = self._topics.identity(self._topic)
        empty = self._spark.createDataFrame([], parsed_schema(self._entity_type))
        note = CommitNote(
            entity=self._entity,
            epoch=0,
            writer=self._writer,
            ranges=tuple(
                CommittedRange(self._generation, partition, offset, offset)
                for partition, offset in sorted(begins.items())
            ),
            positions={self._generation: begins},
            topics={self._generation: (identity.cluster_id, identity.topic_id)},
        )
        return self._append(empty, note)

    def _append(self, rows: DataFrame, note: CommitNote) -> Commit:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        with spark_errors(f"archiving {self._entity}"):
            if note.epoch > 0:
                rows = conformed(rows, self._table_schema())
            self._writer_of(rows, note).save(self._path)
        commit = self._log.last()
        written = None if commit is None else commit.note
        if commit is None or written is None or written.writer != note.writer:
            # Delta skips an append whose txnVersion is already committed, without an error (C25).
            raise Fenced(
                f"archiving {self._entity}: another process also archives it, and committed first; "
                "no record was archived twice.",
                advice="Run one archive for each entity type.",
            )
        assert written.epoch == note.epoch, "one writer appends one epoch at a time"
        return commit

    def _writer_of(self, rows: DataFrame, note: CommitNote) -> DataFrameWriter:
        writer = (
            rows.write.format("delta")
            .mode("append")
            .option("txnAppId", app_id(self._entity))
            .option("txnVersion", str(note.epoch))
            .option("userMetadata", note.to_json())
            .option("compression", "zstd")
        )
        # The first commit sets the table's properties; later ones may add columns of a new model.
        if note.epoch == 0:
            return writer.options(**TABLE_PROPERTIES)
        return writer.option("mergeSchema", "true")

    def _table_schema(self) -> StructType:
        """The table's columns; read once, because only this process changes them."""
        if self._schema is None:
            self._schema = self._spark.read.format("delta").load(self._path).schema
        return self._schema

    def _fill_ledger(self, epoch: int) -> None:
        """Copy commits to the ledger before an append may make Delta delete them (C26).

        Before the first append of this process, daily, and after 50 appends. ``epoch``: the newest.
        """
        now = time.monotonic()
        if self._copied is not None:
            copied, at = self._copied
            if epoch - copied < _LEDGER_APPENDS and now - at < _LEDGER_S:
                return
        self._ledger.sync(self._log)
        self._copied = epoch, now

    def _ends(self) -> dict[int, int]:
        return {p: end for (_, p), end in self._offsets.stable_ends([self._topic]).items()}

    def _check_begin(self, position: dict[int, int]) -> None:
        for (_, partition), begin in self._offsets.beginnings([self._topic]).items():
            if begin > position.get(partition, 0):
                raise DataLoss(
                    f"archiving {self._entity}: {self._topic}[{partition}] begins at offset "
                    f"{begin:,}, and the archive needs {position.get(partition, 0):,}; no record "
                    "was skipped.",
                    advice="Restore the topic, or see docs/howto/when-something-is-wrong.md.",
                )

    def _check_retention(self, position: dict[int, int]) -> None:
        """Raise the topic's retention when the archive lags more than half of it (C8)."""
        retention_ms = int(self._topics.config(self._topic).get("retention.ms", "-1"))
        if retention_ms <= 0:
            return
        half = int(time.time() * 1000) - retention_ms // 2
        young = self._offsets.at_time([self._topic], half)
        if any(position.get(partition, 0) < offset for (_, partition), offset in young.items()):
            configured = self._config.log.of(self._entity).changes_retention_hours * 3_600_000
            longer = min(2 * retention_ms, int(_RETENTION_TIMES_MAX * configured))
            logger.warning(
                "archive of %s lags more than half the retention of %s; its retention.ms is "
                "raised from %d to %d, so that no unread record is deleted",
                self._entity,
                self._topic,
                retention_ms,
                max(longer, retention_ms),
            )
            if longer > retention_ms:
                self._topics.set_config(self._topic, {"retention.ms": str(longer)})


def conformed(rows: DataFrame, table: StructType) -> DataFrame:
    """Parsed records in the column types of a table that was created under an earlier model.

    A typed column keeps its first type; a field that has another type now is null there. The raw
    message beside it is complete, and is read when the model has changed (`read_archive`).
    """
    known = {field.name: field.dataType for field in table}
    columns = []
    for field in rows.schema:
        kept, found = known.get(field.name), field.dataType
        if isinstance(kept, StructType) and isinstance(found, StructType) and kept != found:
            types = {part.name: part.dataType for part in kept}
            parts = [
                F.col(field.name)[part.name].alias(part.name)
                if types.get(part.name, part.dataType) == part.dataType
                else F.lit(None).cast(types[part.name]).alias(part.name)
                for part in found
            ]
            filled = F.when(F.col(field.name).isNotNull(), F.struct(*parts))
            columns.append(filled.alias(field.name))
        else:
            columns.append(F.col(field.name))
    return rows.select(*columns)


def archived_topic(note: CommitNote, generation: int) -> TopicIdentity:
    """The topic that an archive's positions of one generation belong to."""
    return TopicIdentity(*note.topics[generation], len(note.positions[generation]))
