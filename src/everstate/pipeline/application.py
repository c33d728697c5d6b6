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
from everstate.changes.derived import Derivation
from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.errors import EverstateError, Fenced, InvalidModelChange, SparkLost
from everstate.local import SentenceProgress, spark_jars
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.parts import Journal, PartRun, run_parts, states_folder, waits, works
from everstate.pipeline.archiving.archiver import ArchivedBatch, Archiver
from everstate.pipeline.archiving.compact import compact
from everstate.pipeline.derive.declare import retire_topics
from everstate.pipeline.derive.deriver import Deriver
from everstate.pipeline.drift.check import drift_on_schedule
from everstate.pipeline.hanging import HangingTransactions
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.dead import DeadLetterSender
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.refresh import Refresher
from everstate.pipeline.keeping.releasing import Releaser
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.keeping.turns import Turns
from everstate.pipeline.proof.recompute import recompute_on_schedule
from everstate.pipeline.requests.answers import Answers
from everstate.pipeline.spark.session import own_spark, spark_session
from everstate.pipeline.wire import DebeziumForm
from everstate.views.control import Control
from everstate.views.database import connect_views, views_errors
from everstate.views.project import Project

logger = logging.getLogger(__name__)

_COMPACT_POLL_S: Final = 5.0
_PREPARE_AGAIN_S: Final = 1.0


class PublishedProject(Project, Protocol):
    """A project whose changes are also published in other forms."""

    @property
    def debezium_forms(self) -> tuple[str, ...]:
        """Entity types that are published in Debezium's form too."""


class PipelineApplication:
    """Keeps the views and the archive of a project until it is asked to stop.

    The keeper, the archive of each entity type, the scheduled compaction, the dead letters, the
    alarm for open transactions and the scheduled check for drift (from the ``truths``) each are a
    part of their own, and share one Spark session. A part that fails is started again without
    stopping the others; a lost JVM, or another pipeline that took this one's place, ends all parts.
    """

    def __init__(
        self,
        config: Config,
        project: PublishedProject,
        truths: Mapping[str, Truth] | None = None,
        *,
        deployment: int | None = None,
        more: Mapping[str, PartRun] | None = None,
    ) -> None:
        """Prepare it.

        ``deployment``: the number of this start of the project, see :class:`Keeper`. ``more``:
        further parts that use the same Spark session, such as those that clean captures.
        """
        self._config, self._project, self._deployment = config, project, deployment
        self._truths, self._more = truths or {}, more or {}
        self._turns = Turns()
        self._prepared = threading.Event()
        """Set when the keeper has created its tables and positions."""

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set, then finish running batches and the last archive step."""
        journal = Journal("pipeline", states_folder(self._config.project.data_dir))
        spark_jars(self._config, SentenceProgress(journal.doing))
        journal.doing("starting Spark")
        name = f"everstate {self._project.name}"
        with (
            own_spark(self._config, app_name=name) as spark,
            closing(Offsets(self._config)) as offsets,
            closing(Topics(self._config)) as topics,
        ):
            run_parts(
                journal,
                {**self._parts(spark, offsets, topics), **self._more},
                stop,
                fatal=(SparkLost, Fenced, InvalidModelChange),
            )

    def _parts(self, spark: SparkSession, offsets: Offsets, topics: Topics) -> dict[str, PartRun]:
        """The function of each part; it is called again when the part is started again."""
        names = list(self._project.entities)
        changelogs = [topics.names.changes(name) for name in names]
        parts: dict[str, PartRun] = {
            "keeper": partial(self._keep, spark),
            "trailing-views": partial(self._catch_up, spark),
            "builds": partial(self._build, spark),
            "refreshes": self._refresh,
            "throttled": self._release,
            "answers": partial(self._answer, spark),
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
        if self._config.views.recompute_every_s > 0:
            parts["recompute"] = recompute_on_schedule(spark, self._config, self._project)
        for name in self._project.debezium_forms:
            parts[f"debezium-{name}"] = partial(self._publish_debezium, name)
        for name, derivation in self._project.derivations.items():
            if not derivation.is_raw:
                parts[f"derive-{name}"] = partial(self._derive, spark, derivation)
        return parts

    def _keep(self, spark: SparkSession, stop: threading.Event) -> None:
        """Prepare the keeper, and keep the views; servers that are still starting are awaited."""
        keeper = Keeper(
            spark, self._config, self._project, deployment=self._deployment, turns=self._turns
        )
        try:
            while not stop.is_set():
                try:
                    keeper.prepare()
                    break
                except EverstateError as error:
                    if not error.retryable:
                        raise
                    logger.warning("the views cannot be prepared yet: %s", error)
                    waits(error, _PREPARE_AGAIN_S)
                    stop.wait(_PREPARE_AGAIN_S)
            else:
                return
            self._retire_topics()
            self._prepared.set()
            works()
            logger.info("keeping %s", ", ".join(self._project.entities))
            keeper.run(stop)
        finally:
            keeper.close()

    def _retire_topics(self) -> None:
        """Record which derived topics the project does not declare any more."""
        with views_errors(self._config.views_dsn):
            with connect_views(self._config.views_dsn) as connection:
                control = Control(connection, self._config.views.schema_name)
                declared = {*self._project.derivations, *self._project.refused_views}
                retire_topics(control, declared)

    def _catch_up(self, spark: SparkSession, stop: threading.Event) -> None:
        """Let views that are behind catch up, once the keeper has created the tables."""
        if _either(self._prepared, stop):
            trailer = Trailer(spark, self._config, self._project, self._turns)
            try:
                trailer.run(stop)
            finally:
                trailer.close()

    def _build(self, spark: SparkSession, stop: threading.Event) -> None:
        """Build the versions of views that wait to be built."""
        if _either(self._prepared, stop):
            builder = Builder(spark, self._config, self._project)
            try:
                builder.run(stop)
            finally:
                builder.close()

    def _refresh(self, stop: threading.Event) -> None:
        """Refresh aggregates over joins."""
        if _either(self._prepared, stop):
            with closing(Refresher(self._config, self._project)) as refresher:
                refresher.run(stop)

    def _release(self, stop: threading.Event) -> None:
        """Let throttled views apply their pending changes."""
        if _either(self._prepared, stop):
            releaser = Releaser(self._config, self._project)
            try:
                releaser.run(stop)
            finally:
                releaser.close()

    def _derive(self, spark: SparkSession, derivation: Derivation, stop: threading.Event) -> None:
        """Keep a derived topic, once the keeper has created the tables."""
        if _either(self._prepared, stop):
            deriver = Deriver(self._config, self._project, derivation, spark)
            try:
                deriver.prepare()
                deriver.run(stop)
            finally:
                deriver.close()

    def _answer(self, spark: SparkSession, stop: threading.Event) -> None:
        """Carry out the requests of commands."""
        if _either(self._prepared, stop):
            answers = Answers(spark, self._config, self._project)
            try:
                answers.run(stop)
            finally:
                answers.close()

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
                    logger.info("compacted the archive of %s: %s", entity_type.name, done)
                except EverstateError as error:
                    logger.warning(
                        "the archive of %s cannot be compacted now: %s", entity_type.name, error
                    )


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
        logger.info(
            "archived %d changes of %s in %.1f s (commit %d)",
            batch.rows,
            batch.entity,
            batch.seconds,
            batch.commit_version,
        )

    archiver = Archiver(spark, config, entity_type, offsets=offsets, topics=topics)
    archiver.run(stop, on_batch=log_batch)
