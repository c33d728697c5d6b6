"""The client of a project's HTTP API, blocking and for asyncio, against a real server."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from rest_cases import EVA, configured, hotel
from serving_cases import Guest, fill
from test_subscriptions import served

from console_cases import START
from everstate.app import App
from everstate.changes import Provenance
from everstate.client import AsyncClient, Client, Event, RequestFailed
from everstate.config import load
from kit.serving import serving
from kit.settings import altered
from kit.waiting import until
from reading_cases import Orders

CLERK = Provenance(api_version="v1", service_name="desk", identifier="clerk-7", reason="a call")


@pytest.fixture
def reading(database: str) -> Iterator[str]:
    """A server whose views are filled."""
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
    app = App("hotel")
    app.entity("guest", key="guest_id", source="capture")(Guest)
    with serving(load(store={"dsn": database}, api={"port": 0}), app) as address:
        yield address


@pytest.fixture
def writing(stack: Any, database: str, topic_prefix: str) -> Iterator[str]:
    with serving(configured(stack.config, database, topic_prefix, port=0), hotel()) as address:
        yield address


def test_an_entity_is_written_and_read(writing: str) -> None:
    with Client(writing, provenance=CLERK) as client:
        made = client.put("guest", "g1", EVA, expected_version=0, once="call-1")
        assert (made.version, made.changed, made.token is not None) == (1, True, True)
        again = client.put("guest", "g1", EVA, expected_version=0, once="call-1")
        assert again.version == 1, "it was done once"
        assert client.put("guest", "g1", EVA).changed is False
        moved = client.patch("guest", "g1", {"city": "Graz"}, expected_version=1)
        found = client.get("guest", "g1")
        assert (found.version, found.state["city"], moved.version) == (2, "Graz", 2)
        with pytest.raises(RequestFailed, match="PreconditionFailed") as refused:
            client.patch("guest", "g1", {"city": "Linz"}, expected_version=1)
        assert refused.value.status == 412
        assert client.delete("guest", "g1").version == 3
        with pytest.raises(RequestFailed) as gone:
            client.get("guest", "g1")
        assert (gone.value.status, gone.value.kind) == (410, "Deleted")
    with Client(writing) as nobody, pytest.raises(RequestFailed, match="Everstate-Service"):
        nobody.put("guest", "g2", {**EVA, "guest_id": "g2"})
    with Client("http://127.0.0.1:9") as away, pytest.raises(RequestFailed) as unreachable:
        away.get("guest", "g1")
    assert unreachable.value.status == 0


def test_the_past_of_an_entity_is_read(reading: str) -> None:
    with Client(reading) as client:
        assert client.get("guest", "eva", at=START + timedelta(hours=1.5)).state["name"] == "Eva"
        assert client.get("guest", "eva", version=2).version == 2
        assert [each["version"] for each in client.history("guest", "eva")] == [1, 2, 3]
        assert [each["version"] for each in client.history("guest", "eva", after=2)] == [3]
        assert client.diff("guest", "eva", 1, START + timedelta(hours=2))["to"]["version"] == 3
        assert client.explain("guest", "eva", field="name")["version"]["version"] == 3
        assert "name" in client.provenance("guest", "eva")["fields"]


def test_many_entities_are_read(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstate.client.asynchronous.PAGE", 2)
    then = START + timedelta(hours=3.5)
    with Client(reading) as client:
        found = client.get_many("guest", ["eva", "ada"])
        assert (found["ada"], found["eva"] and found["eva"].version) == (None, 3)
        assert client.get_many("guest", ["ada"], at=then)["ada"] is not None
        assert [each.key for each in client.list("guest")] == ["eva", "tom"]
        assert [each.key for each in client.list("guest", where=["nights>1"])] == ["eva"]
        assert [each.key for each in client.list("guest", at=then)] == ["ada", "eva", "tom"]
        assert [each["key"] for each in client.deleted("guest")] == ["ada"]
        assert len(list(client.written("guest", service="desk"))) == 8
        assert [each["key"] for each in client.written("guest", kind="deleted")] == ["tom", "ada"]
        history = client.history("guest", "eva", changed="name", service="desk")
        assert [each["version"] for each in history] == [1, 3]


def test_the_asynchronous_client_does_the_same(reading: str) -> None:
    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(reading) as client:
            found = await client.get("guest", "eva")
            history = [each["version"] async for each in client.history("guest", "eva")]
            diff = await client.diff("guest", "eva", 1)
            listed = [each.key async for each in client.list("guest")]
            gone = [each["key"] async for each in client.deleted("guest")]
            written = [each["key"] async for each in client.written("guest", kind="deleted")]
            many = await client.get_many("guest", ["eva", "ada"])
            both = (listed, gone, written, sorted(key for key in many if many[key]))
            return found.version, history, diff["to"]["version"], both

    both = (["eva", "tom"], ["ada"], ["tom", "ada"], ["eva"])
    assert asyncio.run(ask()) == (3, [1, 2, 3], 3, both)


def test_both_clients_have_the_same_methods() -> None:
    def of(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in found
            if not name.startswith("_")
        }

    assert of(Client) == of(AsyncClient)


@pytest.mark.timeout(120)
@pytest.mark.settings(api={"port": 0})
def test_a_subscription_goes_on_by_itself_when_the_server_was_away(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.client.asynchronous.RETRY_S", 0.1)
    found: list[Event] = []
    with served(orders) as address:
        port = int(address.rpartition(":")[2])
        orders.config = altered(orders.config, api={"port": port})
        client = Client(address)

        def follow() -> None:
            for event in client.subscribe("order", since="beginning", kinds=["created"]):
                found.append(event)
                if event.data.get("key") == "last":
                    return

        with orders.keeping():
            follower = threading.Thread(target=follow)
            follower.start()
            orders.send(*(orders.change(f"a{n}", status="open") for n in range(5)))
            until(lambda: sum(each.name == "change" for each in found) == 5)
    with orders.keeping():
        orders.send(*(orders.change(f"b{n}", status="open") for n in range(5)))
        orders.wait_until_kept()
        with served(orders):
            orders.send(orders.change("last", status="open"))
            follower.join(30)
    client.close()
    keys = [each.data["key"] for each in found if each.name == "change"]
    assert sorted(keys) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2", "b3", "b4", "last"]


@pytest.mark.settings(api={"port": 0})
def test_the_asynchronous_client_follows(orders: Orders) -> None:
    async def follow(address: str) -> list[str]:
        async with AsyncClient(address) as client:
            names = []
            async for event in client.subscribe("order", current=True):
                names.append(event.name)
                if event.name == "live":
                    return names
            return names

    with orders.keeping(), served(orders) as address:
        orders.send(orders.change("a", status="open"))
        orders.wait_until_kept()
        assert asyncio.run(follow(address)) == ["current", "live"]
