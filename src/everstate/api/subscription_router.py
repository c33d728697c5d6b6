"""Routes of subscriptions: `/stream/v1/{entity}`, by Server-Sent Events and by WebSocket."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from everstate.api.guards import IS_HEAD
from everstate.api.reading_router import parameters_of
from everstate.api.socket_router import socket_router
from everstate.api.subscribing import (
    LAST_ID,
    EventBatches,
    StreamEvent,
    Subscriptions,
    Wish,
    while_valid,
)
from everstate.changes import EntityType
from everstate.http import openapi as says
from everstate.http.asgi import Desk, add_route
from everstate.http.openapi import JsonSchema

_RETRY_MS = 2_000
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def subscription_router(
    entity_type: EntityType, subscriptions: Subscriptions, desk: Desk
) -> APIRouter:
    """The routes of one entity type; both have the same path."""
    router = APIRouter(tags=[entity_type.name])

    async def stream(request: Request) -> Response:
        incoming = await desk.read(request, entity_type.name, "read")
        mask = incoming.caller.mask(entity_type.name)
        wish = Wish.of(entity_type, parameters_of(request), request.headers.get(LAST_ID), mask)
        if request.scope.get(IS_HEAD):
            return Response(media_type=EventSourceResponse.media_type, headers=STREAM_HEADERS)
        opened = await subscriptions.open(wish, desk.work)
        return EventResponse(opened, incoming.caller.expires)

    add_route(
        *(router, "GET", f"/stream/v1/{entity_type.name}", stream),
        name=f"stream_{entity_type.name}",
        summary=f"Changes of {entity_type.name} entities as Server-Sent Events, as they come",
        responses=_answers(secured=not desk.callers.local),
        parameters=_PARAMETERS,
    )
    router.include_router(socket_router(entity_type, subscriptions, desk))
    return router


class EventResponse(StreamingResponse):
    """Sends the events of a subscription until the token expires, and ends it in every case."""

    def __init__(self, opened: EventBatches, expires: datetime | None) -> None:
        self._opened, self._sent = opened, encoded(while_valid(opened, expires))
        super().__init__(
            self._sent, media_type=EventSourceResponse.media_type, headers=STREAM_HEADERS
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


def _answers(*, secured: bool) -> dict[int | str, JsonSchema]:
    found = says.answers(200, 400, 404, 422, 503, schema={"type": "object"}, secured=secured)
    found[200] = {
        "description": "Events `current`, `change`, `live`, `dropped`, `slow` and `error`; the id "
        "of an event is a token.",
        "content": {EventSourceResponse.media_type: {"schema": says.STRING}},
    }
    return found


_PARAMETERS = [
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
        "A token, `beginning` or `now` (default); after a disconnect "
        "`Last-Event-ID` takes its place.",
    ),
    says.query("current", {"type": "boolean"}, "First the entities as they are now."),
    says.query(
        "when_slow",
        {"enum": ["disconnect", "drop"]},
        "What happens when changes come "
        "faster than they are taken: an event `slow` and the end (default), or the oldest "
        "are dropped and an event `dropped` counts them.",
    ),
]
