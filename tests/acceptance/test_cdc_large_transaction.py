"""One transaction of two million rows becomes changes, its block whole, with flat memory."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest
from pydantic import BaseModel

from capture_cases import PostgresSource, capture_config, eventually
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from kit.settings import altered

ROWS = 2_000_000
SPARK_HEAP = "600m"
LOAD_S, CLEAN_S = 900.0, 900.0
GROWTH_MAX = 1.1
"""Most memory in the second half of the rows, beside the most in the first half."""


class Item(BaseModel):
    """A row of the table."""

    id: int
    name: str
    amount: int


def shop(dsn: str) -> App:
    app = App("shop")
    app.entity("item", key="id", source="capture", history=False)(Item)
    tables = {"public.item": Table(entity="item")}
    app.capture("shop", kind="postgresql", dsn=dsn, tables=tables)
    return app


def clean(config: Config, dsn: str) -> None:
    """The role, in a process of its own."""
    Cleaner(config, cleaning_of(config, shop(dsn), "shop")).run(threading.Event())


def memory_mb(role: BaseProcess) -> dict[str, float]:
    """Memory of a process and its children by name, each shared page divided among its owners."""
    found: dict[str, float] = {}
    assert role.pid
    process = psutil.Process(role.pid)
    for each in (process, *process.children(recursive=True)):
        try:
            name, used = each.name(), each.memory_full_info().pss / 1e6
        except psutil.NoSuchProcess:
            continue
        found[name] = found.get(name, 0.0) + used
    return found


def total(used: dict[str, float]) -> float:
    return sum(used.values())


def records_of(config: Config, topic: str) -> int:
    """How many records a topic has had, transaction markers included."""
    with Offsets(config) as offsets:
        return sum(offsets.stable_ends([topic]).values())


def broken_block(changes: Iterable[dict[str, Any]], rows: int) -> list[str]:
    """What is wrong with the changes of one transaction that inserted rows 1 to ``rows``."""
    keys, places, ids = bytearray(rows + 1), bytearray(rows + 1), set[tuple[str, int]]()
    wrong: list[str] = []
    for change in changes:
        block = change["provenance"]["transaction"]
        state = change["currentEntityState"]
        number = int(change["key"])
        ids.add((block["id"], block["count"]))
        expected = {"id": number, "name": f"item {number}", "amount": number % 1_000}
        if state != expected or change["version"] != 1:
            wrong.append(f"{number}: v{change['version']} is {state}")
        for name, seen, at in (("row", keys, number), ("index", places, block["index"])):
            seen[at] += 1
            if seen[at] > 1:
                wrong.append(f"{name} {at} is there twice")
    for name, seen in (("rows", keys), ("indexes", places)):
        if missing := rows - sum(1 for each in seen if each):
            wrong.append(f"{missing} {name} are missing")
    if len(ids) != 1 or next(iter(ids))[1] != rows:
        wrong.append(f"the blocks are {sorted(ids)[:3]}")
    return wrong


def items(config: Config) -> Iterable[dict[str, Any]]:
    with Consumer(config) as consumer:
        for record in consumer.read_topic(TopicNames(config.log.prefix).changes("item")):
            yield json.loads(record.value or b"")


@pytest.mark.full
@pytest.mark.timeout(2_400)
def test_a_transaction_of_two_million_rows_is_whole(
    connect: Any, topic_prefix: str, database: str
) -> None:
    base = capture_config(connect.config, topic_prefix)
    config, source = altered(base, pipeline={"driver_memory": SPARK_HEAP}), PostgresSource(database)
    source.run("CREATE TABLE item (id int PRIMARY KEY, name text NOT NULL, amount int NOT NULL)")
    app, names = shop(database), TopicNames(config.log.prefix)
    raw, changes = f"{config.log.prefix}.raw.shop", names.changes("item")
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add()
    role = multiprocessing.get_context("spawn").Process(
        target=clean, args=(config, database), daemon=True
    )
    try:
        source.run(
            "INSERT INTO item SELECT i, 'item ' || i, i % 1000 "
            f"FROM generate_series(1, {ROWS}) AS i"
        )
        loaded = eventually(lambda: records_of(config, raw) > ROWS, LOAD_S, every_s=2.0)
        assert loaded, capturing.status()
        began, halves = time.monotonic(), [dict[str, float](), dict[str, float]()]
        role.start()
        while (done := records_of(config, changes)) < ROWS and time.monotonic() < began + CLEAN_S:
            assert role.is_alive()
            half = 2 * done // ROWS
            halves[half] = max(halves[half], memory_mb(role), key=total)
            time.sleep(0.5)
        took = time.monotonic() - began
    finally:
        if role.is_alive():
            role.kill()
            role.join(30)
        capturing.remove(drop=True, topics=True)
    print(f"\n{ROWS:,} rows of one transaction: {took:.0f} s with Spark's start; MB: {halves}")
    assert broken_block(items(config), ROWS) == []
    assert total(halves[1]) <= GROWTH_MAX * total(halves[0]), halves


def told(number: int, **block: Any) -> dict[str, Any]:
    """A change as the transaction of three rows has it."""
    return {
        "key": str(number),
        "version": 1,
        "currentEntityState": {"id": number, "name": f"item {number}", "amount": number},
        "provenance": {"transaction": {"id": "7", "count": 3, "index": number, **block}},
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([told(1), told(2), told(3)], ""),
        ([told(1), told(3)], "1 rows are missing"),
        ([told(1), told(2), told(3), told(3)], "row 3 is there twice"),
        ([told(1), told(2), told(3, id="8")], "the blocks are"),
        ([told(1), told(2), told(3, count=2)], "the blocks are"),
        ([told(1), told(2), told(3, index=2)], "index 2 is there twice"),
        ([told(1), told(2), told(3) | {"version": 2}], "v2 is"),
    ],
    ids=["nothing", "lost", "twice", "two blocks", "another count", "another index", "version"],
)
def test_the_checker_finds_what_is_planted(changes: list[dict[str, Any]], reason: str) -> None:
    wrong = broken_block(changes, 3)
    assert any(reason in each for each in wrong) if reason else wrong == []
