"""What a subscriber asks for, read from its parameters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from everstate.api import events, subscribing
from everstate.api.events import EventBatches, StreamEvent
from everstate.api.stream_router import encoded, subscription_router
from everstate.api.subscribing import ChangeSubscriber, Subscriptions, Wish
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import EntityType
from everstate.changes.tokens import Partition, Spot
from everstate.config import Config
from everstate.http.asgi import Desk
from everstate.http.callers import Callers
from everstate.http.masks import NO_MASK
from everstate.log.record import Record
from everstate.serving import hub as hub_module
from everstate.serving.changes import Delivery, has_room
from everstate.serving.hub import ChangeHub, Subscription


class Parcel(BaseModel):
    parcel_id: str
    note: str | None = None
    pieces: int | None = None


PARCEL = EntityType("parcel", Parcel, "parcel_id")


@pytest.mark.parametrize(
    ("becomes", "note"),
    [("note:null", None), ('note:"null"', "null"), ("note:late", "late"), ("note: a ", " a ")],
)
def test_a_subscriber_asks_for_null_and_for_the_text_null(becomes: str, note: str | None) -> None:
    trigger = Wish.of(PARCEL, {"becomes": becomes}, None, NO_MASK).trigger
    assert trigger is not None
    for value in (None, "null", "late", " a "):
        assert trigger.fires(PARCEL, {"note": "other"}, {"note": value}) is (value == note)


def test_a_subscriber_asks_for_a_number_and_for_none() -> None:
    for becomes, pieces in (("pieces:3", 3), ("pieces:null", None)):
        trigger = Wish.of(PARCEL, {"becomes": becomes}, None, NO_MASK).trigger
        assert trigger is not None
        assert trigger.fires(PARCEL, {"pieces": 1}, {"pieces": pieces})


def record(offset: int, size: int) -> Record:
    return Record("t", 0, offset, 1, b"k", b"x" * size, ())


def test_a_chunk_of_the_past_is_bounded_in_bytes_as_well() -> None:
    """Else two hundred changes of a megabyte each were in memory, for every subscriber."""
    wish = Wish.of(PARCEL, {"key": "k"}, None, NO_MASK)

    def past(size: int) -> Iterator[Any]:
        for offset in range(1_000):
            yield SimpleNamespace(record=record(offset, size), token=f"at-{offset}")

    large, small = past(2**20), past(10)
    tokens = [[event.token for event in subscribing._chunk(large, wish)] for _ in range(2)]
    assert tokens == [["at-0", "at-1"], ["at-2", "at-3"]]
    assert len(subscribing._chunk(small, wish)) == 200
    others = Wish.of(PARCEL, {"key": "other"}, None, NO_MASK)
    assert subscribing._chunk(small, others) == [StreamEvent("", token="at-399")]
    assert subscribing._chunk(iter(()), wish) == []


def test_records_that_wait_for_the_core_are_bounded_in_bytes_as_well() -> None:
    assert has_room([10] * 4_999)
    assert not has_room([10] * 5_000)
    assert has_room([2**20] * 15)
    assert not has_room([2**20] * 16)


def test_a_subscriber_without_changes_gets_its_position_which_no_browser_takes_for_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "_BEAT_S", 0.001)
    hub = standing_at({})
    quiet = Subscription({(1, 0): Spot(7)}, lambda _: True, lambda: None, limit=1)
    wish = Wish.of(PARCEL, {}, None, NO_MASK)

    async def beats() -> list[Sequence[StreamEvent]]:
        live = following(wish, hub, quiet).live(quiet.spots, 0)
        return [await anext(live) for _ in range(2)]

    found = asyncio.run(beats())
    assert found == [[StreamEvent("", token="7")]] * 2

    async def sent() -> bytes:
        async def batches() -> EventBatches:
            yield found[0]

        return b"".join([part async for part in encoded(batches())])

    assert asyncio.run(sent()).endswith(b"\n\nid: 7\n\n")


def following(wish: Wish, hub: Any, subscription: Subscription) -> ChangeSubscriber:
    """A subscriber that has begun."""
    made = ChangeSubscriber(Subscriptions(Config(), App("none")), wish, _in_place)
    made._hub, made._subscription = hub, subscription
    return made


def standing_at(reached: Mapping[Partition, Spot]) -> Any:
    """A hub that has handed over everything up to some spots."""
    return SimpleNamespace(
        token_of=lambda spots: "-".join(str(spots[1, p].next_offset) for p in range(len(spots))),
        reached=lambda _: reached,
        failure=None,
    )


def test_who_wants_few_changes_comes_back_where_the_stream_is_and_not_where_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it reads again all that others wrote since, from the log."""
    monkeypatch.setattr(events, "_BEAT_S", 0.001)
    begin = {(1, p): Spot(7) for p in range(3)}
    few = Subscription(begin, lambda _: True, lambda: None, limit=9)
    given: Any = SimpleNamespace()
    wish = Wish.of(PARCEL, {}, None, NO_MASK)
    found = Record("t", 1, 40, 0, b"p1", b"{}", (), 1)
    # The stream had read the first partition up to 90, and what the present rows have lies before.
    few.offer(Delivery(found, (1, 1), Spot(41), given, {(1, 0): Spot(90), (1, 2): Spot(5)}))

    async def taken() -> list[Sequence[StreamEvent]]:
        hub = standing_at({(1, 0): Spot(95), (1, 1): Spot(41), (1, 2): Spot(60)})
        live = following(wish, hub, few).live(few.spots, 0)
        return [await anext(live) for _ in range(2)]

    assert asyncio.run(taken()) == [
        [StreamEvent("change", "{}", "90-41-7")],
        [StreamEvent("", token="95-41-60")],
    ]


