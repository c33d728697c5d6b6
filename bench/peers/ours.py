"""Everstate as a peer: a process of its own keeps the log of the project on stdin."""

from __future__ import annotations

import json
import sys
import time

from pyspark.sql import SparkSession

from bench.project import lean
from everstate.config import Config
from everstate.pipeline.keeping.keep import Keeper


def keep(spark: SparkSession, config: Config, first: int, both: int) -> tuple[float, float, float]:
    """When the views were there, and seconds for the first part, and for the rest."""
    keeper = Keeper(spark, config, lean)
    keeper.prepare()
    ready, half, done = time.time(), 0.0, 0
    while done < both:
        before, at = done, time.time()
        batch = keeper.step()
        assert batch is not None, f"nothing to keep after {done:,} of {both:,} changes"
        done += batch.changes
        if before < first <= done:
            # The step that passes the mark is divided by its changes.
            half = at + (time.time() - at) * (first - before) / batch.changes
    ended = time.time()
    keeper.close()
    return ready, half - ready, ended - half


def main() -> None:
    """Print seconds as JSON; the start is counted from before this process was made."""
    from everstate.pipeline.spark.session import spark_session

    given = json.load(sys.stdin)
    config = Config.model_validate(given["config"])
    spark = spark_session(config)
    ready, first_s, existing_s = keep(spark, config, given["first"], given["both"])
    found = {"start_s": ready - given["began"], "first_s": first_s, "existing_s": existing_s}
    print(json.dumps(found), flush=True)
    spark.stop()
