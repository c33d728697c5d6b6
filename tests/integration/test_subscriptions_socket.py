"""Subscriptions by WebSocket: its events, its refusals, and how it ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from test_subscriptions import frames, opened, served
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from callers import caller_entry
from everstate.serving import hub as hub_module
from kit.settings import altered
from kit.waiting import until
from reading_cases import Orders

pytestmark = pytest.mark.settings(api={"port": 0})

SECRET = "a secret of some length"


@pytest.fixture
def address(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("everstate.api.events._BEAT_S", 0.2)
    with served(orders) as found:
        yield found


def test_both_routes_send_the_same_events(orders: Orders, address: str) -> None:
    orders.send(*(orders.change(f"k{n}", status="open", region="<é>") for n in range(5)))
    with orders.keeping():
        orders.wait_until_kept()
        query = {"since": "beginning", "kind": "created"}
        url = f"{address}/stream/v1/order"
        by_sse = []
        with httpx.stream("GET", url, params=query, timeout=20) as response:
            name = ""
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                name = value if field == "event" else name
                if field == "data":
                    by_sse.append((name, json.loads(value)))
                if field == "data" and name == "live":
                    break
        with opened(address, **query) as socket:
            by_socket = []
            for event in frames(socket):
                by_socket.append((event["event"], event["data"]))
                if event["event"] == "live":
                    break
            beat = next(frames(socket))
    assert by_socket == by_sse
    assert len(by_sse) == 6
    assert set(beat) == {"event", "token"}
    assert beat["event"] == "position"


def test_a_client_that_does_not_read_holds_nothing_up_and_fills_no_memory(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the network does not take waits in the subscription, whose limit counts then."""
    monkeypatch.setattr("everstate.api.subscribing._WAITING_MAX", 20)
    text, count = "x" * 200_000, 200
    url = f"{address.replace('http', 'ws', 1)}/stream/v1/order?when_slow=drop"
    with (
        orders.keeping(),
        connect(url, proxy=None, max_size=None, compression=None, ping_interval=None) as socket,
    ):
        assert json.loads(socket.recv())["event"] == "live"
        orders.send(*(orders.change(f"k{n}", region=text, status="open") for n in range(count)))
        orders.wait_until_kept()
        assert httpx.get(f"{address}/health").status_code == 200
        time.sleep(1)
        changes = dropped = 0
        while changes + dropped < count:
            event = json.loads(socket.recv(timeout=20))
            changes += event["event"] == "change"
            dropped += event["data"]["changes"] if event["event"] == "dropped" else 0
    assert (dropped > 50, changes + dropped) == (True, count)


@pytest.mark.parametrize(
    ("query", "said", "code"),
    [
        ({"kind": "made"}, "kind is 'made'", 4400),
        ({"becomes": "quantity:many"}, "quantity cannot be", 4400),
        ({"changed": "colour"}, "colour", 4400),
        ({"current": "true", "since": "beginning"}, "one of current and since", 4400),
        ({"since": "yesterday"}, "token", 4422),
        ({"when_slow": "wait"}, "when_slow is 'wait'", 4400),
        ({"keys": "é" * 200}, "no parameter", 4400),
    ],
)
def test_what_cannot_be_subscribed_to_is_closed_with_the_reason(
    orders: Orders, address: str, query: dict[str, str], said: str, code: int
) -> None:
    with opened(address, **query) as socket:
        (error,) = frames(socket)
    assert (error["event"], error["token"]) == ("error", None)
    assert error["data"]["type"].startswith("urn:everstate:error:")
    assert said in error["data"]["detail"]
    assert socket.close_code == code
    assert socket.close_reason
    assert said in socket.close_reason
    assert error["data"]["detail"].startswith(socket.close_reason)


