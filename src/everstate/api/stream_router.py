"""Routes of subscriptions, to an entity type and to a view: by Server-Sent Events and by WebSocket.

The two routes of a subscription have one path, and share everything but how an event is written:
parameters, access, the events and their tokens. Who may not connect is refused by an HTTP status.
What else is wrong is a status for an SSE client, and an event for a WebSocket: a browser shows a
page only the code and reason with which a WebSocket is closed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import orjson
from anyio import CancelScope
from fastapi import APIRouter, Request, Response, WebSocket
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from everstate.api.events import EventBatches, InThread, StreamEvent, failed, while_valid
from everstate.api.guards import IS_HEAD, refuse
from everstate.api.problems import answer_of
from everstate.api.subscribing import Subscriptions, Wish, Wishes
from everstate.api.view_following import ViewSubscriptions, ViewWish
from everstate.api.view_reading import PLACE
from everstate.api.view_router import admit_to_view, view_parameter
from everstate.errors import EverstateError
from everstate.http import openapi as says
from everstate.http.answers import JSON, HttpAnswer
from everstate.http.asgi import Desk, Routes, names_of, parameters_of, respond
from everstate.http.callers import Caller
from everstate.http.openapi import JsonSchema
from everstate.views.project import Project

W = TypeVar("W")
LAST_ID: Final = "last-event-id"
"""Header with the token after which a subscription goes on."""
POSITION: Final = "position"
"""Name of an event that has only a new token: the heartbeat, which SSE sends as a bare id."""
_RETRY_MS: Final = 2_000
_STREAM_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_TRY_AGAIN: Final = 1013
_OWN_CODES: Final = 4000
"""An error closes with this plus its HTTP status: the codes from here on are an application's."""
_REASON_BYTES_MAX: Final = 123
_STATUSES: Final = (200, 400, 404, 422, 503)
_ENTITIES: Final = says.in_path(
    "entities",
    {"type": "string", "pattern": "^[a-z][a-z0-9_]*(,[a-z][a-z0-9_]*)+$"},
    "Entity types, with commas between them.",
)
_WANTED: Final = [
    says.text("key", "Only this entity."),
    says.text("changed", "Only changes that change this field."),
    says.text(
        "becomes",
        "Only changes after which a field has a value: `field:value`; `null` is no value.",
    ),
    says.text("kind", "Only these kinds of changes: `created,deleted`."),
    says.text("service", "Only changes by this service."),
    says.text("identifier", "Only changes with this identifier in their provenance."),
    says.text("actor", "Only changes by this actor."),
    says.text(
        "since",
        "A token, a time, `beginning` or `now` (default); after a disconnect "
        "`Last-Event-ID` takes its place.",
    ),
    says.query("thin", {"type": "boolean"}, "A link to the entity in place of its states."),
]
_PARAMETERS: Final = [
    *_WANTED,
    says.query("current", {"type": "boolean"}, "First the entities as they are now."),
    says.query(
        "when_slow",
        {"enum": ["disconnect", "drop"]},
        "What happens when changes come "
        "faster than they are taken: an event `slow` and the end (default), or the oldest "
        "are dropped and an event `dropped` counts them.",
    ),
]


def subscription_router(entity: str | None, subscriptions: Subscriptions, desk: Desk) -> APIRouter:
    """The routes of one entity type; ``None``: of several in one stream, which the path names."""
    routes, own = Routes(desk, entity or "changes"), [] if entity else [_ENTITIES]

    def named(connection: HTTPConnection) -> list[str]:
        return [entity] if entity else connection.path_params["entities"].split(",")

    def admit(connection: HTTPConnection) -> Caller:
        caller, *_ = [desk.admit(connection, name, "read") for name in named(connection)]
        return caller

    def wish(
        connection: HTTPConnection, caller: Caller, known: Sequence[JsonSchema] = _PARAMETERS
    ) -> Wishes:
        given, last_id = parameters_of(connection, names_of(known)), _last_id(connection)
        return {
            name: Wish.of(subscriptions.app.entity_type(name), given, last_id, caller.mask(name))
            for name in named(connection)
        }

    async def page(request: Request) -> Response:
        caller = admit(request)
        await desk.body_of(request)
        wanted = wish(request, caller, _WANTED)
        events, token = await desk.work(partial(subscriptions.page, wanted))
        body = {
            "changes": [orjson.Fragment(event.data) for event in events if event.name],
            "token": token,
            "live": not events,
        }
        headers = {"Cache-Control": "no-store"}
        return respond(HttpAnswer(200, headers, orjson.dumps(body).decode()))

    if entity is None:
        routes.add(
            *("GET", "/feed/v1/{entities}", page),
            parameters=[*own, *_WANTED],
            content={JSON: says.OBJECT},
            name="feed",
            summary="Changes of several entity types, a page at a time, from a token on",
            statuses=_STATUSES,
        )
    return _routes(
        *(routes, f"/stream/v1/{entity or '{entities}'}", admit, wish, subscriptions.open, desk),
        parameters=[*own, *_PARAMETERS],
        name=f"stream_{entity}" if entity else "stream",
        summary=f"Changes of {entity or 'several'} entities as Server-Sent Events, as they come",
        statuses=_STATUSES,
        what="Events `current`, `change`, `live`, `dropped`, `slow` and `error`; the id "
        "of an event is a token.",
    )


