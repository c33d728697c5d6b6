"""The parts of the pipeline: keeper, archive, dead letters and more, in one Spark session."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial

from pyspark.sql import SparkSession

from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.parts import PartRun, begins
from everstate.pipeline.archiving.archiver import Archiver
from everstate.pipeline.archiving.compact import compact
from everstate.pipeline.derive.declare import retire_topics
from everstate.pipeline.derive.deriver import Deriver
from everstate.pipeline.drift.check import ScheduledDrift
from everstate.pipeline.hanging import HangingTransactions
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.dead import DeadLetterSender
from everstate.pipeline.keeping.elsewhere import upkeep, upkeep_every_s
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.refresh import Refresher
from everstate.pipeline.keeping.releasing import Releaser
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.keeping.turns import Turns
from everstate.pipeline.proof.recompute import ScheduledProof
from everstate.pipeline.requests.answers import Answers
from everstate.pipeline.wire import DebeziumForm
from everstate.runtime.worker import Repeated, Worker, part_of
from everstate.views.control import opened_control
from everstate.views.project import Project
from everstate.views.tables import HOME

logger = logging.getLogger(__name__)


@contextmanager
def pipeline_parts(
    spark: SparkSession,
    config: Config,
    project: Project,
    truths: Mapping[str, Truth],
    *,
    deployment: int | None = None,
) -> Iterator[dict[str, PartRun]]:
    """The parts that keep the views and the archive of a project.

    The keeper, the archive of each entity type, the scheduled compaction, the dead letters, the
    alarm for open transactions and the scheduled check for drift (from the ``truths``) each are a
    part of their own. ``deployment``: the number of this start of the project, see
    :class:`Keeper`.
    """
    turns, prepared = Turns(), threading.Event()
    with closing(Offsets(config)) as offsets, closing(Topics(config)) as topics:
        changelogs = [topics.names.changes(name) for name in project.entities]
        keeper = partial(
            Keeper,
            *(spark, config, project),
            deployment=deployment,
            turns=turns,
            on_prepared=partial(_begin, config, project, prepared),
        )
        trailer = partial(Trailer, spark, config, project, turns)
        builder = partial(Builder, spark, config, project)

        def keep_elsewhere(store: str) -> None:
            """Begin the parts of a store, so that no view waits for another one's store."""
            begins(f"store-{store}", part_of(partial(trailer, store=store)))
            begins(f"builds-{store}", part_of(partial(builder, store=store)))
            task = (f"upkeep of {store}", partial(upkeep, config, store), upkeep_every_s(store))
            begins(f"readers-{store}", part_of(partial(Repeated, *task)))

        at_once: dict[str, Callable[[], Worker]] = {
            "keeper": keeper,
            "dead-letters": partial(DeadLetterSender, config),
            "compaction": partial(
                Repeated,
                *("compaction of the archives", partial(_compact, spark, config, project)),
                config.archive.compact_every_s,
                begins_idle=True,
            ),
            "transactions": partial(HangingTransactions, offsets, changelogs),
        }
        kept: dict[str, Callable[[], Worker]] = {
            "trailing-views": partial(trailer, failed=False, store=HOME),
            "failed-views": partial(trailer, failed=True, store=HOME),
            "builds": partial(builder, store=HOME, on_store=keep_elsewhere),
            "refreshes": partial(Refresher, config, project),
            "throttled": partial(Releaser, config, project),
            "answers": partial(Answers, spark, config, project),
        }
        for name, entity_type in project.entities.items():
            at_once[f"archive-{name}"] = partial(
                Archiver, spark, config, entity_type, offsets=offsets, topics=topics
            )
        if truths and config.drift.every_s > 0:
            at_once["drift"] = partial(ScheduledDrift, spark, config, project.entities, truths)
        if config.views.recompute_every_s > 0:
            at_once["recompute"] = partial(ScheduledProof, spark, config, project)
        for name in project.debezium_forms:
            at_once[f"debezium-{name}"] = partial(DebeziumForm, config, project.entities[name])
        for name, derivation in project.derivations.items():
            if not derivation.is_raw:
                kept[f"derive-{name}"] = partial(Deriver, config, project, derivation)
        yield {name: part_of(make) for name, make in at_once.items()} | {
            name: part_of(make, after=prepared) for name, make in kept.items()
        }


def _begin(config: Config, project: Project, prepared: threading.Event) -> None:
    """Let the other parts begin: the keeper has created its tables and positions."""
    with opened_control(config) as control:
        retire_topics(control, {*project.derivations, *project.refused_views})
    prepared.set()
    logger.info("keeping %s", ", ".join(project.entities))


def _compact(spark: SparkSession, config: Config, project: Project) -> None:
    """Compact each archive; one that cannot be compacted waits for the next time."""
    for name in project.entities:
        try:
            done = compact(spark, config, name)
            logger.info("compacted the archive of %s: %s", name, done)
        except EverstateError as error:
            logger.warning("the archive of %s cannot be compacted now: %s", name, error)
