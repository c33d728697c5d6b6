"""The Spark application: keeper, archive and dead letters of a project, in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
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
from everstate.views.control import opened_control
from everstate.views.project import Project

logger = logging.getLogger(__name__)

_COMPACT_POLL_S: Final = 5.0
_PREPARE_AGAIN_S: Final = 1.0


class _Work(Protocol):
    def run(self, stop: threading.Event) -> None: ...

    def close(self) -> None: ...


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
        project: Project,
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
        config, project = self._config, self._project
        changelogs = [topics.names.changes(name) for name in project.entities]
        work: dict[str, Callable[[], _Work]] = {
            "trailing-views": lambda: Trailer(spark, config, project, self._turns, failed=False),
            "failed-views": lambda: Trailer(spark, config, project, self._turns, failed=True),
            "builds": lambda: Builder(spark, config, project),
            "refreshes": lambda: Refresher(config, project),
            "throttled": lambda: Releaser(config, project),
            "answers": lambda: Answers(spark, config, project),
        }
        parts: dict[str, PartRun] = {
            "keeper": partial(self._keep, spark),
            **{name: partial(self._run, make) for name, make in work.items()},
            "dead-letters": partial(_run_at_once, lambda: DeadLetterSender(config)),
            "compaction": self._compact_on_schedule,
            "transactions": lambda stop: HangingTransactions(offsets, changelogs).run(stop),
        }
        for name, entity_type in project.entities.items():
            parts[f"archive-{name}"] = partial(
                _archive, spark, config, entity_type, offsets, topics
            )
        if self._truths and config.drift.every_s > 0:
            parts["drift"] = drift_on_schedule(spark, config, project.entities, self._truths)
        if config.views.recompute_every_s > 0:
            parts["recompute"] = recompute_on_schedule(spark, config, project)
        for name in project.debezium_forms:
            form = partial(DebeziumForm, config, project.entities[name])
            parts[f"debezium-{name}"] = partial(_run_at_once, form)
        for name, derivation in project.derivations.items():
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
        with opened_control(self._config) as control:
            retire_topics(control, {*self._project.derivations, *self._project.refused_views})

    def _run(self, make: Callable[[], _Work], stop: threading.Event) -> None:
        """Do the work of a part that needs the tables, once the keeper has created them."""
        if _either(self._prepared, stop):
            _run_at_once(make, stop)

    def _derive(self, spark: SparkSession, derivation: Derivation, stop: threading.Event) -> None:
        if _either(self._prepared, stop):
            with closing(Deriver(self._config, self._project, derivation, spark)) as deriver:
                deriver.prepare()
                deriver.run(stop)

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


def _run_at_once(make: Callable[[], _Work], stop: threading.Event) -> None:
    with closing(make()) as work:
        work.run(stop)


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
