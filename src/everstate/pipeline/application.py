"""The Spark application: keeper, archive and dead letters of a project, in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.pipeline.archiver import ArchivedBatch, Archiver
from everstate.pipeline.compact import compact
from everstate.pipeline.dead import DeadLetterSender
from everstate.pipeline.drift import drift_on_schedule
from everstate.pipeline.hanging import HangingTransactions
from everstate.pipeline.keep import Keeper
from everstate.pipeline.session import spark_session
from everstate.pipeline.wire import DebeziumForm
from everstate.views.project import Project

log = logging.getLogger(__name__)

_JOIN_S: Final = 120.0
_COMPACT_POLL_S: Final = 5.0


class PublishedProject(Project, Protocol):
    """A project whose changes are also published in other forms."""

    @property
    def debezium_forms(self) -> tuple[str, ...]:
        """Entity types that are published in Debezium's form too."""


class PipelineApplication:
    """Keeps the views and the archive of a project until it is told to stop.

    The keeper, the archive of each entity type, the scheduled compaction, the dead letters, the
    alarm for open transactions and the scheduled look for drift (of the ``truths``) each have a
    thread, and share one Spark session. When one ends with an error that does not pass, all end,
    and :meth:`run` raises it.
    """

    def __init__(
        self, config: Config, project: PublishedProject, truths: Mapping[str, Truth] | None = None
    ) -> None:
        self._config, self._project = config, project
        self._truths = truths or {}
        self._failure: BaseException | None = None

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set, then finish the batches in hand and the last archive step."""
        spark = spark_session(self._config, app_name=f"everstate {self._project.name}")
        keeper, sender = Keeper(spark, self._config, self._project), DeadLetterSender(self._config)
        offsets, topics = Offsets(self._config), Topics(self._config)
        try:
            self._prepare(keeper, stop)
            changelogs = [topics.names.changes(name) for name in self._project.entities]
            parts: dict[str, Callable[[threading.Event], None]] = {
                "keeper": keeper.run,
                "dead-letters": sender.run,
                "compaction": self._compact_on_schedule,
                "transactions": HangingTransactions(offsets, changelogs).run,
            }
            for name, entity_type in self._project.entities.items():
                archiver = Archiver(
                    spark, self._config, entity_type, offsets=offsets, topics=topics
                )
                parts[f"archive-{name}"] = _archive(archiver)
            if self._truths and self._config.drift.every_s > 0:
                parts["drift"] = drift_on_schedule(spark, self._config, self._truths)
            for name in self._project.debezium_forms:
                form = DebeziumForm(self._config, self._project.entities[name])
                parts[f"debezium-{name}"] = _closing(form)
            threads = [
                threading.Thread(target=self._guarded, args=(part, stop), name=name, daemon=True)
                for name, part in parts.items()
            ]
            for thread in threads:
                thread.start()
            log.info("keeping %s", ", ".join(self._project.entities))
            stop.wait()
            for thread in threads:
                thread.join(_JOIN_S)
        finally:
            keeper.close()
            sender.close()
            offsets.close()
            topics.close()
            spark.stop()
        if self._failure is not None:
            raise self._failure

    def _prepare(self, keeper: Keeper, stop: threading.Event) -> None:
        """Prepare the keeper; servers that are still starting are waited for."""
        while True:
            try:
                keeper.prepare()
                return
            except EverstateError as error:
                if not error.retryable or stop.is_set():
                    raise
                log.warning("the pipeline waits: %s", error)
                stop.wait(1.0)

    def _guarded(self, part: Callable[[threading.Event], None], stop: threading.Event) -> None:
        """Run a part; an error that does not pass stops all parts and is kept for the caller."""
        try:
            part(stop)
        except BaseException as error:
            log.error("%s ended: %s", threading.current_thread().name, error)
            if self._failure is None:
                self._failure = error
            stop.set()

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


def _archive(archiver: Archiver) -> Callable[[threading.Event], None]:
    def told(batch: ArchivedBatch) -> None:
        log.info(
            "archived %d changes of %s in %.1f s (commit %d)",
            batch.rows,
            batch.entity,
            batch.seconds,
            batch.commit_version,
        )

    return lambda stop: archiver.run(stop, on_batch=told)


def _closing(form: DebeziumForm) -> Callable[[threading.Event], None]:
    def run(stop: threading.Event) -> None:
        try:
            form.run(stop)
        finally:
            form.close()

    return run
