"""What a subscriber asks for, read from its parameters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import httpx
import orjson
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from callers import caller_entry
from everstate.api import events, subscribing
from everstate.api.events import EventBatches, StreamEvent
from everstate.api.problems import handle_errors
from everstate.api.stream_router import encoded, subscription_router
from everstate.api.subscribing import ChangeSubscriber, Subscriptions, Wish
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.changes.tokens import LogPosition, Partition, Spot, Token
from everstate.config import Config
from everstate.errors import InvalidQuery
from everstate.http.asgi import Desk
from everstate.http.callers import Callers
from everstate.http.masks import NO_MASK
from everstate.log.record import Record
from everstate.serving import hub as hub_module
from everstate.serving.changes import Delivery, has_room
from everstate.serving.hub import ChangeHub, Subscription
from kit.changes import change_of


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
    wishes = {"parcel": Wish.of(PARCEL, {"key": "k"}, None, NO_MASK)}

    def past(size: int) -> Iterator[Any]:
        for offset in range(1_000):
            token = f"at-{offset}"
            yield SimpleNamespace(record=record(offset, size), token=token, entity="parcel")

    large, small = past(2**20), past(10)
    tokens = [[event.token for event in subscribing._chunk(large, wishes)] for _ in range(2)]
    assert tokens == [["at-0", "at-1"], ["at-2", "at-3"]]
    assert len(subscribing._chunk(small, wishes)) == 200
    others = {"parcel": Wish.of(PARCEL, {"key": "other"}, None, NO_MASK)}
    assert subscribing._chunk(small, others) == [StreamEvent("", token="at-399")]
    assert subscribing._chunk(iter(()), wishes) == []


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
        live = following(wish, hub, quiet).live({"parcel": quiet.spots}, {})
        return [await anext(live) for _ in range(2)]

    found = asyncio.run(beats())
    assert found == [[StreamEvent("", token=at(7))]] * 2

    async def sent() -> bytes:
        async def batches() -> EventBatches:
            yield found[0]

        return b"".join([part async for part in encoded(batches())])

    assert asyncio.run(sent()).endswith(f"\n\nid: {at(7)}\n\n".encode())


def following(wish: Wish, hub: Any, subscription: Subscription) -> ChangeSubscriber:
    """A subscriber that has begun."""
    made = ChangeSubscriber(Subscriptions(Config(), App("none")), {"parcel": wish}, _in_place)
    made._hubs, made._subscriptions = {"parcel": hub}, {"parcel": subscription}
    return made


def at(*offsets: int, **others: tuple[int, ...]) -> str:
    """The token of these offsets of the partitions of parcels, and of other entity types."""
    positions = {
        name: LogPosition(b"m", {(1, p): Spot(offset) for p, offset in enumerate(each)})
        for name, each in {"parcel": offsets, **others}.items()
    }
    return str(Token(positions))


def standing_at(reached: Mapping[Partition, Spot]) -> Any:
    """A hub that has handed over everything up to some spots."""
    return SimpleNamespace(
        position_of=lambda spots: LogPosition(b"m", spots),
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
    given: Any = SimpleNamespace(entity="parcel")
    wish = Wish.of(PARCEL, {}, None, NO_MASK)
    found = Record("t", 1, 40, 0, b"p1", b"{}", (), 1)
    # The stream had read the first partition up to 90, and what the present rows have lies before.
    few.offer(Delivery(found, (1, 1), Spot(41), given, {(1, 0): Spot(90), (1, 2): Spot(5)}))

    async def taken() -> list[Sequence[StreamEvent]]:
        hub = standing_at({(1, 0): Spot(95), (1, 1): Spot(41), (1, 2): Spot(60)})
        live = following(wish, hub, few).live({"parcel": few.spots}, {})
        return [await anext(live) for _ in range(2)]

    assert asyncio.run(taken()) == [
        [StreamEvent("change", "{}", at(90, 41, 7))],
        [StreamEvent("", token=at(95, 41, 60))],
    ]


def test_changes_of_several_types_come_by_time_and_each_token_says_what_was_sent() -> None:
    """Each type's own order stays, whatever its times: its tokens count on it."""
    subscriptions, hub = dict[str, Subscription](), standing_at({})
    for name, came in {"parcel": (10, 30, 20), "van": (15, 25)}.items():
        begin = {(1, 0): Spot(0)}
        subscriptions[name] = Subscription(begin, lambda _: True, lambda: None, limit=9)
        for offset, ms in enumerate(came):
            made = Record("t", 0, offset, ms, name.encode(), f"{ms}".encode(), (), 1)
            given: Any = SimpleNamespace(entity=name)
            subscriptions[name].offer(Delivery(made, (1, 0), Spot(offset + 1), given, {}))
    wishes = dict.fromkeys(subscriptions, Wish.of(PARCEL, {}, None, NO_MASK))

    async def taken() -> Sequence[StreamEvent]:
        subscriber = ChangeSubscriber(Subscriptions(Config(), App("none")), wishes, _in_place)
        subscriber._hubs, subscriber._subscriptions = dict.fromkeys(wishes, hub), subscriptions
        begins = {name: each.spots for name, each in subscriptions.items()}
        return await anext(subscriber.live(begins, {}))

    assert [(event.data, event.token) for event in asyncio.run(taken())] == [
        ("10", at(1, van=(0,))),
        ("15", at(1, van=(1,))),
        ("25", at(1, van=(2,))),
        ("30", at(2, van=(2,))),
        ("20", at(3, van=(2,))),
    ]


