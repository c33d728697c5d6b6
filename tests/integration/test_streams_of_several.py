"""Several entity types in one stream over HTTP: by Server-Sent Events, by WebSocket, and in pages.

The oracle is `app.changes` of both entity types, which test_reading_merged.py tests.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any

import httpx
import pytest
from test_reading_handover import load
from test_subscriptions import BySocket, Subscriber, events, faults, frames, opened, served

from callers import caller_entry
from everstate.api.subscribing import ChangeSubscriber
from everstate.api_config import ApiConfig
from everstate.changes import EntityType
from everstate.changes.tokens import LogPosition, Token
from everstate.client import Client
from everstate.http.masks import MASKED
from everstate.serving.hub import ChangeHub
from everstate.views.kinds import HistoryPlan
from everstate.views.tables import Core, KeptTable
from kit.view_orders import ViewedOrder
from kit.view_postgres import PostgresKeptOrders, install_entity
from kit.waiting import until
from log_cases import forget
from reading_cases import Orders, orders_app

pytestmark = pytest.mark.settings(api={"port": 0})

SEAT = EntityType("seat", ViewedOrder, "order_id")
BOTH = "order,seat"
Seen = tuple[str, str, int]
"""Entity type, key and version of a change."""


class KeptSeats(PostgresKeptOrders):
    """The core and the history of seats, in the database that has the views of orders."""

    def reset(self, partitions: int) -> None:
        vector = dict.fromkeys(range(partitions), 0)
        control = install_entity(self.connection, self.schema_name, SEAT, vector)
        control.open_core("seat", range(partitions))

    def core(self, riders: Sequence[KeptTable] | None = None, *, held_max: int = 10_000) -> Core:
        history = HistoryPlan.of("seat").table(1)
        return Core("seat", "seats", (history,), ids=history, held_max=held_max)

    def vector(self, table: KeptTable | None = None) -> dict[int, int]:
        return self.control.core_vector("seat")


@dataclass
class Both:
    """Two changelogs, and who writes and keeps them."""

    orders: Orders
    seats: Orders

    def send(self, count: int, seed: int) -> None:
        """Changes of orders and seats by chance, and all of them judged."""
        random = Random(seed)
        for number in range(count):
            which = random.choice((self.orders, self.seats))
            which.send(which.change(f"k{random.randrange(4)}", quantity=number, region="north"))
        self.keep()

    def keep(self) -> None:
        for each in (self.orders, self.seats):
            each.keep()

    def wanted(self, since: str = "beginning") -> list[Seen]:
        """What there is after a position, in the order in which `app.changes` has it."""
        config, names = self.orders.config, BOTH.split(",")
        with self.orders.app.changes(names, since=since, until="now", config=config) as found:
            return [seen(json.loads(each.record.value or b"")) for each in found]


@pytest.fixture
def both(orders: Orders) -> Both:
    app = orders_app()
    app.entity("seat", key="order_id")(ViewedOrder)
    orders.app = app
    kept = KeptSeats(orders.kept.dsn, orders.kept.connection)
    return Both(orders, Orders(orders.config, kept, app, "seat"))


@pytest.fixture
def address(both: Both, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("everstate.api.events._BEAT_S", 0.2)
    with served(both.orders) as found:
        yield found


def seen(change: Mapping[str, Any]) -> Seen:
    return change["entity"], change["key"], change["version"]


def by_sse(address: str, since: str, **query: Any) -> Iterator[tuple[str, str | None, Any]]:
    headers = {"Last-Event-ID": since} if since.startswith("e1.") else {}
    given = {**({} if headers else {"since": since}), **query}
    url = f"{address}/stream/v1/{BOTH}"
    with httpx.stream("GET", url, params=given, headers=headers, timeout=20) as response:
        assert response.status_code == 200, response.read()
        yield from events(response)


def by_socket(address: str, since: str, **query: Any) -> Iterator[tuple[str, str | None, Any]]:
    with opened(address, followed=BOTH, since=since, **query) as socket:
        for each in frames(socket):
            yield each["event"].replace("position", ""), each["token"], each.get("data")


def by_pages(address: str, since: str, **query: Any) -> Iterator[tuple[str, str | None, Any]]:
    """Only the last change of a page has a token."""
    while True:
        url, given = f"{address}/feed/v1/{BOTH}", {**query, "since": since}
        answer = httpx.get(url, params=given, timeout=20)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        since, last = page["token"], len(page["changes"]) - 1
        for number, change in enumerate(page["changes"]):
            yield "change", since if number == last else None, change
        if page["live"]:
            yield "live", since, None
            yield "", since, None


def read(found: Iterator[tuple[str, str | None, Any]]) -> list[tuple[str | None, Any]]:
    """The changes with their tokens, until nothing has come for a while."""
    taken, is_live = list[tuple[str | None, Any]](), False
    for name, token, data in found:
        if name == "change":
            taken.append((token, data))
        is_live = is_live or name == "live"
        if is_live and not name:
            break
    return taken


def changes_of(taken: Sequence[tuple[str | None, Any]]) -> list[Seen]:
    return [seen(change) for _, change in taken]


ENCODERS = pytest.mark.parametrize("read_by", [by_sse, by_socket, by_pages])


@pytest.mark.timeout(180)
@ENCODERS
def test_the_past_comes_by_the_time_of_recording_and_goes_on_from_each_token(
    both: Both, address: str, monkeypatch: pytest.MonkeyPatch, read_by: Any
) -> None:
    monkeypatch.setattr("everstate.api.subscribing._CHUNK", 3)
    both.send(16, seed=1)
    wanted = both.wanted()
    assert {entity for entity, _, _ in wanted} == {"order", "seat"}
    whole = read(read_by(address, "beginning"))
    assert changes_of(whole) == wanted
    # Now the process has hubs, and reads on from their memory or from the log.
    for number, (token, _) in enumerate(whole):
        if token is not None:
            assert changes_of(read(read_by(address, token))) == wanted[number + 1 :]


def follow(both: Both, address: str, count: int) -> list[tuple[str | None, Any]]:
    """Changes that come while a subscriber follows, with their tokens."""
    taken, ready = list[tuple[str | None, Any]](), threading.Event()

    def run() -> None:
        for name, token, data in by_sse(address, "now"):
            if name == "live":
                ready.set()
            if name == "change":
                taken.append((token, data))
            if len(taken) == count:
                return

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    both.send(count, seed=2)
    thread.join(30)
    assert not thread.is_alive()
    return taken


def wrong_positions(both: Both, address: str) -> list[str]:
    """From which tokens of a live stream a subscriber does not get exactly the rest."""
    taken = follow(both, address, 16)
    every, found = changes_of(taken), list[str]()
    assert Counter(every) == Counter(both.wanted())
    for number, (token, _) in enumerate(taken):
        assert token is not None
        rest = changes_of(read(by_sse(address, token)))
        # What lives comes as it arrives: each key in its order, and no more is promised.
        if Counter(rest) != Counter(every[number + 1 :]):
            found.append(f"{number}: {rest} is not {every[number + 1 :]}")
        found += faults([keyed(change) for change in rest_of(rest)])
    return found


def rest_of(rest: Sequence[Seen]) -> list[dict[str, Any]]:
    return [{"entity": entity, "key": key, "version": version} for entity, key, version in rest]


def keyed(change: Mapping[str, Any]) -> dict[str, Any]:
    """The key with its entity type, for the checker of versions."""
    return {"key": f"{change['entity']}/{change['key']}", "version": change["version"]}


@pytest.mark.timeout(180)
def test_what_came_live_goes_on_from_each_token(both: Both, address: str) -> None:
    assert wrong_positions(both, address) == []


@pytest.mark.timeout(180)
def test_a_token_of_what_was_read_ahead_is_found(
    both: Both, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the token of the hubs, which have read more than the subscriber was sent."""

    def ahead(self: ChangeSubscriber, _: object) -> str:
        return str(
            Token({n: LogPosition(hub._stream.mark, hub._spots) for n, hub in self._hubs.items()})
        )

    monkeypatch.setattr(ChangeSubscriber, "_token", ahead)
    assert wrong_positions(both, address)


