"""Several captures are cleaned at once in one Spark session: each row once, whoever else works."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from pyspark.sql import SparkSession

from clean_cases import DSN, UNAVAILABLE, Database, Item, Made, broken_laws
from clean_role import changelog, send_raw
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.cleaning import cleaning_of
from kit.settings import cleaning

pytestmark = cleaning(log={"partitions": 2})

CAPTURES, ROWS, KEYS = 3, 4_000, 600


@pytest.fixture
def app() -> App:
    """Captures of databases that nobody connects to, so that each has one raw log."""
    found = App("together")
    for number in range(CAPTURES):
        found.entity(f"item_{number}", key="id", source="capture")(Item)
        found.capture(
            f"shop{number}",
            kind="postgresql",
            dsn=DSN,
            tables={"public.item": Table(entity=f"item_{number}")},
            settings={"unavailable.value.placeholder": UNAVAILABLE},
        )
    return found


def work(seed: int) -> Database:
    """Rows that are created whole, then mostly updated without their long column."""
    chance, database = random.Random(seed), Database("debezium, default")
    for number in range(ROWS):
        key = number if number < KEYS else chance.randrange(KEYS)
        values: dict[str, Any] = {"name": f"n{number}", "amount": number}
        if key not in database.rows or chance.random() < 0.1:
            values["note"] = f"long {number}"
        database.write(key, None if chance.random() < 0.02 else values)
    return database


def test_captures_that_share_a_session_lose_and_double_nothing(
    config: Config, app: App, spark: SparkSession
) -> None:
    names, databases = TopicNames(config.log.prefix), [work(n) for n in range(CAPTURES)]
    with Topics(config) as topics:
        topics.ensure(app.entities)
        topics.ensure_raw([names.raw_prefix(n) for n in app.captures], partitions=1, settings={})
    for name, database in zip(app.captures, databases, strict=True):
        send_raw(config, names.raw_prefix(name), database.log)
    cleaners = [
        Cleaner(config, cleaning_of(config, app, name), session=lambda: spark, step_records=500)
        for name in app.captures
    ]
    threads = [threading.Thread(target=one.catch_up, args=(120.0,)) for one in cleaners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in cleaners:
        one.close()
    for number, (name, database) in enumerate(zip(app.captures, databases, strict=True)):
        (table,) = read_balance(config, app.capture_of(name)).tables
        assert (table.held, table.dead, table.vanished) == (0, 0, 0), name
        changes = [Made.of_message(one) for one in changelog(config, f"item_{number}")]
        assert broken_laws(changes, database.history)[:3] == [], name
