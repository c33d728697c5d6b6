"""A raw log that grew is refused, and rows of a restored database wait for a new epoch."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from pyspark.sql import SparkSession

from clean_cases import DSN, ITEM, Database, Made, broken_laws, capture_of
from clean_role import changelog, send_raw
from everstate.config import Config
from everstate.errors import LogError, SourceReplaced
from everstate.log.client import admin_settings
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.reading import SourceIdentity, encode_source
from kit.settings import cleaning

pytestmark = cleaning(log={"partitions": 3}, topics=["item"])

CAPTURE = capture_of("debezium", dsn=DSN)


class Capture:
    """A connector that writes what a database has logged, and the role that cleans it."""

    def __init__(self, config: Config, spark: SparkSession) -> None:
        self.config, self.spark = config, spark
        names = TopicNames(config.log.prefix)
        self.raw = names.raw_prefix("shop")
        self.database = Database("debezium, default")

    def work(self, count: int, start: int) -> None:
        for number in range(start, start + count):
            values = {"name": f"n{number}", "amount": number}
            self.database.write(number % 7, values | ({"note": "long"} if number < 7 else {}))

    def send(self, topic: str, first: int, last: int | None = None) -> None:
        send_raw(self.config, topic, self.database.log[first:last])

    def reads(self, identity: str, epoch: int) -> None:
        """What `everstate cdc` writes when another database is read from here on."""
        value = encode_source(SourceIdentity(identity=identity, epoch=epoch))
        with Producer(self.config) as producer:
            producer.send_raw(self.raw, None, value, [("kind", b"source")])

    def clean(self) -> None:
        cleaning = Cleaning(self.config, CAPTURE, {"item": ITEM})
        with closing(Cleaner(self.config, cleaning, session=lambda: self.spark)) as cleaner:
            cleaner.catch_up()

    def broken(self) -> list[str]:
        return broken_laws([Made.of_message(one) for one in self.changes()], self.database.history)

    def changes(self) -> list[dict[str, Any]]:
        return changelog(self.config, "item")


@pytest.fixture
def capture(config: Config, spark: SparkSession) -> Capture:
    return Capture(config, spark)


def test_a_raw_log_that_grew_is_refused(config: Config, capture: Capture) -> None:
    capture.work(5, 0)
    with Topics(config) as topics:
        topics.ensure_raw([capture.raw], partitions=1, settings={})
    capture.send(capture.raw, 0)
    capture.clean()
    admin: Any = AdminClient(admin_settings(config))
    for future in admin.create_partitions([NewPartitions(capture.raw, 2)]).values():
        future.result(10)
    with pytest.raises(LogError, match="has 2 partitions"):
        capture.clean()
    assert capture.broken() == []


def test_rows_of_a_restored_database_wait_for_a_new_epoch(config: Config, capture: Capture) -> None:
    with Topics(config) as topics:
        topics.ensure_raw([capture.raw], partitions=1, settings={})
    capture.reads("system 1", 1)
    capture.work(20, 0)
    capture.send(capture.raw, 0)
    capture.clean()
    assert capture.broken() == []
    capture.reads("system 2", 1)
    with pytest.raises(SourceReplaced, match="system 2"):
        capture.clean()
    assert capture.broken() == [], "nothing became of it"
    before = len(capture.changes())
    capture.reads("system 2", 2)
    # Its log begins anew; what it says is newer all the same.
    restored = Database("debezium, default")
    restored.write(1, {"name": "restored", "note": "n"})
    capture.database.log = restored.log
    capture.send(capture.raw, 0)
    capture.clean()
    assert len(capture.changes()) == before + 1
    (last,) = [c for c in capture.changes() if c["currentEntityState"]["name"] == "restored"]
    assert last["source"]["position"]["lsn"][0] == 2
    (table,) = read_balance(config, CAPTURE).tables
    assert table.vanished == 0