class FollowsBoth(Subscriber):
    followed = BOTH


class FollowsBothBySocket(BySocket):
    followed = BOTH


def wrong_under_load(
    both: Both, address: str, route: type[Subscriber], seconds: float
) -> list[str]:
    """What subscribers that leave and come back have too much or too little in the end."""
    ended, logs = threading.Event(), (both.orders, both.seats)
    writers = [
        threading.Thread(target=load, args=(each, ended, Random(n))) for n, each in enumerate(logs)
    ]
    with both.orders.keeping(), both.seats.keeping():
        found = [route(address, Random(seed), since="beginning") for seed in range(4)]
        for each in found:
            assert each.is_live.wait(20)
        for writer in writers:
            writer.start()
        time.sleep(seconds)
        ended.set()
        for writer in writers:
            writer.join()
        for log in logs:
            log.wait_until_kept()
        wanted = sum(version for log in logs for version, _ in log.versions.values())
        deadline = time.monotonic() + 15
        while any(len(each.changes) < wanted for each in found) and time.monotonic() < deadline:
            time.sleep(0.05)
        for each in found:
            each.stop()
    assert sum(each.left for each in found) > 10, "they were away often"
    first = {f"{log.entity}/{key}": 0 for log in logs for key in log.versions}
    wrong = [f"{len(e.changes)} of {wanted}" for e in found if len(e.changes) != wanted]
    return wrong + [
        each for e in found for each in faults([keyed(change) for change in e.changes], first)
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("route", [FollowsBoth, FollowsBothBySocket])
def test_subscribers_that_leave_and_come_back_miss_nothing_and_get_nothing_twice(
    both: Both, address: str, route: type[Subscriber]
) -> None:
    assert wrong_under_load(both, address, route, 3.0) == []


@pytest.mark.timeout(180)
@ENCODERS
def test_the_archive_comes_first_and_the_log_goes_on(
    both: Both, address: str, read_by: Any
) -> None:
    both.send(16, seed=3)
    wanted = both.wanted()
    tokens = [token for token, _ in read(by_sse(address, "beginning"))]
    half = {p: end // 2 for p, end in both.orders.kept.vector().items()}
    both.orders.archive(half)
    forget(both.orders.config, both.orders.topic, half)
    with served(both.orders) as other:
        whole = changes_of(read(read_by(other, "beginning")))
        assert whole == both.wanted()
        assert Counter(whole) == Counter(wanted)
        for number, token in enumerate(tokens):
            assert token is not None
            rest = changes_of(read(read_by(other, token)))
            assert Counter(rest) == Counter(wanted[number + 1 :]), number


@ENCODERS
def test_a_reader_begins_at_a_time(both: Both, address: str, read_by: Any) -> None:
    both.send(6, seed=4)
    time.sleep(0.05)
    moment, before = time.time(), len(both.wanted())
    time.sleep(0.05)
    both.send(6, seed=5)
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1000):03}Z"
    assert changes_of(read(read_by(address, at))) == both.wanted()[before:]


