"""A store publishes to one log; `everstate log begin` lets it publish to a new one (C8)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cassandra_cases import own_keyspace
from everstate.app import App
from everstate.cli.log import begin_log
from everstate.config import Config
from everstate.errors import LogError, LogIdentityChanged, TopicResized
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.drift.check import check_drift
from everstate.postgres import connect_views
from everstate.sources.outbox import Relay
from everstate.sources.stores.cassandra import CassandraStore, Database, Publisher
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.stores.postgres.truth import PostgresTruth
from everstate.testing.log_checker import read_topic
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from everstate.views.control import Control
from kit.settings import altered
from kit.verbs import verbs
from log_cases import grow

pytestmark = pytest.mark.settings(topics=[ORDER.name], drift={"settle_s": 0.1, "ranges": 64})

MODULE = """
from everstate.app import App
from everstate.testing.store_contract import ORDER, StoredOrder

app = App("shop")
app.entity(ORDER.name, key=ORDER.key)(StoredOrder)
"""


def another_log(config: Config, prefix: str) -> Config:
    """The project with what a new log needs."""
    changed = altered(
        config,
        log={"prefix": prefix},
        views={"schema_name": f"views_{prefix}"},
        archive={"path": f"{config.archive_path}-{prefix}"},
    )
    with Topics(changed) as topics:
        topics.ensure([ORDER.name])
    return changed


def relayed(config: Config) -> int:
    with Relay(config, [ORDER]) as relay:
        total = 0
        while moved := relay.step():
            total += moved
        return total


def versions(config: Config) -> Counter[int]:
    """How often each version stands in the log."""
    topic = TopicNames(config.log.prefix).changes(ORDER.name)
    return Counter(
        json.loads(record.value or b"")["version"] for record in read_topic(config, topic)
    )


def test_two_projects_on_one_store_do_not_split_its_changes(
    config: Config, store: EntityStore
) -> None:
    store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
    assert relayed(config) == 1
    store.put(StoredOrder(order_id="o-2"), provenance=CLERK)
    other = another_log(config, f"{config.log.prefix}b")
    with pytest.raises(LogIdentityChanged, match=r"go to topic .* configured is .*log begin"):
        relayed(other)
    assert versions(other) == Counter()
    assert relayed(config) == 1


def test_a_topic_that_got_partitions_takes_no_more_changes(
    config: Config, store: EntityStore
) -> None:
    store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
    relayed(config)
    grow(config, TopicNames(config.log.prefix).changes(ORDER.name), config.log.partitions + 1)
    store.put(StoredOrder(order_id="o-2"), provenance=CLERK)
    with pytest.raises(TopicResized):
        relayed(config)
    assert versions(config) == Counter({1: 1})


def test_a_new_log_gets_what_the_store_has_and_each_version_once(
    config: Config, store: EntityStore, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for note in ("a", "b", "c"):
        store.put(StoredOrder(order_id="o-1", note=note), provenance=CLERK)
    relayed(config)
    other = another_log(config, f"{config.log.prefix}b")
    monkeypatch.setenv("EVERSTATE_VIEWS_SCHEMA_NAME", other.views.schema_name)
    run = verbs(other, monkeypatch, app="begin_shop:app", code=MODULE)
    code, told, errors = run("log", "begin")
    assert code == 0, errors
    assert f"everstate drift repair {ORDER.name}" in told
    assert relayed(other) == 0
    truth = PostgresTruth.of(other, ORDER.name, 1)
    assert check_drift(spark, other, ORDER, truth, repair=True).holds
    relayed(other)
    assert versions(other) == versions(config) == Counter({1: 1, 2: 1, 3: 1})
    store.put(StoredOrder(order_id="o-1", note="d"), provenance=CLERK)
    with pytest.raises(LogIdentityChanged):
        relayed(config)
    assert relayed(other) == 1


def shop() -> App:
    app = App("shop")
    app.entity(ORDER.name, key=ORDER.key)(StoredOrder)
    return app


def test_a_log_with_records_is_not_begun(config: Config, store: EntityStore) -> None:
    store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
    relayed(config)
    with pytest.raises(LogError, match=r"has records already.*--again"):
        begin_log(config, shop())
    assert begin_log(config, shop(), again=True) == {}


def test_views_of_the_old_log_are_not_kept_from_the_new_one(
    config: Config, store: EntityStore
) -> None:
    begin_log(config, shop())
    topic = TopicNames(config.log.prefix).changes(ORDER.name)
    with connect_views(config.views_dsn) as connection, Topics(config) as topics:
        control = Control(connection, config.views.schema_name)
        control.install()
        control.check_topic_identity(ORDER.name, topic, topics.identity(topic))
    other = another_log(config, f"{config.log.prefix}b")
    same_schema = other.model_copy(update={"views": config.views})
    with pytest.raises(LogError, match=r"kept from another log.*views\.schema_name"):
        begin_log(same_schema, shop())
    ((_, (_, now)),) = begin_log(other, shop()).items()
    assert now == TopicNames(other.log.prefix).changes(ORDER.name)


def test_cassandra_publishes_to_one_log(
    stack: Any, cassandra: Any, topic_prefix: str, database: str
) -> None:
    running: Config = cassandra.config
    log = stack.config.log.model_copy(update={"prefix": topic_prefix})
    own_store = stack.config.store.model_copy(update={"dsn": database})
    settings = running.model_copy(update={"log": log, "store": own_store})
    with own_keyspace(settings) as config, Database(config) as keyspace:
        with Topics(config) as topics:
            topics.ensure([ORDER.name])
        with Publisher(config, [ORDER], database=keyspace) as publisher:
            publisher.step()
        store = CassandraStore(config, ORDER, database=keyspace)
        store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
        other = another_log(config, f"{topic_prefix}b")
        with (
            Publisher(other, [ORDER], database=keyspace) as publisher,
            pytest.raises(LogIdentityChanged),
        ):
            publisher.step()
        app = App("shop")
        app.entity(ORDER.name, key=ORDER.key, source="cassandra")(StoredOrder)
        assert list(begin_log(other, app)) == [ORDER.name]
        with Publisher(other, [ORDER], database=keyspace) as publisher:
            assert publisher.step() == 1
