"""The role `derive`: raw derived topics, in a Spark application of their own.

Their queries hold a task slot for each partition as long as they run (C23); the keeper and the
archive must not wait for these slots.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Final

from pyspark.sql import SparkSession

from everstate.changes.derived import Derivation
from everstate.config import Config
from everstate.errors import Fenced, SparkLost, Unavailable
from everstate.local import SentenceProgress, spark_jars
from everstate.log.topics import Topics
from everstate.parts import Journal, PartRun, run_parts, states_folder, waits
from everstate.pipeline.derive.raw import RawDeriver, slots_needed
from everstate.pipeline.spark.session import own_spark
from everstate.views.control import opened_control
from everstate.views.project import Project

_MADE_S: Final = 1.0


def run_raw(config: Config, project: Project, stop: threading.Event) -> None:
    """Keep the raw derived topics of a project until ``stop`` is set."""
    journal = Journal("derive", states_folder(config.project.data_dir))
    raw = {name: each for name, each in project.derivations.items() if each.is_raw}
    spark_jars(config, SentenceProgress(journal.doing))
    journal.doing("starting Spark")
    with own_spark(_with_slots(config, raw), app_name=f"everstate derive {project.name}") as spark:
        parts: dict[str, PartRun] = {
            f"derive-{name}": partial(_derive, config, project, each, spark)
            for name, each in raw.items()
        }
        run_parts(journal, parts, stop, fatal=(SparkLost, Fenced))


def _with_slots(config: Config, raw: Mapping[str, Derivation]) -> Config:
    """The settings with local slots for two queries per topic: an old and a new version."""
    if not config.pipeline.master.startswith("local"):
        return config
    with Topics(config) as topics:
        topics.ensure(each.entity for each in raw.values())
        partitions = {
            name: 2 * topics.partitions(topics.names.changes(each.entity))
            for name, each in raw.items()
        }
    slots = f"local[{slots_needed(partitions)}]"
    return config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"master": slots})}
    )


def _derive(
    config: Config,
    project: Project,
    derivation: Derivation,
    spark: SparkSession,
    stop: threading.Event,
) -> None:
    while not stop.is_set() and not _is_made(config, derivation.entity):
        waits(Unavailable("the pipeline has not created the tables of the views yet."), _MADE_S)
        stop.wait(_MADE_S)
    if not stop.is_set():
        with closing(RawDeriver(config, project, derivation, spark)) as deriver:
            deriver.prepare()
            deriver.run(stop)


def _is_made(config: Config, entity: str) -> bool:
    """Whether the core of an entity type has positions."""
    with opened_control(config) as control:
        control.install()
        return bool(control.core_vector(entity))