def test_a_time_after_what_the_core_has_judged_brings_nothing_older(
    both: Both, address: str
) -> None:
    for each in (both.orders, both.seats):
        each.send(each.change("k1", region="north"))
    time.sleep(0.05)
    later = FollowsBoth(address, since=datetime.now(UTC).isoformat())
    assert later.is_live.wait(20)
    both.send(6, seed=7)
    until(lambda: len(later.changes) >= 6)
    later.stop()
    assert Counter(map(seen, later.changes)) == Counter(both.wanted()[2:])


@ENCODERS
def test_a_thin_notice_has_a_link_in_place_of_the_states(
    both: Both, address: str, read_by: Any
) -> None:
    both.seats.send(both.seats.change("a b/c", region="north"), both.seats.change("a b/c"))
    both.orders.send(both.orders.change("k1", region="south"))
    both.keep()
    found = {seen(change): change for _, change in read(read_by(address, "beginning", thin="true"))}
    link = "/v1/seat/a%20b%2Fc?version=1"
    made = {"entity": "seat", "key": "a b/c", "version": 1, "kind": "created", "link": link}
    assert found["seat", "a b/c", 1] == made
    assert httpx.get(address + link).json()["region"] == "north"
    deleted = found["seat", "a b/c", 2]
    assert deleted["kind"] == "deleted"
    assert httpx.get(address + deleted["link"]).status_code == 410
    assert httpx.get(address + found["order", "k1", 1]["link"]).json()["region"] == "south"


def test_the_client_follows_several_entity_types(both: Both, address: str) -> None:
    both.send(6, seed=6)
    found = list[Seen]()
    with Client(address) as client:
        for event in client.subscribe(BOTH, since="beginning", thin=True):
            if event.name == "live":
                break
            found.append(seen(event.data))
            assert "link" in event.data
        pages = list(client.feed(BOTH))
        assert [seen(change) for page in pages for change in page.changes] == both.wanted() == found
        both.send(4, seed=9)
        later = [
            seen(c) for page in client.feed(BOTH, since=pages[-1].bookmark) for c in page.changes
        ]
    assert later == both.wanted(pages[-1].bookmark) != []


