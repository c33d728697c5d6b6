"""Building a version while no pipeline runs, in a Spark session that the command starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.refresh import Refresher
from everstate.pipeline.keeping.trail import Trailer
from everstate.views.project import Project

_POLL_S: Final = 0.3


def build_until(
    spark: SparkSession, config: Config, project: Project, store: str, is_done: Callable[[], bool]
) -> None:
    """Build the waiting versions of a store, let them catch up with the core, and publish them.

    Of a store only, so that no command waits for another one, which may not answer.
    ``is_done`` is called between the steps, and may raise. A pipeline that is started meanwhile
    does no harm: only one of them builds. Raises Unavailable, SparkLost.
    """
    builder = Builder(spark, config, project, store=store)
    trailer = Trailer(spark, config, project, store=store)
    refresher = Refresher(config, project)
    with closing(builder), closing(trailer), closing(refresher):
        while not is_done():
            built, passed = builder.step(), trailer.step() + refresher.step()
            if built is None and not passed:
                time.sleep(_POLL_S)
