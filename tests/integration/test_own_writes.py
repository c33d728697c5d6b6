"""Who reads with the token of a write never sees an older state, whoever keeps the views."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from test_subscriptions import served

from everstate.changes import Provenance
from everstate.client import Client
from everstate.sources.outbox import Relay
from everstate.sources.stores.postgres import EntityStore
from reading_cases import Orders
from tiers import counted

pytestmark = pytest.mark.settings(api={"port": 0, "page_max": 100})

WRITERS = 4
WRITES = counted(25, full=250)
"""Of each writer."""
WHO = Provenance(api_version="1", service_name="desk", identifier="own-writes")


@contextmanager
def published(orders: Orders) -> Iterator[None]:
    """A relay beside the block: what is written comes to the log."""
    ended = threading.Event()
    with (
        Relay(orders.config, [orders.app.entity_type("order")]) as relay,
        ThreadPoolExecutor(1) as thread,
    ):
        running = thread.submit(relay.run, ended)
        try:
            yield
        finally:
            ended.set()
            running.result()


def own_writes(address: str, writer: int) -> list[str]:
    """Write again and again and read at once; out: each answer that was older than the write."""
    older = []
    with Client(address) as client:
        for number in range(WRITES):
            key = f"w{writer}/{number % 5}"
            saved = client.put("order", key, {"quantity": number, "order_id": key}, provenance=WHO)
            row = client.view_row("order_latest", key, wait_for=saved.token)
            if row["version"] != saved.version:
                older.append(f"{key}: the view had {row['version']}, not {saved.version}")
            *_, last = client.history("order", key, wait_for=saved.token)
            if last["version"] != saved.version:
                older.append(f"{key}: the history ended at {last['version']}, not {saved.version}")
    return older


@pytest.mark.timeout(300)
def test_every_write_is_read_back_with_its_token(orders: Orders) -> None:
    with EntityStore(orders.config, orders.app.entity_type("order")) as store:
        store.install()
    with (
        served(orders) as address,
        orders.keeping(),
        published(orders),
        ThreadPoolExecutor(WRITERS) as threads,
    ):
        found = threads.map(lambda writer: own_writes(address, writer), range(WRITERS))
        assert [line for older in found for line in older] == []


@pytest.mark.timeout(300)
def test_planted_without_the_token_an_older_state_is_read(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.http.answers.HttpRequest.wait_for", None)
    with EntityStore(orders.config, orders.app.entity_type("order")) as store:
        store.install()
    with served(orders) as address, Client(address) as client:
        for quantity in (1, 2):
            client.put("order", "a", {"quantity": quantity, "order_id": "a"}, provenance=WHO)
        with Relay(orders.config, [orders.app.entity_type("order")]) as relay:
            while relay.step():
                pass
        orders.keep()
        saved = client.put("order", "a", {"quantity": 3, "order_id": "a"}, provenance=WHO)
        row = client.view_row("order_latest", "a", wait_for=saved.token)
        assert row["version"] < saved.version
