"""Law 6 under kills: views of every kind, killed while they are written (C15, C18).

`kill -9` of the task that writes the table of a view, or of the whole pipeline: once for each way
of writing that is a kind's own. In the full run each kind is aimed at in turn, 10 times;
``--kills`` sets how often.
FAULT_SEED repeats the order of a run. Afterwards each view is what its oracle says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING

import pytest
from kind_faults import KindsUnderFault

from everstate.pipeline.proof.verify import verify_views
from everstate.views.kinds.join_sums import JoinSumsPlan
from kind_app import app
from kind_oracle import read_wrongly
from tiers import counted, kills

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KILLS = kills(1, full=10)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
AIMED = {
    "extremes": "values",
    "ratios": "sums with a scale",
    "dearest": "rows in order",
    "dearest_of_shop": "last N",
    "by_hour": "windows",
    "moves": "rows of changes",
    "counted_late": "sums of changes",
    "found": "search",
    "active": "cache",
    "shops_over_time": "timeline",
    "with_shop": "join",
    "by_city": "aggregate over a join",
    "stays": "Python",
}
"""A view of each kind."""
WAYS = ("active", "by_city", "stays")
"""Views whose tables are written by code of their own: expiry, refreshes, functions."""

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindsUnderFault]:
    in_all = KILLS * len(counted(WAYS, full=AIMED))
    project = KindsUnderFault(tmp_path_factory.mktemp("kinds"), Random(SEED), kills=in_all)
    with closing(project):
        project.start()
        project.send()
        project.settle()
        yield project


@pytest.mark.full
@pytest.mark.timeout(300 + 120 * KILLS)
@pytest.mark.parametrize("name", counted(WAYS, full=AIMED))
def test_law_6_killed_while_it_is_written_a_view_is_what_it_must_be(
    project: KindsUnderFault, name: str
) -> None:
    print(f"FAULT_SEED={SEED}")
    caught = 0
    plan = app.views[name]
    # A view that is read from others is aimed at in the first of these.
    aim = name if isinstance(plan, JoinSumsPlan) or not plan.inputs else plan.inputs[0]
    for number in range(KILLS):
        caught += project.kill_while_it_writes(aim, whole=number % 3 == 0)
        if number == KILLS // 2:
            project.rebuild(aim if aim != name or not plan.inputs else plan.inputs[0])
    project.send()
    project.settle()
    print(f"{name}: {caught} of {KILLS} kills while it was written")
    assert read_wrongly(project.rows, project.told) == {}
    assert 2 * caught >= KILLS


@pytest.mark.full
@pytest.mark.timeout(900)
def test_law_6_afterwards_every_proof_holds(project: KindsUnderFault, spark: SparkSession) -> None:
    for report in verify_views(spark, project.config, app):
        assert report.holds, report
