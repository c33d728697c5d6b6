"""What the client sends, and what it makes of answers, without a server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest

from everstate.changes import Provenance
from everstate.client import AsyncClient, Client, Event, RequestFailed
from everstate.client.requests import place, view_place
from everstate.errors import InvalidRequest
from everstate.http import callers

Handler = Callable[[httpx.Request], httpx.Response]


def calling(handler: Handler, provenance: Provenance | None = None) -> Client:
    """A client whose requests a function answers."""
    client = Client("http://shop.test", provenance=provenance)
    client._client.connections = httpx.Client(
        base_url="http://shop.test", transport=httpx.MockTransport(handler)
    )
    return client


def moved(request: httpx.Request) -> httpx.Response:
    return httpx.Response(308, headers={"Location": f"https://shop.test{request.url.path}"})


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.put("guest", "k", {"id": "k"}),
        lambda client: client.patch("guest", "k", {"name": "Eva"}),
        lambda client: client.delete("guest", "k"),
        lambda client: client.get("guest", "k"),
        lambda client: next(client.subscribe("guest")),
    ],
)
def test_a_redirect_is_no_success(call: Callable[[Client], object]) -> None:
    """A write that a proxy redirected was reported as saved, at version 0."""
    with pytest.raises(RequestFailed, match=r"a redirect to https://shop\.test/") as refusal:
        call(calling(moved))
    assert refusal.value.status == 308


def test_a_setting_that_there_is_not_is_no_setting() -> None:
    client: Any = calling(lambda _: httpx.Response(200))
    with pytest.raises(TypeError, match="onec"):
        client.put("guest", "k", {"id": "k"}, onec="1")
    with pytest.raises(TypeError, match="srevice"):
        next(client.written("guest", srevice="desk"))
    with pytest.raises(TypeError, match="order"):
        next(client.history("guest", "k", order="newest"))


def test_a_redirect_is_no_success_for_asyncio() -> None:
    async def put() -> None:
        client = AsyncClient("http://shop.test")
        client._http = httpx.AsyncClient(
            base_url="http://shop.test", transport=httpx.MockTransport(moved)
        )
        await client.put("guest", "k", {"id": "k"})

    with pytest.raises(RequestFailed, match="redirect"):
        asyncio.run(put())


def test_an_answer_that_is_neither_success_nor_error_is_refused() -> None:
    with pytest.raises(RequestFailed, match="status 304"):
        calling(lambda _: httpx.Response(304)).put("guest", "k", {"id": "k"})


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, html="<h1>Please log in</h1>"),
        httpx.Response(200, json={"id": "k"}, headers={"ETag": '"5f2a"'}),
        httpx.Response(204),
    ],
    ids=["a page for people", "another server's ETag", "nothing"],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.put("guest", "k", {"id": "k"}),
        lambda client: client.delete("guest", "k"),
        lambda client: client.get("guest", "k"),
    ],
)
def test_another_servers_answer_is_no_success(
    call: Callable[[Client], object], answer: httpx.Response
) -> None:
    """A write was reported as saved, at version 0."""
    with pytest.raises(RequestFailed, match="UnexpectedAnswer") as refusal:
        call(calling(lambda _: answer))
    assert refusal.value.status == answer.status_code


@pytest.mark.parametrize("tag", ['"12"', 'W/"12"', '"12.m0f3a9c1d"', '"12-gzip"', '"12.m0f--gzip"'])
def test_the_version_is_read_from_the_tags_of_masks_and_proxies(tag: str) -> None:
    answer = httpx.Response(200, json={"id": "k"}, headers={"ETag": tag})
    assert calling(lambda _: answer).get("guest", "k").version == 12
    assert calling(lambda _: answer).put("guest", "k", {"id": "k"}).version == 12


def test_provenance_and_idempotency_keys_are_sent_as_the_server_reads_them() -> None:
    seen: list[dict[str, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        # ASGI servers decode headers as latin-1.
        seen.append(
            {name.decode().lower(): value.decode("latin-1") for name, value in request.headers.raw}
        )
        return httpx.Response(201, headers={"ETag": '"1"'})

    who = Provenance(
        api_version="v1", service_name="café", identifier="i", actor="Müller", reason="東京"
    )
    calling(handler, who).put("guest", "k", {"id": "k"}, once="größe-1")
    (headers,) = seen
    texts = [callers.text(headers, name) for name in (callers.SERVICE, callers.ACTOR)]
    assert texts == ["café", "Müller"]
    assert callers.text(headers, callers.REASON) == "東京"
    assert callers.idempotency_key_of(headers) == "größe-1"


@pytest.mark.parametrize("part", ["", ".", ".."])
def test_a_path_of_something_else_is_not_asked_for(part: str) -> None:
    """`put(entity, "..")` was sent to `/v1`."""
    client = calling(lambda request: pytest.fail(f"it was sent to {request.url}"))
    for call in (
        lambda: client.put("guest", part, {}),
        lambda: client.get("guest", part),
        lambda: client.get(part, "k"),
        lambda: client.explain("guest", "k", field=part),
    ):
        with pytest.raises(InvalidRequest):
            call()
    assert place("guest", "a/..") == "/v1/guest/a%2F.."


@pytest.mark.parametrize("part", [".", ".."])
def test_a_row_of_a_view_whose_key_no_url_can_have_is_not_asked_for(part: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be part of a URL"):
        view_place("by_city", "rows", "AT", part)
    assert view_place("by_city", "rows", "", "x") == "/views/v1/by_city/rows//x"


SAID = "one\u2028two\u2029three\u0085four"
"""With the characters at which ``str.splitlines`` splits, and which JSON keeps as they are."""
STREAM = (
    f'event: change\nid: 1\ndata: "{SAID}"\n\n'
    f'event: change\r\nid: 2\r\ndata: "{SAID}"\r\n\r\n'
    "event: change\rid: 3\rdata: [1,\rdata: 2]\r\r"
    ": nothing\n\nid: 4\n\n"
).encode()
EVENTS = [Event("change", SAID, "1"), Event("change", SAID, "2"), Event("change", [1, 2], "3")]


SSE = {"Content-Type": "text/event-stream; charset=utf-8"}


class Chunks(httpx.SyncByteStream):
    """The bytes of a stream, in pieces."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)


