"""keep: a filled log into latest and one linear view, beside two floors; and with history."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.cpu import Highest, Spent, spent
from bench.postgres_floors import keep_bare
from bench.project import app, lean
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from bench.spark_floors import read_and_parse
from everstate.app import App
from everstate.config import Config
from everstate.pipeline.keeping.keep import Keeper

COUNT = 1_000_000
_FLOOR = "Spark Kafka → from_json → noop"


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

    costs: list[Spent] = []
    memory: list[float] = []

    def ours(project: App = lean) -> float:
        config = session.fresh(filled)
        before = spent(session.servers)
        try:
            with Highest(session.servers) as highest:
                took = sum(seconds for _, seconds in kept(session, config, count, project))
            costs.append(spent(session.servers).since(before))
            memory.append(highest.workers_mib)
            return count / took
        finally:
            session.drop(config)

    warm = session.alternate(floor, ours, warm=4)
    cost, highest = costs[-session.repeat :], memory[-session.repeat :]
    session.say(f"[dim]  {cost[-1]}[/dim]")
    beside = session.alternate(bare, ours, warm=0)
    with_history = session.alternate(floor, lambda: ours(app), warm=1)
    session.say(f"[dim]  with history: {costs[-1]}[/dim]")
    started = [_with_start_up(session, filled, count) for _ in range(session.repeat)]
    million = [each.total * 1_000_000 / count for each in cost]
    return [
        _speed(f"{count:,} changes → latest and one linear view, warm", warm, _FLOOR, 0.42),
        result(
            "keep",
            "the same: processors of Spark, PostgreSQL and Kafka for a million",
            "s",
            million,
            reach=Reach(value_max=36),
        ),
        result(
            "keep",
            "the same: memory of all Python workers",
            "MiB",
            highest,
            reach=Reach(value_max=1536),
        ),
        _speed("the same beside one thread of Python", beside, "bare consumer → PostgreSQL"),
        result("keep", f"{count:,} changes, with the start of Spark", "changes/s", started),
        _speed("history too, warm", with_history, _FLOOR, 0.30),
    ]


def _speed(
    metric: str,
    measured: tuple[list[float], list[float]],
    floor_is: str,
    ratio_min: float | None = None,
) -> Result:
    values, floors = measured
    reach = Reach(ratio_min=ratio_min)
    return result(
        "keep", metric, "changes/s", values, floors=floors, floor_is=floor_is, reach=reach
    )


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
    from everstate.pipeline.spark.session import spark_session

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