def view_stream_router(project: Project, subscriptions: ViewSubscriptions, desk: Desk) -> APIRouter:
    """The routes of all views."""

    def admit(connection: HTTPConnection) -> Caller:
        return admit_to_view(desk, connection, project)

    def wish(connection: HTTPConnection, _: Caller) -> ViewWish:
        given = parameters_of(connection, names_of(_VIEW_PARAMETERS))
        return ViewWish.of(connection.path_params["view"], given, _last_id(connection))

    return _routes(
        *(Routes(desk, "views"), f"{PLACE}/{{view}}/stream", admit, wish, subscriptions.open, desk),
        parameters=[view_parameter(project), *_VIEW_PARAMETERS],
        name="stream_view",
        summary="The rows of a view as Server-Sent Events: all, then what differs at each position",
        statuses=(200, 400, 404, 422),
        what="Events `snapshot`, `changed` and `error`.",
    )


def _last_id(connection: HTTPConnection) -> str | None:
    return connection.headers.get(LAST_ID)


def _routes(
    routes: Routes,
    path: str,
    admit: Callable[[HTTPConnection], Caller],
    wish: Callable[[HTTPConnection, Caller], W],
    begin: Callable[[W, InThread[Any]], Awaitable[EventBatches]],
    desk: Desk,
    **described: Any,
) -> APIRouter:
    """Both routes of a subscription.

    ``admit`` checks who asks, ``wish`` reads what is asked for, and ``begin`` gives the events.
    """

    async def events(request: Request) -> Response:
        caller = admit(request)
        await desk.body_of(request)
        wanted = wish(request, caller)
        if request.scope.get(IS_HEAD):
            media_type = EventSourceResponse.media_type
            return Response(media_type=media_type, headers=_STREAM_HEADERS)
        return EventResponse(await begin(wanted, desk.work), caller.expires)

    async def follow(socket: WebSocket) -> None:
        try:
            caller = admit(socket)
        except EverstateError as error:
            refusal = answer_of(error, socket, "WebSocket")
            await refuse(refusal, socket.scope, socket.receive, socket.send)
            return
        await socket.accept()
        try:
            opened = await begin(wish(socket, caller), desk.work)
        except EverstateError as error:
            await _send_events(socket, _only(failed(error)))
            return
        async with anyio.create_task_group() as group:
            group.start_soon(_until_left, socket, group.cancel_scope)
            await _send_events(socket, while_valid(opened, caller.expires))
            group.cancel_scope.cancel()

    routes.add(
        *("GET", path, events),
        content={EventSourceResponse.media_type: says.STRING},
        **described,
    )
    routes.router.add_api_websocket_route(path, follow)
    return routes.router


class EventResponse(StreamingResponse):
    """Sends the events of a subscription until the token expires, and ends it in every case."""

    def __init__(self, opened: EventBatches, expires: datetime | None) -> None:
        self._opened, self._sent = opened, encoded(while_valid(opened, expires))
        super().__init__(
            self._sent, media_type=EventSourceResponse.media_type, headers=_STREAM_HEADERS
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The client may leave before anything is asked of the events."""
        async with aclosing(self._opened), aclosing(self._sent):
            await super().__call__(scope, receive, send)


async def encoded(batches: EventBatches) -> AsyncGenerator[bytes, None]:
    """Events in the form of Server-Sent Events, a batch in one piece."""
    async with aclosing(batches):
        yield format_sse_event(retry=_RETRY_MS)
        async for batch in batches:
            yield b"".join(map(_encoded, batch))


def _encoded(event: StreamEvent) -> bytes:
    if not event.name:
        # Without data a client notes the id, and nothing else happens.
        return format_sse_event(id=event.token)
    return format_sse_event(data_str=event.data, event=event.name, id=event.token)


async def _send_events(socket: WebSocket, batches: EventBatches) -> None:
    """Send events until they end, each when the one before was taken; then close."""
    code, reason = 1000, ""
    async with aclosing(batches):
        async for batch in batches:
            for event in batch:
                if not await _took(socket.send_text(_frame(event))):
                    return
                if event.failure is not None:
                    code, reason = _OWN_CODES + event.failure.http_status, event.failure.public
                elif event.name == "slow":
                    code, reason = _TRY_AGAIN, "changes came faster than they were taken"
    # The beginning that fits into a close frame.
    cut = reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore")
    await _took(socket.close(code, cut))


async def _took(sending: Awaitable[None]) -> bool:
    """Send something; out: whether the client is still there."""
    try:
        await sending
    except (WebSocketDisconnect, RuntimeError):
        # The server raises the second when it has closed the connection itself, because of an
        # answer to a ping that did not come.
        return False
    return True


async def _until_left(socket: WebSocket, scope: CancelScope) -> None:
    """Wait until the client leaves, then end the subscription; what it sends means nothing."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
    scope.cancel()


async def _only(event: StreamEvent) -> EventBatches:
    """A stream of one event."""
    yield [event]


def _frame(event: StreamEvent) -> str:
    said: dict[str, Any] = {"event": event.name or POSITION, "token": event.token}
    if event.data:
        said["data"] = orjson.Fragment(event.data)
    return orjson.dumps(said).decode()


_VIEW_PARAMETERS: Final = [
    says.text("where", "Only rows with these values: `city=Wien`; several with `;`."),
    says.text(
        "since",
        "The id of the last event that you have; after a disconnect `Last-Event-ID` takes its "
        "place. Without it all rows come first.",
    ),
]