def taken(chunks: Iterable[bytes]) -> tuple[list[Event], str | None]:
    """The events of a stream, and the token with which the client continues at its end."""
    asked: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))
        if len(asked) > 1:
            return httpx.Response(404)
        return httpx.Response(200, headers=SSE, stream=Chunks(chunks))

    events: list[Event] = []
    with pytest.raises(RequestFailed):
        events.extend(calling(handler).subscribe("guest"))
    return events, asked[-1]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstate.client.asynchronous.RETRY_S", 0.0)


def test_a_stream_is_split_only_where_lines_end_whatever_its_chunks_are() -> None:
    for cut in range(len(STREAM) + 1):
        assert taken([STREAM[:cut], b"", STREAM[cut:]]) == (EVENTS, "4"), cut
    for size in (1, 2, 3):
        chunks = (STREAM[at : at + size] for at in range(0, len(STREAM), size))
        assert taken(chunks) == (EVENTS, "4")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_event_is_complete_as_soon_as_its_last_end_of_line_comes(end: str) -> None:
    def chunks() -> Iterator[bytes]:
        yield f"id: 1{end}data: 1{end}{end}".encode()
        raise AssertionError("the event was complete")

    events = calling(lambda _: httpx.Response(200, headers=SSE, stream=Chunks(chunks()))).subscribe(
        "guest"
    )
    assert next(events) == Event("message", 1, "1")


def test_what_is_no_stream_of_events_is_no_answer_of_everstate() -> None:
    """A page of a proxy was taken for a stream without events, and asked for again for ever."""
    page = httpx.Response(200, headers={"Content-Type": "text/html"}, text="<p>Log in</p>")
    with pytest.raises(RequestFailed, match="no Server-Sent Events") as refusal:
        next(calling(lambda _: page).subscribe("guest"))
    assert (refusal.value.status, refusal.value.kind) == (200, "UnexpectedAnswer")


def test_a_long_line_in_many_chunks_is_read_in_time() -> None:
    chunks = itertools.chain([b'data: "'], itertools.repeat(b"x" * 10_000, 3_000), [b'"\n\n'])
    (event,), _ = taken(chunks)
    assert len(event.data) == 30_000_000


def test_a_subscription_continues_after_the_last_event_that_was_complete() -> None:
    """The id of an event that was cut off before its end was taken as that of the last event."""
    asked: list[str | None] = []

    class Cut(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield f'event: change\ndata: "{SAID}"\nid: 1\n\n'.encode()
            yield b"event: change\ndata: 2\nid: 2\n"
            raise httpx.ReadError("cut off")

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))
        if len(asked) == 1:
            return httpx.Response(200, headers=SSE, stream=Cut())
        return httpx.Response(200, headers=SSE, content=b"event: change\ndata: 2\nid: 2\n\n")

    events = list(itertools.islice(calling(handler).subscribe("guest"), 2))
    assert events == [Event("change", SAID, "1"), Event("change", 2, "2")]
    assert asked == [None, "1"]


def test_a_subscription_that_is_left_closes_its_connection() -> None:
    closed: list[bool] = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return itertools.repeat(b"event: change\ndata: 1\nid: 1\n\n")

        def close(self) -> None:
            closed.append(True)

    answer = httpx.Response(200, headers=SSE, stream=Endless())
    with calling(lambda _: answer) as client:
        events = client.subscribe("guest")
        assert next(events).data == 1
        assert closed == []
        del events
        assert closed == [True]


def test_a_value_with_a_semicolon_stays_one_condition() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["where"])
        return httpx.Response(200, json={"items": [], "after": None})

    async def listed_by_asyncio() -> None:
        client = AsyncClient("http://shop.test")
        client._http = httpx.AsyncClient(
            base_url="http://shop.test", transport=httpx.MockTransport(answer)
        )
        assert [each async for each in client.list("guest", where=["title=x;size>3"])] == []

    assert list(calling(answer).list("guest", where=["title=x;size>3", "n=1"])) == []
    asyncio.run(listed_by_asyncio())
    assert asked == ['title="x;size>3";n=1', 'title="x;size>3"']
