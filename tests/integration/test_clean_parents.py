"""A load in foreign-key order: children after their parents, whatever is read first (C14)."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from pydantic import BaseModel, create_model
from pyspark.sql import SparkSession

from capture_cases import eventually
from clean_cases import DSN
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.testing.log_checker import read_topic
from kit.settings import cleaning

SIZES = {
    "country": 100, "city": 600, "store": 2, "staff": 2, "customer": 600, "film": 1000,
    "inventory": 2500, "rental": 5000, "payment": 5000,
}  # fmt: skip
PARENTS: Mapping[str, tuple[str, ...]] = {
    "city": ("country",),
    "store": ("staff", "city"),
    "staff": ("store",),
    "customer": ("store", "city"),
    "inventory": ("film", "store"),
    "rental": ("inventory", "customer", "staff"),
    "payment": ("customer", "staff", "rental"),
}
"""Store and staff refer to each other: that load cannot have parents first in both."""
HELD_MAX = 500
pytestmark = cleaning(log={"partitions": 3}, pipeline={"held_max": HELD_MAX})


def shop(**options: Any) -> App:
    app = App("shop")
    for name in SIZES:
        fields: dict[str, Any] = {f"{parent}_id": (int, ...) for parent in PARENTS.get(name, ())}
        model: type[BaseModel] = create_model(name, id=(int, ...), **fields)
        app.entity(name, key="id", source="capture")(model)
    tables = {
        f"public.{name}": Table(
            entity=name, parents={f"{parent}_id": parent for parent in PARENTS.get(name, ())}
        )
        for name in SIZES
    }
    settings: dict[str, Any] = {"parents_first": True, **options}
    app.capture("shop", kind="postgresql", tables=tables, **settings)
    return app


@dataclass
class Load:
    """A database that is filled by one COPY a table, each a transaction, as Debezium tells it."""

    config: Config
    app: App
    spark: SparkSession
    order: Iterator[int] = field(default_factory=lambda: count(1000, 8))
    states: dict[int, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.app.capture_of("shop").is_ours

    def copy(self, producer: Producer, name: str, tx: int, keys: range) -> None:
        names, choose = TopicNames(self.config.log.prefix), random.Random(tx)
        for place, key in enumerate(keys, 1):
            row = {"id": key}
            for parent in PARENTS.get(name, ()):
                row[f"{parent}_id"] = choose.randrange(SIZES[parent])
            lsn = next(self.order)
            source = {
                "connector": "postgresql", "schema": "public", "table": name, "lsn": lsn,
                "sequence": f'["{1000 + tx}","{lsn}"]', "txId": tx, "snapshot": "false",
            }  # fmt: skip
            body = {
                "op": "c",
                "after": row,
                "source": source,
                "transaction": {"id": f"{tx}:{lsn}", "total_order": place},
            }
            topic = names.raw_prefix("shop") if self.is_ours else names.raw("shop", name)
            producer.send_raw(topic, b'{"id": %d}' % key, json.dumps(body).encode())
        if not self.is_ours:
            return
        end = {
            "status": "END",
            "id": f"{tx}:{next(self.order)}",
            "event_count": len(keys),
            "data_collections": [{"data_collection": f"public.{name}", "event_count": len(keys)}],
        }
        topic, kind = names.raw_prefix("shop"), [("kind", b"transaction")]
        producer.send_raw(topic, b'{"id": "%d"}' % tx, json.dumps(end).encode(), kind)

    def send(self) -> None:
        with Producer(self.config) as producer:
            for tx, (name, size) in enumerate(SIZES.items(), 1):
                self.copy(producer, name, tx, range(size))

    def cleaner(self) -> Cleaner:
        cleaning = cleaning_of(self.config, self.app, "shop")
        return Cleaner(self.config, cleaning, session=lambda: self.spark, step_records=2_000)

    def published(self) -> dict[str, int]:
        balance = read_balance(self.config, self.app.capture_of("shop"))
        return {one.table.removeprefix("public."): one.published for one in balance.tables}

    def check(self, caplog: pytest.LogCaptureFixture) -> None:
        """Every row is there, each after its parents, and none had to go without them."""
        assert self.published() == SIZES
        early = self.too_early()
        assert {line.split()[0] for line in early} <= {"store", "staff"}, early[:5]
        alone = [one for one in caplog.messages if "went on without their parent" in one]
        assert len(alone) <= 2, "store and staff wait for each other"
        assert all(": 1 rows" in one for one in alone)

    def recorded(self, entity: str) -> dict[int, str]:
        """When the creation of each entity was recorded."""
        topic = TopicNames(self.config.log.prefix).changes(entity)
        values = [json.loads(record.value or b"") for record in read_topic(self.config, topic)]
        self.states = {one["currentEntityState"]["id"]: one["currentEntityState"] for one in values}
        return {one["currentEntityState"]["id"]: one["recordedAt"] for one in values}

    def too_early(self) -> list[str]:
        """Children that were recorded before one of their parents was; all must be there."""
        recorded, states = {}, {}
        for name, size in SIZES.items():
            recorded[name] = self.recorded(name)
            states[name] = self.states
            assert recorded[name].keys() == set(range(size)), name
        return [
            f"{name} {key} before {parent} {state[f'{parent}_id']}"
            for name, parents in PARENTS.items()
            for key, state in states[name].items()
            for parent in parents
            if recorded[name][key] < recorded[parent][state[f"{parent}_id"]]
        ]


@pytest.fixture(params=["one raw log", "a topic per table"])
def load(request: pytest.FixtureRequest, config: Config, spark: SparkSession) -> Load:
    load = Load(config, shop(dsn=DSN if request.param == "one raw log" else None), spark)
    cleaning = cleaning_of(config, load.app, "shop")
    cleaning.open()
    cleaning.close()
    return load


def test_a_load_in_foreign_key_order_is_published_in_that_order(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    load.send()
    for _ in range(3):
        cleaner = load.cleaner()
        for _ in range(4):
            cleaner.step()
        cleaner.close()
    cleaner = load.cleaner()
    cleaner.catch_up()
    cleaner.close()
    load.check(caplog)


def test_a_load_that_is_cleaned_while_it_is_written_keeps_that_order(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    cleaner, stop = load.cleaner(), threading.Event()
    cleaning = threading.Thread(target=cleaner.run, args=(stop,))
    cleaning.start()
    load.send()
    assert eventually(lambda: load.published() == SIZES, 60), load.published()
    stop.set()
    cleaning.join()
    cleaner.close()
    load.check(caplog)
