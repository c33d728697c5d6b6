"""Acceptance 3: SIGKILL under load, at random moments; then everything is where it must be.

`everstate run`, its roles, Spark and both servers are killed in one schedule: the pipeline and
Kafka once; in the full run every kind 20 times, with ``--kills`` any number of times. FAULT_SEED
repeats the order and the moments of a run. The stack is one of its own, with fsync. The test
starts again only the servers; the roles are the supervisor's, and a role that was not killed must
live on.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from fault_app import ENTITY, app
from fault_harness import problems
from fault_rig import ROLES, Rig, kill_family, left_after

from processes_seen import named
from tiers import counted, kills

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS = kills(1, full=20)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
PROOF_EVERY_ROUNDS = 5
AWAY_S = counted(8.0, full=20.0)
PROBLEMS_SHOWN = 20
ACKNOWLEDGED_MIN = 100

moments = random.Random(SEED)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.timeout(600 + 300 * ROUNDS),
]


@pytest.fixture
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with closing(Rig(tmp_path_factory.mktemp("faults"))) as rig:
        yield rig


def wait(seconds_max: float) -> None:
    time.sleep(moments.random() * seconds_max)


def relay_and_all_of_it(rig: Rig) -> None:
    kill_role(rig, "relay")


def pipeline_and_all_of_it(rig: Rig) -> None:
    """Driver, JVM and Python workers at once, while a view is built; that is done afterwards."""
    asked = rig.ask_rebuild("fees_by_region")
    kill_role(rig, "pipeline")
    rig.until("it is published", lambda: rig.published_version("fees_by_region") == asked)


def kill_role(rig: Rig, role: str) -> None:
    killed = rig.roles()[role]
    kill_family(killed)
    rig.until(f"{role} is started again", lambda: rig.roles().get(role, killed) != killed)


def driver_alone(rig: Rig) -> None:
    """Old tasks may still run beside the new ones; what the driver started ends by itself."""
    killed = rig.roles()["pipeline"]
    family = killed.children(recursive=True)
    assert named(family, "java") != []
    killed.kill()
    rig.until("pipeline is started again", lambda: rig.roles().get("pipeline", killed) != killed)
    rig.progress()
    assert left_after(family, 60) == []


def jvm_alone(rig: Rig) -> None:
    """The process that drove it ends by itself."""
    driver = rig.roles()["pipeline"]
    for child in named(driver.children(recursive=True), "java"):
        child.kill()
    rig.until("pipeline is started again", lambda: rig.roles().get("pipeline", driver) != driver)


def kafka(rig: Rig) -> None:
    kill_server(rig, "kafka")


def postgres(rig: Rig) -> None:
    kill_server(rig, "postgres")


def kill_server(rig: Rig, server: str) -> None:
    """The roles wait for it: neither ends."""
    before = rig.roles()
    rig.stack.kill(server)
    time.sleep(AWAY_S)
    rig.stack.restart(server)
    rig.progress()
    assert rig.roles() == before


KINDS = counted(
    (pipeline_and_all_of_it, kafka),
    full=(relay_and_all_of_it, pipeline_and_all_of_it, driver_alone, jvm_alone, kafka, postgres),
)


def prove(rig: Rig, spark: SparkSession) -> None:
    """Nothing lost, nothing doubled: by the checker, by law 6 and by law 5."""
    from everstate.pipeline.archiving.audit import audit
    from everstate.pipeline.proof.verify import verify_views

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


def test_whatever_is_killed_under_load_nothing_is_lost_or_doubled(
    rig: Rig, spark: SparkSession
) -> None:
    print(f"FAULT_SEED={SEED}")
    rig.start()
    for turn in range(1, ROUNDS + 1):
        rig.start_load()
        rig.until("the roles run", lambda: rig.roles().keys() == set(ROLES))
        rig.until("the views are made", lambda: bool(rig.kept()))
        rig.progress()
        rig.disturb()
        for kind in moments.sample(KINDS, len(KINDS)):
            print(f"kill: {kind.__name__}", flush=True)
            wait(2.0)
            kind(rig)
            rig.progress()
        if turn == ROUNDS or turn % PROOF_EVERY_ROUNDS == 0:
            prove(rig, spark)
    assert rig.stop("everstate") == 0