def test_a_thin_notice_has_no_state() -> None:
    who = Provenance(api_version="v1", service_name="desk", identifier="clerk")
    old = Parcel(parcel_id="a/b ü", note="secret")
    told = change_of("parcel", "a/b ü", 3, None, old, who=who)
    wire = ChangeCodec(PARCEL).encode(told)[1]
    given: Any = SimpleNamespace(entity="parcel")
    delivery = Delivery(Record("t", 0, 0, 0, b"p", wire, (), 1), (1, 0), Spot(1), given, {})
    wish = Wish.of(PARCEL, {"thin": "true"}, None, NO_MASK)
    assert orjson.loads(subscribing._change(wish, delivery, "t").data) == {
        "entity": "parcel",
        "key": "a/b ü",
        "version": 3,
        "kind": "deleted",
        "link": "/v1/parcel/a%2Fb%20%C3%BC?version=3",
    }
    with pytest.raises(InvalidQuery, match="thin is 'yes'"):
        Wish.of(PARCEL, {"thin": "yes"}, None, NO_MASK)


@pytest.mark.parametrize("kind", ["stream", "feed"])
@pytest.mark.parametrize(
    ("who", "asked", "status", "said"),
    [
        ("one", "parcel,van", 403, "`read` on van"),
        ("one", "van,parcel", 403, "`read` on van"),
        ("both", "parcel,van?changed=note", 403, "`unmasked` on van"),
        ("both", "parcel,van?changed=colour", 400, "colour"),
        ("both", "parcel,van?thin=yes", 400, "thin is 'yes'"),
        ("both", "parcel,chair", 404, "unknown entity type 'chair'"),
        ("nobody", "parcel,van", 401, "no valid token"),
    ],
)
def test_a_stream_of_several_types_is_refused_as_that_of_each_is(
    kind: str, who: str, asked: str, status: int, said: str
) -> None:
    app, api = App("post"), FastAPI()
    for name in ("parcel", "van"):
        app.entity(name, key="parcel_id")(Parcel)
    tokens = {
        "one": caller_entry("one", permissions={"parcel": ("read", "unmasked")}),
        "both": caller_entry("both", permissions={"*": ("read",), "parcel": ("read", "unmasked")}),
    }
    callers = Callers(ApiConfig(tokens=tokens, masks={"van": ("note",)}))
    desk = Desk(callers, body_bytes_max=1_000, threads=1)
    handle_errors(api)
    api.include_router(subscription_router(None, Subscriptions(Config(), app), desk))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(api)
        headers = {"Authorization": f"Bearer {who}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://post") as client:
            return await client.get(f"/{kind}/v1/{asked}", headers=headers)

    answer = asyncio.run(ask())
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


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
            given: Any = SimpleNamespace(
                entity="parcel", token=lambda spots: f"at-{spots[1, 0].next_offset}"
            )
            yield Delivery(record, (1, 0), Spot(n + 1), given, {})


async def _in_place(call: Callable[[], Any]) -> Any:
    return call()


def catching_up(turns: int) -> Callable[[], EventBatches]:
    """What makes a subscriber that reads the past, of all of which only some read at once."""
    subscriptions = Subscriptions(Config(), App("none"))
    subscriptions.turns = asyncio.Semaphore(turns)
    wish = Wish.of(PARCEL, {"since": "beginning"}, None, NO_MASK)
    past = cast("Any", Past())
    return lambda: ChangeSubscriber(subscriptions, {"parcel": wish}, _in_place).past(past)


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

    token = "token"


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
    api.include_router(subscription_router("parcel", subscriptions, desk))
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
