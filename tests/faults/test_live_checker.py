"""The readers of the kill tests' checker, on a live project that is broken in each way (law 10).

`test_kill_checker` shows planted lists to its judgements; here the project is real: a store, a
log, views and a lake, each spoilt with the means of its own server.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO

import confluent_kafka
import psycopg
import pytest
from deltalake import DeltaTable, write_deltalake
from fault_app import ENTITY, app, one_write
from fault_harness import Seen, problems, read_log, read_state, read_topic
from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.archiving.archiver import Archiver
from everstate.pipeline.keeping.dead import DeadLetterSender
from everstate.pipeline.keeping.keep import Keeper
from everstate.sources.outbox import Relay
from everstate.sources.stores.postgres import EntityStore

pytestmark = pytest.mark.settings(log={"partitions": 2}, topics=[ENTITY])

WRITES = 150


@dataclass
class Project:
    """A project at rest, every part of it where the others are."""

    config: Config
    spark: SparkSession
    acknowledged: list[str] = field(default_factory=list)
    foreign: dict[tuple[int, int], str] = field(default_factory=dict)

    def write(self) -> None:
        said, rng = StringIO(), random.Random(5)
        with EntityStore(self.config, app.entity_type(ENTITY)) as store:
            store.install()
            for _ in range(WRITES):
                one_write(store, rng, said)
        self.acknowledged = said.getvalue().splitlines(keepends=True)
        with Relay(self.config, app.entities.values()) as relay:
            while relay.step():
                pass

    def follow(self) -> None:
        keeper, sender = Keeper(self.spark, self.config, app), DeadLetterSender(self.config)
        keeper.prepare()
        while keeper.step() is not None:
            pass
        keeper.close()
        while sender.step():
            pass
        sender.close()
        with Offsets(self.config) as offsets, Topics(self.config) as topics:
            kind = app.entity_type(ENTITY)
            Archiver(self.spark, self.config, kind, offsets=offsets, topics=topics).catch_up()

    def produce(self, topic: str, record: Seen, value: bytes | None = None) -> tuple[int, int]:
        """Write a record as no relay would; its partition and offset."""
        places: list[tuple[int, int]] = []

        def delivered(error: object, message: confluent_kafka.Message) -> None:
            assert error is None, error
            places.append((message.partition() or 0, message.offset() or 0))

        producer = confluent_kafka.Producer({"bootstrap.servers": self.config.bootstrap_servers})
        producer.produce(
            f"{self.config.log.prefix}.{ENTITY}.{topic}",
            key=record.key,
            value=record.value if value is None else value,
            partition=record.partition,
            on_delivery=delivered,
        )
        assert producer.flush(30) == 0
        return places[0]

    def sql(self, statement: str) -> None:
        with psycopg.connect(self.config.views_dsn) as connection:
            connection.execute(f"SET search_path TO {self.config.views.schema_name}".encode())
            done = connection.execute(statement.encode())
            assert done.rowcount == 1, statement

    def problems(self) -> set[str]:
        return set(problems(self.config, self.acknowledged, self.foreign))


@pytest.fixture
def project(config: Config, spark: SparkSession) -> Project:
    project = Project(config, spark)
    project.write()
    log, _ = read_log(config)
    project.foreign[project.produce("changes.g1", log[-1])] = "duplicate"
    project.foreign[project.produce("changes.g1", log[0], b"{no json")] = "unreadable"
    project.follow()
    return project


@pytest.mark.settings(log={"partitions": 1}, topics=[ENTITY])
def test_what_was_committed_is_read_though_its_marker_comes_later(
    config: Config, topic_prefix: str
) -> None:
    topic = TopicNames(topic_prefix).changes(ENTITY)
    address = {"bootstrap.servers": config.bootstrap_servers}
    producer = confluent_kafka.Producer({**address, "transactional.id": topic_prefix})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, "1")
    assert producer.flush(30) == 0
    decided = threading.Timer(0.5, producer.commit_transaction)
    decided.start()
    found, ends = read_topic(config, topic)
    decided.join()
    assert ([record.value() for record in found], ends) == ([b"1"], {0: 2})


def add_to_lake(project: Project) -> None:
    """A row that is there already, once more, by a writer that knows nothing of us."""
    table = DeltaTable(f"{project.config.archive_path}/{ENTITY}")
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")


def older_state(project: Project) -> None:
    newest = {record.key: record for record in read_state(project.config)}
    log, _ = read_log(project.config)
    older = next(each for each in log if newest[each.key].value != each.value)
    project.produce("state.g1", older)


def again_in_log(project: Project) -> None:
    log, _ = read_log(project.config)
    project.produce("changes.g1", log[3])


def again_in_dead(project: Project) -> None:
    ((letter,), _) = read_topic(project.config, f"{project.config.log.prefix}.{ENTITY}.dead")
    producer = confluent_kafka.Producer({"bootstrap.servers": project.config.bootstrap_servers})
    producer.produce(
        letter.topic() or "", key=letter.key(), value=letter.value(), headers=letter.headers()
    )
    assert producer.flush(30) == 0


def by_sql(statement: str) -> Callable[[Project], None]:
    return lambda project: project.sql(statement)


OUTBOX = "FROM everstate_store.outbox WHERE provenance::jsonb ->> 'correlation_id' IS"
ONE_OF_MANY = f"id = (SELECT max(id) {OUTBOX} NOT NULL)"
SINGLE = f"id = (SELECT max(id) {OUTBOX} NULL)"
DEFECTS: list[tuple[Callable[[Project], None], set[str]]] = [
    (by_sql("DELETE FROM parcel_latest__v1 WHERE key = (SELECT min(key) FROM parcel_latest__v1)"),
     {"latest"}),
    (by_sql("DELETE FROM parcel_history__v1 WHERE (key, version) = "
            "(SELECT min(key), 1 FROM parcel_history__v1)"), {"history"}),
    (by_sql("UPDATE fees_by_region__v1 SET n = n + 1 WHERE (g0, shard) = "
            "(SELECT min(g0), min(shard) FROM fees_by_region__v1)"), {"fees_by_region"}),
    (by_sql("DELETE FROM heavy__v1 WHERE key = (SELECT min(key) FROM heavy__v1)"), {"heavy"}),
    (by_sql("UPDATE position SET next_offset = next_offset - 1 WHERE partition = 0 "
            "AND view = 'heavy'"), {"position of heavy"}),
    (by_sql("UPDATE position SET next_offset = next_offset - 1 WHERE partition = 0 "
            "AND view = 'parcel_latest'"), {"position of parcel_latest"}),
    (by_sql("UPDATE counters SET duplicate = duplicate + 1 WHERE partition = 0"), {"counters"}),
    (again_in_dead, {".dead"}),
    (add_to_lake, {"archive"}),
    (older_state, {".state"}),
    (by_sql(f"UPDATE everstate_store.outbox SET after = '{{}}' WHERE {ONE_OF_MANY}"),
     {"is not as committed"}),
    (by_sql(f"DELETE FROM everstate_store.outbox WHERE {ONE_OF_MANY}"),
     {"was never committed", "of call"}),
    (by_sql(f"DELETE FROM everstate_store.outbox WHERE {SINGLE}"),
     {"was never committed", "acknowledged change"}),
    (again_in_log, {"is in the log 2 times", "counters", "position", "archive"}),
]  # fmt: skip


@pytest.mark.slow
def test_each_way_to_break_a_live_project_is_seen(project: Project) -> None:
    """The defects pile up in one project; each must add what it alone can say."""
    assert project.problems() == set()
    known: set[str] = set()
    for spoil, signs in DEFECTS:
        spoil(project)
        found = project.problems()
        new = found - known
        assert {sign for sign in signs if any(sign in each for each in new)} == signs, new
        known = found
