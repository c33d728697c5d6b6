"""Views in other stores: keeper, store and both are killed under load (acceptance 3 of issue 51).

A round is `kill -9` of the pipeline with its Spark, of the store's server, and of both at once, in
any order and at random moments; now and then while a version is built. Then the server hangs until
the views in PostgreSQL have gone on without it. The pipeline is started again by `everstate run`,
and the store's server by the test. FAULT_SEED repeats the order and the moments of a run, and
``--kills`` sets the number of rounds. Afterwards the store's own client must read what plain Python
makes of the log, and every proof must hold.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from fault_harness import Seen, fold, read_log
from fault_rig import ROLES, Rig, kill_family
from stores_app import HEAVY, MOVES, app_in

from kit.opensearch import OpenSearchServer
from kit.served_cassandra import ServedCassandra
from kit.served_kafka import ServedKafka
from kit.served_lake import ServedLake
from kit.served_redis import ServedRedis
from kit.served_store import ServedStore
from tiers import kills

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SERVERS: tuple[type[ServedStore], ...] = (
    ServedRedis,
    OpenSearchServer,
    ServedCassandra,
    ServedLake,
    ServedKafka,
)
"""A store in each line."""
ROUNDS = kills(1, full=20)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
BUILT_EVERY_ROUNDS = 3
PROVED_EVERY_ROUNDS = 5
AWAY_S_MAX = 5.0
HEAVY_FROM = 50

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.spark,
    pytest.mark.timeout(900 + 400 * ROUNDS),
]


@dataclass
class Stage:
    """A project under load, and the server of its store."""

    rig: Rig
    served: ServedStore
    moments: random.Random

    def keeper(self) -> None:
        """Driver, JVM and Python workers at once."""
        self._kill(self._pipeline)

    def server(self) -> None:
        """The pipeline lives on, and keeps its other views meanwhile."""
        before = self.rig.roles()
        self._kill(self._server)
        assert self.rig.roles() == before

    def hang(self) -> None:
        """The server answers nothing until the views in PostgreSQL have passed what there is now.

        No version is built there: on two slots a build would wait together with the views.
        """
        before = self.rig.roles()
        self.wait(2.0)
        with self.served.hanging():
            self.home_goes_on()
        assert self.rig.roles() == before

    def home_goes_on(self) -> None:
        """Wait until a view in PostgreSQL has taken what is in the log now."""
        aim = self.rig.ends()

        def has_passed() -> bool:
            found = self.rig.kept("heavy")
            return all(found.get(partition, 0) >= end for partition, end in aim.items())

        self.rig.until("views in PostgreSQL go on", has_passed)

    def both(self) -> None:
        """One after the other, within a second."""
        self._kill(*self.moments.sample((self._pipeline, self._server), 2))

    def _kill(self, *whom: Callable[[], Callable[[], None]]) -> None:
        self.wait(2.0)
        back = []
        for kill in whom:
            back.append(kill())
            self.wait(1.0)
        self.wait(AWAY_S_MAX)
        for come_back in back:
            come_back()

    def _pipeline(self) -> Callable[[], None]:
        killed = self.rig.roles()["pipeline"]
        kill_family(killed)

        def is_back() -> bool:
            return self.rig.roles().get("pipeline", killed) != killed

        return lambda: self.rig.until("the pipeline is started again", is_back)

    def _server(self) -> Callable[[], None]:
        self.served.kill()
        return self.served.start

    def have_published(self, versions: Mapping[str, int]) -> bool:
        """Whether readers find these versions of views, or later ones."""
        try:
            found = {view: self.rig.published_version(view) for view in versions}
        except psycopg.errors.UndefinedTable:
            return False  # not made yet
        return all(found[view] >= version for view, version in versions.items())

    def wait(self, seconds_max: float) -> None:
        time.sleep(self.moments.random() * seconds_max)

    def read(self, view: str) -> list[tuple[Any, ...]]:
        """Key, region and weight of the rows that the store's own client finds."""
        found = self.served.read(self.rig.config, view, "append" if view == MOVES else "row")
        assert found is not None
        return in_order((row["_key"], row.get("region"), int(row["weight"])) for row in found)

    def prove(self, spark: SparkSession) -> None:
        """Compare what readers find with the log, and let every view be proved."""
        from everstate.pipeline.proof.verify import verify_views

        self.rig.settle()
        log, _ = read_log(self.rig.config)
        assert len(log) > 100
        assert {view: self.read(view) for view in (HEAVY, MOVES)} == wanted(log)
        reports = verify_views(spark, self.rig.config, app_in(self.served.name), None)
        assert [report for report in reports if not report.holds] == []
        assert {HEAVY, MOVES} <= {report.name for report in reports}


def in_order(rows: Any) -> list[tuple[Any, ...]]:
    return sorted(rows, key=repr)


def wanted(log: list[Seen]) -> dict[str, list[tuple[Any, ...]]]:
    """What the views must be, from the log and in plain Python."""
    tables = fold(log)
    changed = [(key, state) for (key, _), (_, state) in tables.history.items()]
    heavy = [(key, s) for key, s in changed if s is not None and s["weight"] >= HEAVY_FROM]
    return {
        HEAVY: in_order((key, *row) for key, row in tables.heavy.items()),
        MOVES: in_order((key, state["region"], state["weight"]) for key, state in heavy),
    }


@pytest.fixture(params=SERVERS, ids=lambda served: served.name)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from staged(request.param, tmp_path_factory.mktemp("stores"))


def staged(server: type[ServedStore], folder: Path) -> Iterator[Stage]:
    """Servers with fsync, and `everstate run` with views in a store."""
    (place := folder / "store").mkdir()
    with server.alone(place) as served:
        with closing(Rig(folder, f"stores_app:{served.name}", served.section)) as rig:
            yield Stage(rig, served, random.Random(SEED))


def test_whatever_is_killed_views_in_the_store_are_what_they_must_be(
    stage: Stage, spark: SparkSession
) -> None:
    print(f"FAULT_SEED={SEED}")
    rig, builds = stage.rig, {HEAVY: 1, MOVES: 1}
    rig.start()
    rig.start_load()
    rig.until("the roles run", lambda: rig.roles().keys() == set(ROLES))
    rig.until("both views are published", lambda: stage.have_published(builds))
    for turn in range(1, ROUNDS + 1):
        rig.start_load()
        for kill in stage.moments.sample((stage.keeper, stage.server, stage.both), 3):
            if turn % BUILT_EVERY_ROUNDS == 1:
                builds[HEAVY] = rig.ask_rebuild(HEAVY)
            print(f"round {turn}: kill {kill.__name__}", flush=True)
            kill()
            rig.progress()
            rig.until("what was built is published", lambda: stage.have_published(builds))
        stage.hang()
        rig.progress()
        if turn == ROUNDS or turn % PROVED_EVERY_ROUNDS == 0:
            stage.prove(spark)
