"""Acceptance 3: SIGKILL under load, at random moments; then everything is where it must be.

Two kills of each kind; 20 with EVERSTATE_FULL=1, any number with EVERSTATE_KILLS. FAULT_SEED
repeats the moments of a run. The stack is one of its own, with fsync. Nothing is started again
but what the test killed, or what the supervisor looks after in the test of the supervisor.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from fault_app import ENTITY, app
from fault_harness import problems
from fault_rig import Rig, left_after

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = int(os.environ.get("EVERSTATE_KILLS") or (20 if os.environ.get("EVERSTATE_FULL") else 2))
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
AWAY_S = 20.0
PROBLEMS_SHOWN = 20
ACKNOWLEDGED_MIN = 100

moments = random.Random(SEED)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.timeout(600 + 120 * KILLS),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("faults"))
    try:
        rig.start_supervised()
        yield rig
    finally:
        rig.close()


@pytest.fixture
def loaded(rig: Rig) -> Rig:
    """The rig with its writers at work, foreign records in the log, and its views following."""
    print(f"FAULT_SEED={SEED}")
    rig.start_load()
    rig.until("the views are made", lambda: bool(rig.kept()))
    rig.progress()
    rig.disturb()
    return rig


@pytest.fixture
def unsupervised(rig: Rig) -> Rig:
    """The rig with its two roles on their own."""
    if "everstate" in rig.processes:
        rig.until("the supervisor has its roles", lambda: rig.supervised() >= {"relay", "pipeline"})
        assert rig.stop("everstate") == 0
    for role in ("relay", "pipeline"):
        if role not in rig.processes:
            rig.start(role)
    return rig


def wait(seconds_max: float) -> None:
    time.sleep(moments.random() * seconds_max)


def prove(rig: Rig, spark: SparkSession) -> None:
    """Nothing lost, nothing doubled: by the checker, by law 6 and by law 5."""
    from everstate.pipeline.audit import audit
    from everstate.pipeline.verify import verify_views

    rig.settle()
    acknowledged = list(rig.acknowledged())
    assert len(acknowledged) > ACKNOWLEDGED_MIN
    assert any(" " in line for line in acknowledged), "no set-based write was acknowledged"
    found = problems(rig.config, acknowledged, rig.foreign)
    assert found[:PROBLEMS_SHOWN] == []
    for report in verify_views(spark, rig.config, app, None):
        assert report.holds, report
    archive = audit(spark, rig.config, ENTITY, against_log=True)
    assert archive.problems == []


def test_the_supervisor_starts_again_what_is_killed(loaded: Rig, spark: SparkSession) -> None:
    """`everstate run` itself: each role is killed once, and comes back without anybody's help."""
    for role in ("relay", "pipeline"):
        wait(2.0)
        loaded.kill_supervised(role)
        loaded.progress()
    prove(loaded, spark)
    restarts = [line for line in loaded.told("everstate").splitlines() if "ended with" in line]
    assert [line.partition(" ended with")[0].split()[-1] for line in restarts] == [
        "relay",
        "pipeline",
    ]


def test_the_relay_is_killed(unsupervised: Rig, loaded: Rig, spark: SparkSession) -> None:
    for _ in range(KILLS):
        wait(2.0)
        loaded.kill("relay")
        wait(0.5)
        loaded.start("relay")
        loaded.progress()
    prove(loaded, spark)


@pytest.mark.parametrize("server", ["kafka", "postgres"])
def test_a_server_is_killed(
    unsupervised: Rig, loaded: Rig, spark: SparkSession, server: str
) -> None:
    """One absence of 20 s, then short ones."""
    for turn in range(KILLS):
        wait(2.0)
        loaded.stack.kill(server)
        if turn == 0:
            time.sleep(AWAY_S)
        else:
            wait(3.0)
        loaded.stack.restart(server)
        loaded.progress()
    prove(loaded, spark)


def test_the_spark_application_is_killed(
    unsupervised: Rig, loaded: Rig, spark: SparkSession
) -> None:
    """By turns its driver alone (old tasks may still run beside the new ones), its JVM, all.

    Two kills are the first two kinds; the supervisor's test does the third.
    """
    for turn in range(KILLS):
        wait(3.0)
        orphans = []
        if turn % 3 == 0:
            orphans = loaded.orphan("pipeline")
        elif turn % 3 == 1:
            loaded.kill_jvm()
        else:
            loaded.kill("pipeline")
        loaded.start("pipeline")
        loaded.progress()
        assert left_after(orphans, 60) == []
    prove(loaded, spark)
