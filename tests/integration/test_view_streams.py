"""Subscriptions to views: folded events are the rows of the view, whoever disconnects."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from test_reading_handover import load
from test_subscriptions import events, served
from test_view_rows_http import by_sql, differences, some_orders, unlike
from websockets.sync.client import connect

from everstate.serving import view_watch
from kit.waiting import until
from reading_cases import Orders

pytestmark = pytest.mark.settings(api={"port": 0, "page_max": 100})


@pytest.fixture
def address(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("everstate.api.events._BEAT_S", 0.2)
    with served(orders) as found:
        yield found


class Fold:
    """The rows of a view as the events tell them; notes what does not fit."""

    def __init__(self) -> None:
        self.rows: dict[Any, dict[str, Any]] = {}
        self.reasons: list[str] = []
        self.faults: list[Any] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._key: list[str] | None = None

    def take(self, name: str, data: Any) -> None:
        if name == "snapshot":
            self.reasons.append(data["reason"])
            self._key = data["key"]
            self.rows = {self._of(row): row for row in data["rows"]}
        for each in data["rows"]:
            before, after = (each.get(side) for side in ("before", "after"))
            if name == "changed":
                key = self._of(before or after)
                if self.rows.pop(key, None) != before or before == after:
                    self.faults.append(each)
                if after is not None:
                    self.rows[self._of(after)] = after
        if self._key == []:
            self.seen += [(data["token"], row) for row in self.rows.values()]

    def _of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        assert self._key is not None
        return tuple(row[name] for name in self._key)


class Follower:
    """Folds a stream, leaves it at random, and comes back with the id of the last event."""

    def __init__(self, address: str, view: str, leave: Random | None = None, **query: str) -> None:
        self.fold, self.token, self.left = Fold(), "", 0
        self._url, self._query = f"{address}/views/v1/{view}/stream", query
        self._leave, self._ended = leave, threading.Event()
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._follow(10**9 if self._leave is None else self._leave.randrange(1, 6))
        except BaseException as error:
            self.failed.append(error)

    def _follow(self, stay: int) -> None:
        headers = {"Last-Event-ID": self.token} if self.token else {}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("GET", self._url, params=self._query, headers=headers) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for name, token, data in events(answer):
                if name:
                    self.fold.take(name, data)
                self.token = token or self.token
                stay -= bool(name)
                if self._ended.is_set() or stay < 0:
                    self.left += stay < 0
                    return

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self.failed == []


def matches(orders: Orders, query: str, fold: Fold) -> bool:
    return differences(by_sql(orders, query), list(fold.rows.values())) == []


@pytest.mark.timeout(300)
def test_folded_events_are_the_rows_of_the_view_whoever_leaves_and_comes_back(
    orders: Orders, address: str
) -> None:
    ended = threading.Event()
    writer = threading.Thread(target=load, args=(orders, ended, Random(3)))
    views = {name: f'SELECT * FROM "{name}"' for name in ("by_region", "order", "totals")}
    with orders.keeping():
        restless = {name: Follower(address, name, Random(7)) for name in views}
        steady = {name: Follower(address, name) for name in views}
        paid = Follower(address, "order", Random(8), where="status=paid")
        every = [*restless.values(), *steady.values(), paid]
        writer.start()
        until(lambda: sum(v for v, _ in list(orders.versions.values())) > 500, 120)
        until(lambda: sum(each.left for each in every) > 15, 120)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        for name, query in views.items():
            for one in (restless[name], steady[name]):
                until(lambda one=one, query=query: matches(orders, query, one.fold), 60)
        only_paid = "SELECT * FROM \"order\" WHERE status = 'paid'"
        until(lambda: matches(orders, only_paid, paid.fold), 60)
        for each in every:
            each.stop()
    for each in every:
        assert each.fold.faults == []
        assert each.fold.reasons == ["began"], "it went on where it was"
    # The planted defects: an event that is missing, and one that comes twice.
    for events_of in (lambda e: e[1:], lambda e: [e[0], *e]):
        fold = Fold()
        fold.take("snapshot", {"reason": "began", "key": ["k"], "rows": []})
        steps = [
            {"rows": [{"before": None, "after": {"k": 1, "n": 1}}]},
            {"rows": [{"before": {"k": 1, "n": 1}, "after": {"k": 1, "n": 2}}]},
        ]
        for step in events_of(steps):
            fold.take("changed", step)
        assert fold.faults


@pytest.mark.timeout(300)
def test_each_event_brings_the_rows_to_exactly_the_position_of_its_id(
    orders: Orders, address: str
) -> None:
    random = Random(11)
    orders.send(orders.change("o/0", quantity=1))
    with orders.keeping():
        orders.wait_until_kept()
        totals = Follower(address, "totals")
        until(lambda: totals.fold.reasons, 60)
        while len(totals.fold.seen) < 8:
            keys = [f"o/{random.randrange(20)}" for _ in range(random.randint(1, 20))]
            orders.send(*(orders.change(key, quantity=random.randrange(9)) for key in keys))
            time.sleep(0.1)
        totals.stop()
    assert unlike(orders, totals.fold.seen) == []
    assert totals.fold.faults == []


def test_who_comes_back_too_late_gets_all_rows_and_is_told_so(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_watch, "_MEMORY_ROWS", 5)
    some_orders(orders)
    first = Follower(address, "order")
    until(lambda: first.token, 60)
    token = first.token
    for place in range(4):
        number = len(first.fold.seen)
        orders.send(*(orders.change(f"n{place}/{each}", quantity=each) for each in range(4)))
        orders.keep()
        until(lambda: matches(orders, 'SELECT * FROM "order"', first.fold), 60)
        assert number == 0
    late = Follower(address, "order", since=token)
    until(lambda: late.fold.reasons == ["missed"], 60)
    assert matches(orders, 'SELECT * FROM "order"', late.fold)
    soon = Follower(address, "order", since=first.token)
    time.sleep(1.0)
    assert soon.fold.reasons == [], "nothing was missed"
    for each in (first, late, soon):
        each.stop()


def test_what_cannot_be_followed_is_refused_with_the_reason(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some_orders(orders)
    with httpx.Client(base_url=address, timeout=60) as client:
        for path, status, said in (
            ("nothing/stream", 404, "unknown view"),
            ("order/stream?where=quantity>3", 400, "takes = only"),
            ("order/stream?where=nothing=3", 400, "has no column"),
            ("order/stream?other=3", 400, "no parameter"),
        ):
            answer = client.get(f"/views/v1/{path}")
            assert (answer.status_code, said in answer.text) == (status, True), answer.text
        monkeypatch.setattr(view_watch, "ROWS_MAX", 20)
        answer = client.get("/views/v1/order_history/stream")
        assert (answer.status_code, "more than 20 rows" in answer.text) == (422, True)
        assert client.head("/views/v1/order/stream").status_code == 200
    # A view that grows too large while it is followed ends its subscriptions.
    url = f"{address}/views/v1/by_region/stream"
    with httpx.Client(timeout=60) as client, client.stream("GET", url) as answer:
        found = events(answer)
        assert next(found)[0] == "snapshot"
        regions = [orders.change(f"r{each}", region=f"r{each}") for each in range(30)]
        orders.send(*regions)
        orders.keep()
        last = [name for name, _, data in found if name][-1]
    assert last == "error"


def test_a_websocket_has_the_same_events(orders: Orders, address: str) -> None:
    some_orders(orders)
    query = urlencode({"where": "region=north"})
    url = f"{address.replace('http', 'ws', 1)}/views/v1/order/stream?{query}"
    with connect(url, proxy=None, max_size=None, close_timeout=1) as socket:
        fold = Fold()
        first = json.loads(socket.recv(60))
        fold.take(first["event"], first["data"])
        orders.send(orders.change("o/1", region="north", quantity=1), orders.change("o/2"))
        orders.keep()
        north = "SELECT * FROM \"order\" WHERE region = 'north'"
        while not matches(orders, north, fold):
            event = json.loads(socket.recv(60))
            if event["event"] != "position":
                fold.take(event["event"], event["data"])
        assert fold.faults == []
    with connect(url.replace("region", "nothing"), proxy=None, close_timeout=1) as socket:
        assert json.loads(socket.recv(60))["event"] == "error"
        with pytest.raises(Exception, match="has no column"):
            socket.recv(60)
