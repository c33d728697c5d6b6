"""Subscriptions by either route: whatever disconnects, nothing is missed or double."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from test_reading_handover import load
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from everstate.api import subscribing
from everstate.changes.tokens import LogPosition, Spot, Token, parse_token
from everstate.serving import hub as hub_module
from kit.serving import serving
from kit.waiting import until
from log_cases import forget
from reading_cases import Orders

pytestmark = pytest.mark.settings(api={"port": 0})

Event = tuple[str, str | None, Any]
"""Name, id and data."""


@pytest.fixture
def address(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("everstate.api.events._BEAT_S", 0.2)
    with served(orders) as found:
        yield found


def served(orders: Orders) -> AbstractContextManager[str]:
    """A server of orders; out: its address. Its streams end with it."""
    return serving(orders.config, orders.app, orders.config.api.port, ends_within_s=5)


def events(response: httpx.Response) -> Iterator[Event]:
    """The events of a stream, those with only an id too (as ``""``)."""
    name, token, data = "", None, ""
    for line in response.iter_lines():
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "id":
            token = value
        elif field == "data":
            data += value
        elif not line and (name or token):
            yield name, token, json.loads(data) if data else None
            name, token, data = "", None, ""


def opened(
    address: str,
    headers: Mapping[str, str] | None = None,
    /,
    *,
    followed: str = "order",
    **query: Any,
) -> ClientConnection:
    """A WebSocket to the changes of orders, or of what else is followed."""
    url = f"{address.replace('http', 'ws', 1)}/stream/v1/{followed}?{urlencode(query)}"
    return connect(
        url, additional_headers=headers, proxy=None, max_size=None, max_queue=None, close_timeout=1
    )


def frames(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    """The events of a WebSocket until it is closed."""
    try:
        for text in socket:
            yield json.loads(text)
    except ConnectionClosed:
        return


class Subscriber:
    """Follows a stream, leaves it at random, and comes back with the id of the last event."""

    followed = "order"

    def __init__(self, address: str, leave: Random | None = None, **query: str) -> None:
        self.address, self.query, self._leave = address, query, leave
        self.changes: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.codes: list[int | None] = []
        self.left = 0
        self.is_live = threading.Event()
        self.ended = threading.Event()
        self.last_id: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.ended.is_set():
            try:
                self._follow(10**9 if self._leave is None else self._leave.randrange(20))
            except httpx.HTTPError:
                time.sleep(0.05)

    @contextmanager
    def events(self) -> Iterator[Iterator[Event]]:
        url = f"{self.address}/stream/v1/{self.followed}"
        headers = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
        with (
            httpx.Client(timeout=20) as client,
            client.stream("GET", url, params=self.query, headers=headers) as response,
        ):
            assert response.status_code == 200, response.read()
            yield events(response)

    def _follow(self, stay: int) -> None:
        with self.events() as found:
            for name, token, data in found:
                if name == "change":
                    self.changes.append(data)
                elif name == "current":
                    self.rows.append(data)
                elif name:
                    self.notices.append(name)
                self.last_id = token or self.last_id
                if name == "live":
                    self.is_live.set()
                stay -= name == "change"
                if self.ended.is_set() or stay < 0:
                    self.left += stay < 0
                    return

    def stop(self) -> None:
        self.ended.set()
        self._thread.join()


class BySocket(Subscriber):
    """Follows by WebSocket; a position without a change has no name, as in the other route."""

    @contextmanager
    def events(self) -> Iterator[Iterator[Event]]:
        query = self.query
        if self.last_id is not None:
            kept = {name: value for name, value in query.items() if name != "current"}
            query = {**kept, "since": self.last_id}
        with opened(self.address, followed=self.followed, **query) as socket:
            yield (
                (each["event"].replace("position", ""), each["token"], each.get("data"))
                for each in frames(socket)
            )
        self.codes.append(socket.close_code)


def faults(changes: list[dict[str, Any]], versions: dict[str, int] | None = None) -> list[str]:
    """Versions of a key that are not the next one after those that were known before."""
    known, wrong = dict(versions or {}), []
    for change in changes:
        key, version = change["key"], change["version"]
        if key in known and version != known[key] + 1:
            wrong.append(f"{key}: {version} after {known[key]}")
        known[key] = version
    return wrong


BOTH_ROUTES = pytest.mark.parametrize("route", [Subscriber, BySocket])


@pytest.mark.timeout(120)
@BOTH_ROUTES
def test_subscribers_that_leave_and_come_back_miss_nothing_and_get_nothing_twice(
    orders: Orders, address: str, route: type[Subscriber]
) -> None:
    random, ended = Random(3), threading.Event()
    writer = threading.Thread(target=load, args=(orders, ended, random))
    with orders.keeping():
        everything = [route(address, Random(seed), since="beginning") for seed in range(6)]
        one_key = [
            route(address, Random(seed), key=f"k{seed}", current="true") for seed in range(6)
        ]
        rows = route(address, Random(9), current="true")
        steady = route(address, since="beginning")
        for each in (*everything, *one_key, rows, steady):
            assert each.is_live.wait(20)
        writer.start()
        time.sleep(4)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        wanted = sum(version for version, _ in orders.versions.values())
        until(lambda: all(len(each.changes) >= wanted for each in (*everything, steady)))
        for each in one_key:
            version = orders.versions[each.query["key"]][0]
            until(lambda each=each, version=version: each.changes[-1]["version"] == version)
        until(lambda: rows.changes and len(rows.changes) >= wanted)
        for each in (*everything, *one_key, rows, steady):
            each.stop()
    for each in (*everything, steady):
        assert len(each.changes) == wanted
        assert faults(each.changes, dict.fromkeys(orders.versions, 0)) == []
    assert sum(each.left for each in everything) > 20, "they were away often"
    for each in one_key:
        assert {change["key"] for change in each.changes} == {each.query["key"]}
        assert faults(each.changes, {each.query["key"]: 0}) == []
    assert faults(rows.changes, dict.fromkeys(orders.versions, 0)) == []
    assert not any(set(each.notices) - {"live"} for each in (*everything, *one_key, rows))


def test_a_subscriber_gets_present_rows_first_and_then_what_it_asked_for(
    orders: Orders, address: str
) -> None:
    orders.send(orders.change("a", quantity=1, status="open"), orders.change("b", status="open"))
    orders.send(orders.change("c", status="open"), orders.change("c"))
    with orders.keeping():
        orders.wait_until_kept()
        whole = Subscriber(address, current="true")
        paid = Subscriber(address, becomes="status:paid")
        deleted = Subscriber(address, kind="deleted", service="nobody")
        quantity = Subscriber(address, changed="quantity", key="a")
        found = (whole, paid, deleted, quantity)
        for each in found:
            assert each.is_live.wait(20)
        orders.send(orders.change("a", quantity=1, status="paid"))
        orders.send(orders.change("a", quantity=2, status="paid"), orders.change("b"))
        orders.wait_until_kept()
        until(lambda: len(whole.changes) == 3 and quantity.changes and paid.changes)
        for each in found:
            each.stop()
    assert sorted((row["key"], row["version"]) for row in whole.rows) == [("a", 1), ("b", 1)]
    assert sorted((one["key"], one["version"]) for one in whole.changes) == [
        ("a", 2), ("a", 3), ("b", 2),
    ]  # fmt: skip
    assert [one["version"] for one in paid.changes] == [2]
    assert [one["version"] for one in quantity.changes] == [3]
    assert deleted.changes == []


def test_present_rows_that_do_not_fit_into_memory_come_from_a_file(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribing, "_PRESENT_BYTES", 1000)
    keys = [f"k{number}" for number in range(2_500)]
    orders.send(*(orders.change(key, quantity=1, status=f"on\n{key}") for key in keys))
    orders.keep()
    whole = Subscriber(address, current="true")
    assert whole.is_live.wait(20)
    whole.stop()
    rows = {row["key"]: row["state"]["status"] for row in whole.rows}
    assert (len(whole.rows), rows) == (len(keys), {key: f"on\n{key}" for key in keys})


def test_what_the_log_has_forgotten_comes_from_the_archive_after_the_last_events_id(
    orders: Orders, address: str
) -> None:
    for quantity in range(6):
        orders.send(orders.change("a", quantity=quantity, status="open"))
    orders.keep()
    url = f"{address}/stream/v1/order"
    ids: list[str] = []
    with httpx.Client(timeout=20) as client:
        with client.stream("GET", url, params={"since": "beginning"}) as response:
            for name, token, _ in events(response):
                if name == "change" and token is not None:
                    ids.append(token)
                if name == "live":
                    break
        ends = orders.kept.vector()
        orders.archive(ends)
        forget(orders.config, orders.topic, ends)
        with served(orders) as other:
            headers = {"Last-Event-ID": ids[1]}
            again = client.stream("GET", f"{other}/stream/v1/order", headers=headers)
            versions = []
            with again as response:
                for name, _, data in events(response):
                    if name == "live":
                        break
                    versions.append(data["version"])
    assert versions == [3, 4, 5, 6]


@BOTH_ROUTES
def test_a_subscriber_that_is_too_slow_is_told_and_can_come_back(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch, route: type[Subscriber]
) -> None:
    """Its changes are dropped with a notice, or it is disconnected, as it chose."""
    monkeypatch.setattr("everstate.api.subscribing._WAITING_MAX", 2)
    with orders.keeping():
        drop = route(address, when_slow="drop")
        leave = route(address)
        for each in (drop, leave):
            assert each.is_live.wait(20)
        count = 400
        orders.send(*(orders.change(f"k{number}", status="open") for number in range(count)))
        orders.wait_until_kept()
        until(lambda: len(leave.changes) == count)
        until(lambda: "dropped" in drop.notices)
        for each in (drop, leave):
            each.stop()
    assert len(drop.changes) < count
    assert "slow" in leave.notices, "it came back by itself"
    assert route is Subscriber or 1013 in leave.codes
    assert len({one["key"] for one in leave.changes}) == count


def test_more_changes_than_may_wait_while_a_subscriber_catches_up_end_it_not(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.api.subscribing._WAITING_MAX", 2)
    read, offer = subscribing._chunk, hub_module.Subscription.offer
    offered: list[str] = []

    def more(count: int) -> None:
        changes = [orders.change("a", quantity=n, status="open") for n in range(count)]
        orders.send(*changes)
        orders.keep()

    def chunk(*given: Any) -> Any:
        if not offered:
            more(5)
            until(lambda: len(offered) >= 5)
        return read(*given)

    def counted(self: Any, delivery: Any) -> None:
        offer(self, delivery)
        offered.append(delivery.change.key)

    monkeypatch.setattr(subscribing, "_chunk", chunk)
    monkeypatch.setattr(hub_module.Subscription, "offer", counted)
    more(5)
    subscriber = Subscriber(address, since="beginning")
    assert subscriber.is_live.wait(20)
    more(1)
    until(lambda: len(subscriber.changes) >= 11)
    subscriber.stop()
    assert [change["version"] for change in subscriber.changes] == list(range(1, 12))
    assert subscriber.notices == ["live"]


def test_a_subscriber_of_one_key_comes_back_without_reading_what_others_wrote(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its position goes on with the stream, also where it wants no change for hours."""

    def offsets(token: str | None) -> int:
        assert token is not None
        position = parse_token(token).positions["order"]
        return sum(spot.next_offset for spot in position.spots.values())

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the log is read once more")

    monkeypatch.setattr(hub_module, "_MEMORY_CHANGES", 5)
    url, others = f"{address}/stream/v1/order", 40
    with orders.keeping():
        subscriber = Subscriber(address, key="a")
        assert subscriber.is_live.wait(20)
        begun = offsets(subscriber.last_id)
        orders.send(*(orders.change(f"k{n}", status="open") for n in range(others)))
        until(lambda: offsets(subscriber.last_id) >= begun + others)
        subscriber.stop()
        monkeypatch.setattr(subscribing, "Changes", refused)
        headers = {"Last-Event-ID": str(subscriber.last_id)}
        with (
            httpx.Client(timeout=20) as client,
            client.stream("GET", url, params={"key": "a"}, headers=headers) as response,
        ):
            name, _, _ = next(iter(events(response)))
    assert (subscriber.changes, name) == ([], "live")