def test_a_page_of_another_origin_cannot_connect(orders: Orders, address: str) -> None:
    own = address.removeprefix("http://")
    orders.keep()
    for origin in (f"http://{own}", f"https://{own}"):
        with opened(address, {"Origin": origin}) as socket:
            assert json.loads(socket.recv())["event"] == "live"
    for origin in (
        *("https://evil.example", "null", f"http://{own}.evil.example", f"http://{own}0"),
        *(f"http://evil.example:{own.partition(':')[2]}", f"file://{own}", "http://127.0.0.1", "x"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            opened(address, {"Origin": origin})
        assert refused.value.response.status_code == 403, origin
        assert b"another origin" in (refused.value.response.body or b"")


def test_another_name_of_this_machine_cannot_be_used(orders: Orders, address: str) -> None:
    """A foreign name that resolves to this machine (DNS rebinding); the page's origin fits it."""
    port = int(address.rpartition(":")[2])
    evil = f"evil.example:{port}"
    with pytest.raises(InvalidStatus) as refused:
        connect(
            f"ws://{evil}/stream/v1/order",
            additional_headers={"Origin": f"http://{evil}"},
            proxy=None,
            address=("127.0.0.1", port),
        )
    assert refused.value.response.status_code == 421


def test_access_is_that_of_the_other_route(orders: Orders) -> None:
    entry = caller_entry(SECRET, "web", "w1")
    orders.config = altered(orders.config, api={"tokens": {"web": entry}})
    orders.keep()
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {SECRET}"},
        {"Sec-WebSocket-Protocol": "bearer"},
    ]
    with served(orders) as address:
        for headers in wrong:
            with pytest.raises(InvalidStatus) as refused:
                opened(address, headers)
            by_sse = httpx.get(f"{address}/stream/v1/order", headers=headers)
            response = refused.value.response
            assert (response.status_code, by_sse.status_code) == (401, 401)
            assert json.loads(response.body or b"") == by_sse.json()
            assert response.headers["www-authenticate"] == by_sse.headers["www-authenticate"]
        with opened(address, {"Authorization": f"Bearer {SECRET}"}) as socket:
            assert json.loads(socket.recv())["event"] == "live"
        with pytest.raises(InvalidStatus):
            connect(f"{address.replace('http', 'ws', 1)}/stream/v1/guest", proxy=None)


def test_a_connection_outlives_the_time_of_a_request_and_ends_with_its_client(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which a request must come does not count; what a client says means nothing."""
    monkeypatch.setattr("everstate.api.events._BEAT_S", 0.2)
    orders.config = altered(orders.config, api={"receive_timeout_s": 0.5})
    orders.keep()
    left: list[Any] = []
    leave = hub_module.ChangeHub.leave

    def noted(hub: hub_module.ChangeHub, wake: Callable[[], None]) -> None:
        left.append(wake)
        leave(hub, wake)

    monkeypatch.setattr(hub_module.ChangeHub, "leave", noted)
    with served(orders) as address:
        with opened(address) as socket:
            began = time.monotonic()
            for event in frames(socket):
                socket.send(json.dumps(event)[:100])
                if time.monotonic() - began > 1.5:
                    break
            assert time.monotonic() - began > 1.5
            assert left == []
        until(lambda: len(left) == 1)
        with opened(address) as socket:
            received = frames(socket)
            assert next(received)
            socket.send("x" * 10_000)
            for _ in received:
                pass
            assert socket.close_code == 1009, "it says too much"
        until(lambda: len(left) == 2)


def test_a_server_that_stops_ends_its_connections(orders: Orders) -> None:
    orders.keep()
    codes: list[int | None] = []
    is_live = threading.Event()

    def follow(address: str) -> None:
        with opened(address) as socket:
            for event in frames(socket):
                if event["event"] == "live":
                    is_live.set()
            codes.append(socket.close_code)

    with served(orders) as address:
        following = threading.Thread(target=follow, args=[address])
        following.start()
        assert is_live.wait(20)
    following.join(5)
    assert codes in ([1012], [4503])