def test_present_rows_of_all_types_come_first_and_conditions_hold_for_all(
    both: Both, address: str
) -> None:
    both.orders.send(
        both.orders.change("k1", status="open"), both.orders.change("k2", status="new")
    )
    both.seats.send(both.seats.change("k1", status="open"))
    both.keep()
    rows, thin = list[Any](), list[Any]()
    for query, taken in (({}, rows), ({"thin": "true"}, thin)):
        url = f"{address}/stream/v1/{BOTH}"
        given = {"current": "true", "key": "k1", **query}
        with httpx.stream("GET", url, params=given, timeout=20) as response:
            for name, _, data in events(response):
                if name == "live":
                    break
                taken.append((name, data))
    assert [(name, *seen(row), row["state"]["status"]) for name, row in rows] == [
        ("current", "order", "k1", 1, "open"),
        ("current", "seat", "k1", 1, "open"),
    ]
    assert thin[1][1] == {
        "entity": "seat",
        "key": "k1",
        "version": 1,
        "link": "/v1/seat/k1?version=1",
    }
    paid = FollowsBoth(address, becomes="status:paid")
    assert paid.is_live.wait(20)
    for each in (both.orders, both.seats):
        each.send(each.change("k1", status="paid"), each.change("k1", status="void"))
    both.keep()
    until(lambda: len(paid.changes) == 2)
    paid.stop()
    assert Counter(map(seen, paid.changes)) == Counter([("order", "k1", 2), ("seat", "k1", 2)])


@contextmanager
def with_callers(both: Both) -> Iterator[httpx.Client]:
    """A server with callers of some rights, and masked regions of orders."""
    tokens = {
        "both": caller_entry("both", permissions={"*": ("read",)}),
        "one": caller_entry("one", permissions={"order": ("read",)}),
    }
    api = ApiConfig(port=0, tokens=tokens, masks={"order": ("region",)})
    both.orders.config = both.orders.config.model_copy(update={"api": api})
    with served(both.orders) as address, httpx.Client(base_url=address, timeout=20) as client:
        yield client


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_who_may_not_read_one_of_the_types_is_refused_and_each_type_has_its_mask(
    both: Both,
) -> None:
    both.send(8, seed=7)
    with with_callers(both) as client:
        for path in (f"/feed/v1/{BOTH}", f"/stream/v1/{BOTH}", "/stream/v1/seat,order"):
            refused = client.get(path, headers=bearer("one"))
            assert (refused.status_code, "`read` on seat" in refused.text) == (403, True)
        hidden = client.get(f"/stream/v1/{BOTH}?changed=region", headers=bearer("both"))
        assert (hidden.status_code, "unmasked" in hidden.text) == (403, True)
        page = client.get(f"/feed/v1/{BOTH}?since=beginning", headers=bearer("both")).json()
    assert len(page["changes"]) == 8
    for change in page["changes"]:
        region = change["currentEntityState"]["region"]
        assert region == (MASKED if change["entity"] == "order" else "north")


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("order,chair", 404, "chair"),
        ("order,seat?changed=colour", 400, "colour"),
        ("order,seat?thin=yes", 400, "thin is 'yes'"),
        ("order,seat?since=yesterday", 422, "neither a token nor a time"),
        ("order,", 404, "unknown entity type"),
    ],
)
def test_what_cannot_be_followed_says_why(
    both: Both, address: str, path: str, status: int, said: str
) -> None:
    for kind in ("stream", "feed"):
        answer = httpx.get(f"{address}/{kind}/v1/{path}")
        assert answer.status_code == status, answer.text
        assert said in answer.text


def test_a_page_needs_the_position_of_each_type_and_takes_no_parameter_of_a_stream(
    both: Both, address: str
) -> None:
    with both.orders.app.changes("order", since="now", config=both.orders.config) as one:
        token = one.token
    for kind in ("stream", "feed"):
        answer = httpx.get(f"{address}/{kind}/v1/{BOTH}", params={"since": token})
        assert (answer.status_code, "no position of seat" in answer.text) == (422, True)
    answer = httpx.get(f"{address}/feed/v1/{BOTH}?current=true")
    assert (answer.status_code, "no parameter 'current'" in answer.text) == (400, True)
    # The first page of a client that begins now has no changes, and a token to go on from.
    page = httpx.get(f"{address}/feed/v1/{BOTH}")
    assert page.headers["cache-control"] == "no-store"
    both.send(4, seed=8)
    token = page.json()["token"]
    assert changes_of(read(by_pages(address, token))) == both.wanted()


def test_subscriptions_go_on_from_memory_only_if_all_of_them_do(
    both: Both, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what one hub remembers would come before the older changes of the other."""
    missed = ChangeHub._missed
    monkeypatch.setattr(
        ChangeHub,
        "_missed",
        lambda self, *given: missed(self, *given) if self._what.endswith("seat") else None,
    )
    first = follow(both, address, 12)[0][0]
    assert first is not None
    assert changes_of(read(by_sse(address, first))) == both.wanted(first)