def test_a_position_in_another_log_is_refused_also_while_the_hub_remembers_its_offsets(
    orders: Orders, address: str
) -> None:
    url = f"{address}/stream/v1/order"
    orders.send(orders.change("a", status="open"))
    orders.keep()
    subscriber = Subscriber(address)
    assert subscriber.is_live.wait(20)
    subscriber.stop()
    assert subscriber.last_id is not None
    (position,) = parse_token(subscriber.last_id).positions.values()
    ahead = {at: Spot(spot.next_offset + 1_000) for at, spot in position.spots.items()}
    other = str(Token({"order": LogPosition(b"elsewhere", ahead)}))
    with httpx.stream("GET", url, headers={"Last-Event-ID": other}, timeout=20) as answer:
        assert answer.status_code == 422, "it would have waited for changes that never come"
        assert b"begun anew" in answer.read()


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"kind": "made"}, "kind is 'made'"),
        ({"becomes": "status"}, "field:value"),
        ({"becomes": "quantity:many"}, "quantity cannot be"),
        ({"changed": "colour"}, "colour"),
        ({"current": "yes"}, "current is 'yes'"),
        ({"current": "true", "since": "beginning"}, "one of current and since"),
        ({"since": "yesterday"}, "token"),
        ({"when_slow": "wait"}, "when_slow is 'wait'"),
        ({"keys": "a"}, "no parameter 'keys'"),
    ],
)
def test_what_cannot_be_subscribed_to_says_why(
    orders: Orders, address: str, parameters: dict[str, str], said: str
) -> None:
    answer = httpx.get(f"{address}/stream/v1/order", params=parameters)
    assert answer.status_code in (400, 422), answer.text
    assert said in answer.text
    unknown = httpx.get(f"{address}/stream/v1/guest")
    assert (unknown.status_code, "guest" in unknown.text) == (404, True)
    assert httpx.head(f"{address}/stream/v1/order").status_code == 200


def test_the_checker_sees_a_hole_and_a_double() -> None:
    def change(version: int) -> dict[str, Any]:
        return {"key": "a", "version": version}

    assert faults([change(1), change(2)], {"a": 0}) == []
    assert len(faults([change(2)], {"a": 0})) == 1
    assert len(faults([change(1), change(1)], {"a": 0})) == 1


@pytest.mark.timeout(120)
@BOTH_ROUTES
def test_the_checker_catches_a_hub_that_forgets_where_it_stands(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch, route: type[Subscriber]
) -> None:
    """Planted: a subscription that was away gets only what comes after it is back."""
    monkeypatch.setattr(hub_module.ChangeHub, "_missed", lambda *_: [])
    ended = threading.Event()
    writer = threading.Thread(target=load, args=(orders, ended, Random(3)))
    with orders.keeping():
        found = [route(address, Random(seed)) for seed in range(4)]
        for each in found:
            assert each.is_live.wait(20)
        writer.start()
        time.sleep(3)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        for each in found:
            each.stop()
    assert any(faults(each.changes, dict.fromkeys(orders.versions, 0)) for each in found)
