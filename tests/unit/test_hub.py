"""What a subscription gets, and what ends it: without a log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from everstate.api.subscribing import Wish
from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.changes.tokens import Partition, Spot
from everstate.config import Config
from everstate.errors import CorruptRecord, Unavailable
from everstate.http.masks import NO_MASK
from everstate.log.record import Record
from everstate.serving import hub as hub_module
from everstate.serving import shared_reader
from everstate.serving.changes import ChangeStream, Delivery
from everstate.serving.hub import ChangeHub, Subscription
from kit.waiting import until

WAIT_S = 20.0


def test_a_subscriber_is_woken_once_for_all_that_waits() -> None:
    woken: list[bool] = []
    subscription = Subscription({}, lambda _: True, lambda: woken.append(True), limit=2)
    first, second, third = _deliveries(3)
    subscription.offer(first)
    subscription.offer(second)
    assert len(woken) == 1
    subscription.offer(third)
    assert subscription.take() == ([second, third], 1)
    subscription.offer(first)
    assert len(woken) == 2
    assert subscription.take() == ([first], 0)


def test_a_change_that_is_not_wanted_wakes_nobody() -> None:
    woken: list[bool] = []
    subscription = Subscription({}, lambda _: False, lambda: woken.append(True), limit=2)
    subscription.offer(_deliveries(1)[0])
    assert (woken, subscription.take()) == ([], ([], 0))


def test_what_waits_for_a_subscriber_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_WAITING_BYTES", 25)
    subscription = Subscription({}, lambda _: True, lambda: None, limit=100)
    first, second, third = _deliveries(3, size=10)
    for each in (first, second):
        subscription.offer(each)
    assert not subscription.is_overrun
    subscription.offer(third)
    assert subscription.is_overrun
    assert subscription.take() == ([second, third], 1)
    (large,) = _deliveries(1, size=1_000)
    for each in (first, large):
        subscription.offer(each)
    assert subscription.take() == ([large], 1), "one change is handed over, however large"
    for each in (first, second):
        subscription.offer(each)
    assert subscription.take() == ([first, second], 0), "what was taken does not count"


def _deliveries(count: int, *, size: int = 0) -> list[Delivery]:
    made = [SimpleNamespace(record=SimpleNamespace(value=b"x" * size)) for _ in range(count)]
    return cast("list[Delivery]", made)


class Guest(BaseModel):
    guest_id: str
    nights: float = 0


HOTEL = App("hotel")
HOTEL.entity("guest", key="guest_id")(Guest)
GUEST = HOTEL.entity_type("guest")
AT: Partition = (1, 0)


def change(nights: str, kind: str = "created") -> Delivery:
    """A change of the log whose state has a number of these digits."""
    wire = (
        '{"id":"0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77","entity":"guest","schemaVersion":1,'
        f'"key":"g1","version":1,"kind":"{kind}","occurredAt":"2026-01-01T00:00:00Z",'
        '"recordedAt":"2026-01-01T00:00:00Z","provenance":{"apiVersion":"v1","serviceName":"s",'
        f'"identifier":"i"}},"currentEntityState":{{"guest_id":"g1","nights":{nights}}},'
        '"originalEntityState":null}'
    )
    record = Record("t", 0, 0, 0, b"g1", wire.encode(), (), 1)
    return Delivery(record, AT, Spot(1), ChangeStream("guest", b"m", ChangeCodec(GUEST)), {})


class Log:
    """A stream of changes: the test says what it delivers, or how it fails."""

    mark = b"m"

    def __init__(self, since: str) -> None:
        self.since = since
        self.spots, self.token = {AT: Spot(0)}, "token-0"
        self.given: list[Delivery | Exception] = []
        self.go, self.delivered, self.closed = (threading.Event() for _ in range(3))

    def __iter__(self) -> Iterator[Delivery]:
        assert self.go.wait(WAIT_S)
        for each in self.given:
            if isinstance(each, Exception):
                raise each
            self.token = f"token-{each.spot.next_offset}"
            yield each
        self.delivered.set()
        self.closed.wait(WAIT_S)

    def close(self) -> None:
        self.go.set()
        self.closed.set()


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[Log]:
    """The streams that hubs open, in their order."""
    made: list[Log] = []

    def opened(*_: object, since: str) -> Log:
        made.append(Log(since))
        return made[-1]

    monkeypatch.setattr(hub_module, "Changes", opened)
    return made


@pytest.fixture
def hub(logs: list[Log]) -> Iterator[ChangeHub]:
    """A hub whose thread ends with the test: later ones would have its errors in their log."""
    hub = ChangeHub(Config(), HOTEL, "guest")
    yield hub
    hub.close()


class Follower:
    """A subscriber: a subscription, and when something was last said to it."""

    def __init__(self, hub: ChangeHub, **given: str) -> None:
        self.woken = threading.Event()
        wants: Callable[[Delivery], bool] = Wish.of(GUEST, given, None, NO_MASK).wants
        self.hub = hub
        assert hub.join(self.woken.set)
        self.subscription = hub.subscribe(self.woken.set, wants=wants)

    def failure(self) -> Exception | None:
        assert self.woken.wait(WAIT_S)
        return self.subscription.failure or self.hub.failure


def test_a_change_that_cannot_be_read_ends_only_the_subscriptions_with_a_condition(
    logs: list[Log],
    hub: ChangeHub,
) -> None:
    plain, conditional = Follower(hub), Follower(hub, kind="created")
    unreadable, later = change("9" * 4_301), change("1")
    logs[0].given = [unreadable, later]
    logs[0].go.set()
    assert isinstance(conditional.failure(), CorruptRecord)
    assert plain.failure() is None
    assert logs[0].delivered.wait(WAIT_S)
    assert plain.subscription.take() == ([unreadable, later], 0)
    assert conditional.subscription.take() == ([], 0)


def test_a_condition_that_fails_ends_its_own_subscription(logs: list[Log]) -> None:
    def fails(_: Delivery) -> bool:
        raise ZeroDivisionError

    woken = threading.Event()
    subscription = Subscription({}, fails, woken.set, limit=2)
    subscription.offer(change("1"))
    assert woken.is_set()
    assert isinstance(subscription.failure, Unavailable)
    assert logs == []


def test_a_stream_that_ends_by_an_unknown_error_ends_its_subscriptions_and_is_replaced(
    logs: list[Log],
    hub: ChangeHub,
) -> None:
    first = Follower(hub)
    logs[0].given = [RuntimeError("nobody expected it")]
    logs[0].go.set()
    failure = first.failure()
    assert isinstance(failure, Unavailable)
    assert failure.retryable
    assert "nobody expected it" not in failure.public
    assert not hub.join(lambda: None)
    assert logs[0].closed.is_set()


def test_a_stream_that_is_cut_off_goes_on_where_it_stopped(
    logs: list[Log], hub: ChangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reader, "_RETRY_S", 0.001)
    follower = Follower(hub)
    logs[0].given = [change("1"), Unavailable("no broker answers.")]
    logs[0].go.set()
    until(lambda: len(logs) == 2)
    assert logs[1].since == "token-1"
    logs[1].given = [change("2")]
    logs[1].go.set()
    assert logs[1].delivered.wait(WAIT_S)
    assert follower.failure() is None
    assert len(follower.subscription.take()[0]) == 2
    hub.close()
    assert isinstance(follower.failure(), Unavailable)


def test_a_hub_ends_a_while_after_its_last_subscriber_unless_one_comes_back(
    logs: list[Log], hub: ChangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reader, "_LINGER_S", 0.05)
    first = Follower(hub)
    hub.leave(first.woken.set)
    second = Follower(hub)
    assert not logs[0].closed.wait(0.2), "it has a subscriber again"
    hub.leave(second.woken.set)
    hub.leave(second.woken.set)
    assert logs[0].closed.wait(WAIT_S)
    assert not hub.join(lambda: None)
    assert hub.failure is None


def test_a_hub_that_is_closed_while_its_stream_is_opened_closes_the_stream(
    logs: list[Log], hub: ChangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = hub._make

    def closed_meanwhile(since: str) -> Any:
        stream = make(since=since)
        hub.close()
        return stream

    monkeypatch.setattr(hub, "_make", closed_meanwhile)
    assert not hub.join(lambda: None)
    assert logs[0].closed.is_set()


def test_a_hub_whose_thread_did_not_start_is_replaced(
    logs: list[Log], hub: ChangeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as lacking:
        lacking.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            Follower(hub)
    assert not hub.join(lambda: None)
    assert logs[0].closed.is_set()


def test_a_subscriber_has_everything_up_to_where_the_hub_is_while_nothing_waits(
    logs: list[Log],
    hub: ChangeHub,
) -> None:
    every, others = Follower(hub), Follower(hub, kind="deleted")
    assert hub.reached(every.subscription) == {AT: Spot(0)}
    logs[0].given = [change("1")]
    logs[0].go.set()
    assert logs[0].delivered.wait(WAIT_S)
    assert hub.reached(others.subscription) == {AT: Spot(1)}
    assert hub.reached(every.subscription) == {}
    every.subscription.take()
    assert hub.reached(every.subscription) == {AT: Spot(1)}
