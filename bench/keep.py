"""keep: a filled log into latest and one linear view, beside two floors; and with history."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.postgres_floors import keep_bare
from bench.project import app, lean
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from bench.spark_floors import read_and_parse
from everstate.app import App
from everstate.config import Config
from everstate.pipeline.keep import Keeper

COUNT = 1_000_000


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    filled = session.filled(count)

    def floor() -> float:
        return read_and_parse(session.spark, filled.bootstrap_servers, changes_topic(filled), count)

    def bare() -> float:
        config = session.fresh(filled)
        try:
            return keep_bare(config, changes_topic(config), config.log.partitions, count)
        finally:
            session.drop(config)

    def ours(project: App = lean) -> float:
        config = session.fresh(filled)
        try:
            return count / sum(seconds for _, seconds in kept(session, config, count, project))
        finally:
            session.drop(config)

    values, beneath = session.alternate(floor, ours, warm=4)
    beside, bares = session.alternate(bare, ours, warm=0)
    with_history = [ours(app) for _ in range(session.repeat)]
    started = [_with_start_up(session, filled, count) for _ in range(session.repeat)]
    return [
        result(
            "keep",
            f"{count:,} changes → latest and one linear view, warm",
            "changes/s",
            values,
            floors=beneath,
            floor_is="Spark Kafka → from_json → noop",
            reach=Reach(ratio_min=0.35),
        ),
        result(
            "keep",
            "the same beside one thread of Python",
            "changes/s",
            beside,
            floors=bares,
            floor_is="bare consumer → PostgreSQL",
        ),
        result(
            "keep",
            f"{count:,} changes, with the start of Spark",
            "changes/s",
            started,
            reach=Reach(value_min=40_000),
        ),
        result("keep", "history too, warm", "changes/s", with_history),
    ]


def kept(
    session: Session, config: Config, count: int, project: App = lean
) -> list[tuple[int, float]]:
    """Keep a whole log in new views; (changes, seconds) of each step."""
    keeper = Keeper(session.spark, config, project)
    keeper.prepare()
    steps: list[tuple[int, float]] = []
    done = 0
    while done < count:
        began = time.perf_counter()
        batch = keeper.step()
        assert batch is not None, f"nothing to keep after {done:,} of {count:,} changes"
        done += batch.changes
        steps.append((batch.changes, time.perf_counter() - began))
    keeper.close()
    return steps


def _with_start_up(session: Session, filled: Config, count: int) -> float:
    """Changes a second of a new process, from its start to the last commit."""
    config = session.fresh(filled)
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "bench.keep"],
        input=config.model_dump_json(),
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    took = time.perf_counter() - began
    session.drop(config)
    return count / took


def main() -> None:
    """Keep the log of the project on stdin until its end; a process of its own."""
    from everstate.pipeline.session import spark_session

    config = Config.model_validate_json(sys.stdin.read())
    spark = spark_session(config)
    keeper = Keeper(spark, config, lean)
    keeper.prepare()
    while keeper.step() is not None:
        pass
    keeper.close()
    spark.stop()


if __name__ == "__main__":
    main()
