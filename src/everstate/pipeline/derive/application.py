"""The role `derive`: raw derived topics, in a Spark application of their own.

Their queries hold a task slot for each partition as long as they run (C23); the keeper and the
archive must not wait for these slots.
"""

from __future__ import annotations

from functools import partial

from pyspark.sql import SparkSession

from everstate.changes.derived import Derivation
from everstate.config import Config
from everstate.log.topics import Topics
from everstate.parts import PartRun
from everstate.pipeline.derive.raw import RawDeriver, slots_needed
from everstate.runtime.worker import part_of
from everstate.views.project import Project


def raw_parts(spark: SparkSession, config: Config, project: Project) -> dict[str, PartRun]:
    """A part for each raw derived topic of a project."""
    return {
        f"derive-{name}": part_of(partial(RawDeriver, config, project, each, spark))
        for name, each in _raw(project).items()
    }


def with_slots(config: Config, project: Project) -> Config:
    """The settings with local slots for two queries per topic: an old and a new version."""
    if not config.pipeline.master.startswith("local"):
        return config
    raw = _raw(project)
    with Topics(config) as topics:
        topics.ensure(each.entity for each in raw.values())
        partitions = {
            name: 2 * topics.partitions(topics.names.changes(each.entity))
            for name, each in raw.items()
        }
    return config.replaced("pipeline", master=f"local[{slots_needed(partitions)}]")


def _raw(project: Project) -> dict[str, Derivation]:
    return {name: each for name, each in project.derivations.items() if each.is_raw}
