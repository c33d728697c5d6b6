"""examples/outbox: a FastAPI service, a Django-style view and plain SQL write one log."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from everstate.config import Config
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import Installation, Relay, install_outbox
from everstate.testing.log_checker import read_topic

EXAMPLE = Path(__file__).parents[2] / "examples" / "outbox"


@pytest.fixture
def example(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules, on the servers of this run."""
    monkeypatch.setenv("EVERSTATE_STORE_DSN", config.store_dsn)
    monkeypatch.setenv("EVERSTATE_LOG_BOOTSTRAP_SERVERS", config.bootstrap_servers)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("shop", "web", "desk")
    for name in names:  # Another test of this process may have had a `shop` of its own.
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {name: importlib.import_module(name) for name in names}
    yield modules
    modules["web"].engine.dispose()
    for name in names:
        del sys.modules[name]


def test_the_examples_services_write_one_log(config: Config, example: Any) -> None:
    types = example["shop"].app.entities
    with Topics(config) as topics:
        topics.ensure(types)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        install_outbox(connection, Installation(entity_types=types.values(), events=["visit"]))
        with Relay(config, types.values()) as relay:
            asyncio.run(visit(example["web"].shop))
            with connection.transaction(), connection.cursor() as cursor:
                assert example["desk"].refund(cursor, "p-1") == 3
            connection.execute((EXAMPLE / "plain.sql").read_bytes())
            messages = read(config, relay, 5)
    story = [
        (m["key"], m["version"], m["provenance"]["serviceName"], m["provenance"]["actor"],
         m["event"] and m["event"]["type"], m["currentEntityState"]["total"])
        for m in sorted(messages, key=lambda m: (m["key"], m["version"]))
    ]  # fmt: skip
    assert story == [
        ("p-1", 1, "shop", "anonymous", None, 12),
        ("p-1", 2, "shop", "eva", "PurchasePaid", 12),
        ("p-1", 3, "desk", None, None, 0),
        ("p-1", 4, "desk", None, "PriceCorrected", 30),
        ("p-2", 1, "shop", "anonymous", None, -1),
    ]


async def visit(shop: Any) -> None:
    """What clients of the web service do."""
    transport = httpx.ASGITransport(app=shop)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        eva = {"x-user": "eva"}
        assert (await client.put("/purchase/p-1", json={"total": 12})).json() == {"version": 1}
        paid = await client.post("/purchase/p-1/pay", headers=eva)
        assert paid.json() == {"version": 2}
        assert (await client.post("/purchase/p-2/pay")).status_code == 404
        assert (await client.put("/purchase/p-2", json={"total": -1})).json() == {"version": 1}
        # Emitted, then refused: rolled back with the row.
        assert (await client.post("/purchase/p-2/pay")).status_code == 422


def read(config: Config, relay: Relay, count: int) -> list[Any]:
    topic = TopicNames(config.log.prefix).changes("purchase")
    deadline = time.monotonic() + 30
    records: list[Any] = []
    while len(records) < count:
        assert time.monotonic() < deadline
        relay.step()
        records = read_topic(config, topic)
    relay.step()
    return [json.loads(record.value or b"") for record in read_topic(config, topic)]