def test_others_have_their_turn_while_many_batches_are_sent() -> None:
    """A connection that takes each batch at once is never waited for."""

    async def batches() -> EventBatches:
        for _ in range(3):
            yield [StreamEvent("change", "{}")]

    async def seen() -> list[int]:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside, found = asyncio.create_task(others()), list[int]()
        async for _ in events.while_valid(batches(), None):
            found.append(turns)
        beside.cancel()
        return found

    first, second, third = asyncio.run(seen())
    assert first < second < third


class Past:
    """Three chunks of changes before a subscription began."""

    token = "at-0"

    def __iter__(self) -> Iterator[Delivery]:
        wire = b'"' + b"x" * 2_000 + b'"'
        for n in range(3 * subscribing._CHUNK):
            record = Record("t", 0, n, 0, b"p1", wire, (), 1)
            given: Any = SimpleNamespace(token=lambda spots: f"at-{spots[1, 0].next_offset}")
            yield Delivery(record, (1, 0), Spot(n + 1), given, {})


async def _in_place(call: Callable[[], Any]) -> Any:
    return call()


def catching_up(turns: int) -> Callable[[], EventBatches]:
    """What makes a subscriber that reads the past, of all of which only some read at once."""
    subscriptions = Subscriptions(Config(), App("none"))
    subscriptions.turns = asyncio.Semaphore(turns)
    wish = Wish.of(PARCEL, {"since": "beginning"}, None, NO_MASK)
    past = cast("Any", Past())
    return lambda: ChangeSubscriber(subscriptions, wish, _in_place).past(past)


def test_subscribers_that_take_the_past_slowly_hold_up_no_other() -> None:
    async def taken() -> int:
        subscriber = catching_up(turns=2)
        slow = [subscriber() for _ in range(5)]
        for each in slow:
            assert (await anext(each))[0].name == "change"
        events = [event async for batch in subscriber() for event in batch]
        for each in slow:
            await each.aclose()
        return len(events)

    assert asyncio.run(asyncio.wait_for(taken(), 30)) == 3 * subscribing._CHUNK


def test_a_subscriber_that_waits_for_its_turn_gets_its_position_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "_BEAT_S", 0.001)

    async def taken() -> list[Sequence[StreamEvent]]:
        waiting = catching_up(turns=0)()
        found = [await anext(waiting) for _ in range(2)]
        await waiting.aclose()
        return found

    assert asyncio.run(asyncio.wait_for(taken(), 30)) == [[StreamEvent("", token="at-0")]] * 2


class Quiet:
    """A log without changes."""

    mark = b"m"

    def __init__(self, *_: object, **__: object) -> None:
        self.spots: Mapping[Partition, Spot] = {(1, 0): Spot(0)}
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Delivery]:
        self._closed.wait(20)
        return iter(())

    def close(self) -> None:
        self._closed.set()

    def token_of(self, _: object) -> str:
        return "token"


@pytest.mark.parametrize("is_head_sent", [True, False])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_client_that_leaves_before_its_first_event_leaves_no_subscription(
    monkeypatch: pytest.MonkeyPatch, spec_version: str, *, is_head_sent: bool
) -> None:
    monkeypatch.setattr(hub_module, "Changes", Quiet)
    app = App("post")
    app.entity("parcel", key="parcel_id")(Parcel)
    subscriptions, api = Subscriptions(Config(), app), FastAPI()
    desk = Desk(Callers(ApiConfig()), body_bytes_max=1_000, threads=1)
    api.include_router(subscription_router(PARCEL, subscriptions, desk))
    hubs: list[ChangeHub] = []

    async def ask() -> None:
        requests = iter([{"type": "http.request", "body": b""}])
        gone = asyncio.Event()

        async def receive() -> Any:
            given = next(requests, None)
            if given is None:
                await gone.wait()
            return given or {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            hubs[:] = subscriptions._readers.values()
            assert all(hub._by_key for hub in hubs)
            if message["type"] == "http.response.start" and is_head_sent:
                return
            gone.set()
            raise OSError("the client is gone")

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/stream/v1/parcel",
            "headers": [],
            "query_string": b"",
            "asgi": {"version": "3.0", "spec_version": spec_version},
        }
        with suppress(OSError, ClientDisconnect, ExceptionGroup):
            await api(scope, receive, send)

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert [hub._by_key for hub in hubs] == [{}]
    subscriptions.close()
