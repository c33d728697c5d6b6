"""The Spark application: keeper, archive and dead letters of a project, in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Final, Protocol

from pyspark.sql import SparkSession

from everstate.changes import EntityType
from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.errors import EverstateError, Fenced, SparkLost
from everstate.local import Tell, spark_jars
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.parts import Journal, Run, run_parts, states_folder, waits, works
from everstate.pipeline.archiver import ArchivedBatch, Archiver
from everstate.pipeline.build import Builder
from everstate.pipeline.compact import compact
from everstate.pipeline.dead import DeadLetterSender
from everstate.pipeline.drift import drift_on_schedule
from everstate.pipeline.hanging import HangingTransactions
from everstate.pipeline.keep import Keeper
from everstate.pipeline.session import own_spark, spark_session
from everstate.pipeline.trail import Trailer
from everstate.pipeline.wire import DebeziumForm
from everstate.views.project import Project

log = logging.getLogger(__name__)

_COMPACT_POLL_S: Final = 5.0
_PREPARE_AGAIN_S: Final = 1.0


class PublishedProject(Project, Protocol):
    """A project whose changes are also published in other forms."""

    @property
    def debezium_forms(self) -> tuple[str, ...]:
        """Entity types that are published in Debezium's form too."""


class PipelineApplication:
    """Keeps the views and the archive of a project until it is told to stop.

    The keeper, the archive of each entity type, the scheduled compaction, the dead letters, the
    alarm for open transactions and the scheduled look for drift (of the ``truths``) each are a
    part of their own, and share one Spark session. A part that fails stops alone and is started
    again; a lost JVM, or another pipeline in this one's place, ends all of them.
    """

    def __init__(
        self, config: Config, project: PublishedProject, truths: Mapping[str, Truth] | None = None
    ) -> None:
        self._config, self._project = config, project
        self._truths = truths or {}
        self._prepared = threading.Event()
        """The keeper has made tables and positions."""

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set, then finish the batches in hand and the last archive step."""
        journal = Journal("pipeline", states_folder(self._config.project.data_dir))
        spark_jars(self._config, Tell(journal.doing))
        journal.doing("starting Spark")
        name = f"everstate {self._project.name}"
        with (
            own_spark(self._config, app_name=name) as spark,
            closing(Offsets(self._config)) as offsets,
            closing(Topics(self._config)) as topics,
        ):
            run_parts(
                journal,
                self._parts(spark, offsets, topics),
                stop,
                fatal=(SparkLost, Fenced),
            )

    def _parts(self, spark: SparkSession, offsets: Offsets, topics: Topics) -> dict[str, Run]:
        """What each part does; it is called again when the part is started again."""
        names = list(self._project.entities)
        changelogs = [topics.names.changes(name) for name in names]
        parts: dict[str, Run] = {
            "keeper": partial(self._keep, spark),
            "trailing-views": partial(self._catch_up, spark),
            "builds": partial(self._build, spark),
            "dead-letters": self._send_dead_letters,
            "compaction": self._compact_on_schedule,
            "transactions": lambda stop: HangingTransactions(offsets, changelogs).run(stop),
        }
        for name, entity_type in self._project.entities.items():
            parts[f"archive-{name}"] = partial(
                _archive, spark, self._config, entity_type, offsets, topics
            )
        if self._truths and self._config.drift.every_s > 0:
            parts["drift"] = drift_on_schedule(
                spark, self._config, self._project.entities, self._truths
            )
        for name in self._project.debezium_forms:
            parts[f"debezium-{name}"] = partial(self._publish_debezium, name)
        return parts

    def _keep(self, spark: SparkSession, stop: threading.Event) -> None:
        """Prepare the keeper, and keep the views; servers that are still starting are awaited."""
        keeper = Keeper(spark, self._config, self._project)
        try:
            while not stop.is_set():
                try:
                    keeper.prepare()
                    break
                except EverstateError as error:
                    if not error.retryable:
                        raise
                    log.warning("the keeper waits: %s", error)
                    waits(error, _PREPARE_AGAIN_S)
                    stop.wait(_PREPARE_AGAIN_S)
            else:
                return
            self._prepared.set()
            works()
            log.info("keeping %s", ", ".join(self._project.entities))
            keeper.run(stop)
        finally:
            keeper.close()

    def _catch_up(self, spark: SparkSession, stop: threading.Event) -> None:
        """Let views that are behind catch up, once the keeper has made the tables."""
        if _either(self._prepared, stop):
            trailer = Trailer(spark, self._config, self._project)
            try:
                trailer.run(stop)
            finally:
                trailer.close()

    def _build(self, spark: SparkSession, stop: threading.Event) -> None:
        """Build the versions of views that wait for it."""
        if _either(self._prepared, stop):
            builder = Builder(spark, self._config, self._project)
            try:
                builder.run(stop)
            finally:
                builder.close()

    def _send_dead_letters(self, stop: threading.Event) -> None:
        sender = DeadLetterSender(self._config)
        try:
            sender.run(stop)
        finally:
            sender.close()

    def _publish_debezium(self, name: str, stop: threading.Event) -> None:
        form = DebeziumForm(self._config, self._project.entities[name])
        try:
            form.run(stop)
        finally:
            form.close()

    def _compact_on_schedule(self, stop: threading.Event) -> None:
        """Compact each archive every `archive.compact_every_s`; an error waits for the next."""
        spark = spark_session(self._config)
        due = time.monotonic() + self._config.archive.compact_every_s
        while not stop.wait(_COMPACT_POLL_S):
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._config.archive.compact_every_s
            for entity_type in self._project.entities.values():
                try:
                    done = compact(spark, self._config, entity_type.name)
                    log.info("compacted the archive of %s: %s", entity_type.name, done)
                except EverstateError as error:
                    log.warning("compaction of %s: %s", entity_type.name, error)


def _either(event: threading.Event, stop: threading.Event) -> bool:
    """Wait for an event; false when ``stop`` came first."""
    while not event.wait(_PREPARE_AGAIN_S):
        if stop.is_set():
            return False
    return True


def _archive(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    offsets: Offsets,
    topics: Topics,
    stop: threading.Event,
) -> None:
    def log_batch(batch: ArchivedBatch) -> None:
        log.info(
            "archived %d changes of %s in %.1f s (commit %d)",
            batch.rows,
            batch.entity,
            batch.seconds,
            batch.commit_version,
        )

    archiver = Archiver(spark, config, entity_type, offsets=offsets, topics=topics)
    archiver.run(stop, on_batch=log_batch)
