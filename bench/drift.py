"""drift: 100,000 entities compared with their log, 0.1 % repaired and 30 % published again."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psycopg

from bench.report import Result, result
from bench.session import Session
from everstate.changes.drift import DriftReport, Truth
from everstate.config import Config
from everstate.local import Stack
from everstate.log.topics import Topics
from everstate.pipeline.drift.check import check_drift
from everstate.sources.outbox import Relay
from everstate.sources.stores.cassandra import CassandraStore, Database, Publisher
from everstate.sources.stores.cassandra.truth import CassandraTruth
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.stores.postgres.truth import PostgresTruth
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder

COUNT = 100_000
_CALL = 5_000
_QUIET_S = 1.5


@dataclass
class _Side:
    """A source of truth with its way to the log, and how it forgets what is unpublished."""

    name: str
    config: Config
    store: Any
    truth: Truth
    step: Callable[[], int]
    lose: Callable[[], None]

    def put(self, keys: Sequence[int], note: str) -> None:
        for at in range(0, len(keys), _CALL):
            self.store.put_many(
                [
                    StoredOrder(order_id=f"o-{n:06}", note=f"{note} {n}")
                    for n in keys[at : at + _CALL]
                ],
                provenance=CLERK,
            )

    def publish(self) -> None:
        moved_at = time.monotonic()
        while time.monotonic() - moved_at < _QUIET_S:
            if self.step():
                moved_at = time.monotonic()
            time.sleep(0.02)


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    rows: list[Result] = []
    for make in (_postgres, _cassandra):
        with ExitStack() as cleanup:
            side = make(session, cleanup)
            with Topics(side.config) as topics:
                topics.ensure([ORDER.name])
            rows += _measure(session, side, count)
    return rows


def _measure(session: Session, side: _Side, count: int) -> list[Result]:
    side.put(range(count), "a")
    side.publish()
    rng = random.Random(7)

    def check(*, repair: bool) -> DriftReport:
        return check_drift(session.spark, side.config, ORDER, side.truth, repair=repair)

    check(repair=False)  # The first job of a session compiles what the next ones use.
    found: dict[str, list[float]] = {"no drift: compared": []}
    for _ in range(session.repeat):
        report = check(repair=False)
        assert report.drifted == 0
        found["no drift: compared"].append(report.seconds)
    for share, done in ((0.001, "republished"), (0.3, "rebuilt")):
        name = f"{share:.1%} drifted: compared and {done}"
        found[name], found[f"{name}, in the log"] = [], []
        for turn in range(session.repeat):
            side.put(rng.sample(range(count), int(count * share)), f"{name}{turn}")
            side.lose()
            began = time.perf_counter()
            report = check(repair=True)
            found[name].append(report.seconds)
            assert (report.action, report.repaired) == (done, int(count * share))
            side.publish()
            found[f"{name}, in the log"].append(time.perf_counter() - began - _QUIET_S)
            assert check(repair=False).drifted == 0
    return [
        result(f"drift {side.name}", f"{name} ({count:,} entities)", "s", values)
        for name, values in found.items()
    ]


def _postgres(session: Session, cleanup: ExitStack) -> _Side:
    config = session.fresh()
    cleanup.callback(session.drop, config)
    store = cleanup.enter_context(EntityStore(config, ORDER))
    store.install()
    relay = cleanup.enter_context(Relay(config, [ORDER]))

    def lose() -> None:
        with psycopg.connect(config.store_dsn) as connection:
            connection.execute("DELETE FROM everstate_store.outbox_pending")

    truth = PostgresTruth.of(config, ORDER.name, ORDER.schema_version)
    return _Side("PostgreSQL", config, store, truth, relay.step, lose)


def _cassandra(session: Session, cleanup: ExitStack) -> _Side:
    name = f"b{uuid.uuid4().hex[:10]}"
    section = session.config.cassandra.model_copy(update={"local": True, "keyspace": name})
    log = session.config.log.model_copy(update={"prefix": name})
    update = {"cassandra": section, "log": log}
    stack = cleanup.enter_context(Stack(session.config.model_copy(update=update)))
    config = stack.resolve()
    database = cleanup.enter_context(Database(config))
    store = CassandraStore(config, ORDER, database=database)
    store.install()
    publisher = cleanup.enter_context(Publisher(config, [ORDER], database=database))
    truth = CassandraTruth(config, ORDER.name, ORDER.schema_version)

    def lose() -> None:
        database.define(f"TRUNCATE {name}.unpublished")

    return _Side("Cassandra", config, store, truth, publisher.step, lose)
