"""C9: killed between store and log, again and again, under load: nothing is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cassandra_cases import committed, own_keyspace
from everstate.config import Config
from everstate.log.topics import Topics
from everstate.pipeline.drift.check import check_drift
from everstate.sources.stores.cassandra import Database, Publisher
from everstate.sources.stores.cassandra.truth import CassandraTruth
from everstate.testing.log_checker import Committed, LogReport, check_changes
from everstate.testing.store_contract import ORDER
from kit.settings import altered
from tiers import kills

KILLS = kills(3, full=100)
POINTS = ("written", "publish", "commit", "mark")
QUIET_S = 3.0
ENOUGH_BYTES = 1_000
"""Some twenty acknowledged writes: a loaded machine writes less in the same time."""


@pytest.fixture
def config(cassandra: Any, topic_prefix: str) -> Iterator[Config]:
    with own_keyspace(altered(cassandra.config, log={"prefix": topic_prefix})) as config:
        with Topics(config) as topics:
            topics.ensure([ORDER.name])
        yield config


class Rig:
    """Starts writing publishers, kills them, and judges what they left."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self._settings = folder / "settings.json"
        self._settings.write_text(config.model_dump_json())
        self._acknowledged = folder / "acknowledged"
        self._acknowledged.touch()

    def run_until_killed(self, point: str, seconds: float) -> None:
        """With a fault point it kills itself; otherwise we do, some time after it wrote enough."""
        child = Path(__file__).with_name("cassandra_child.py")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTATE_")}
        tests = str(Path(__file__).parents[1])
        arguments = [str(self._settings), str(self._acknowledged), point]
        with subprocess.Popen(
            [sys.executable, str(child), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": tests},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            if point in POINTS:
                process.wait(120)
            else:
                enough = self._acknowledged.stat().st_size + ENOUGH_BYTES
                while self._acknowledged.stat().st_size < enough:
                    time.sleep(0.05)
                time.sleep(seconds)
                process.kill()
        assert process.returncode == -signal.SIGKILL

    def problems(self) -> list[str]:
        """What is wrong after a publisher came back, and had time to settle everything."""
        with Database(self.config) as database:
            with Publisher(self.config, [ORDER], database=database) as publisher:
                quiet_at = time.monotonic()
                while time.monotonic() - quiet_at < QUIET_S:
                    if publisher.step():
                        quiet_at = time.monotonic()
                    time.sleep(0.05)
            rows = committed(database)
        report, blocks = LogReport(), defaultdict[str, list[tuple[int, int]]](list)
        check_changes(
            self.config, ORDER.name, [Committed(*row[:8]) for row in rows], report, blocks
        )
        there = {(row.key, str(row.version), row.change_id) for row in rows}
        lines = self._acknowledged.read_text().splitlines(keepends=True)
        # The last line may have been cut by the kill.
        told = [tuple(line.split()) for line in lines if line.endswith("\n")]
        for lost in set(told) - there:
            if lost[-1] != "None":
                report.tell(f"{lost}: acknowledged, and not in the store")
        assert len(rows) > 20
        return report.problems


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_C9_killed_between_store_and_log_under_load_it_loses_and_doubles_nothing(
    config: Config, tmp_path: Path, spark: SparkSession
) -> None:
    """Acceptance 2: 3 kills here, 100 in the full run; drift is 0 at the end."""
    rig, rng = Rig(config, tmp_path), random.Random()
    for turn in range(KILLS):
        point = POINTS[turn // 2 % len(POINTS)] if turn % 2 else ""
        rig.run_until_killed(point, 0.3 + rng.random())
    assert rig.problems() == []
    report = check_drift(spark, config, ORDER, CassandraTruth(config, ORDER.name, 1))
    assert (report.drifted, report.pending) == (0, 0)
    assert report.stored == report.logged > 0


def test_C9_publishing_without_the_index_of_unpublished_changes_is_caught(
    config: Config, tmp_path: Path
) -> None:
    """The planted defect: a publisher that is told only in its own process."""
    rig = Rig(config, tmp_path)
    for _ in range(2):
        rig.run_until_killed("blind", 0.7)
    assert any("missing" in problem for problem in rig.problems())
