"""Subscriptions by WebSocket: `/stream/v1/{entity}`, with the events of the SSE route as JSON.

The two routes share everything but how an event is written: parameters, access, the events and
their tokens. Who may not connect is refused by an HTTP status, as there. Everything else is sent
after the connection is open, since a browser shows a page only the code and reason of a close.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import anyio
import orjson
from anyio import CancelScope
from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from everstate.api.guards import refuse
from everstate.api.problems import answer_of
from everstate.api.reading_router import parameters_of
from everstate.api.subscribing import (
    LAST_ID,
    EventBatches,
    StreamEvent,
    Subscriptions,
    Wish,
    failed,
    while_valid,
)
from everstate.changes import EntityType
from everstate.errors import EverstateError
from everstate.http.asgi import Desk
from everstate.http.callers import Caller

POSITION: Final = "position"
"""Name of an event that has only a new token: the heartbeat, which SSE sends as a bare id."""
_TRY_AGAIN: Final = 1013
_OWN_CODES: Final = 4000
"""An error closes with this plus its HTTP status: the codes from here on are an application's."""
_REASON_BYTES_MAX: Final = 123


def socket_router(entity_type: EntityType, subscriptions: Subscriptions, desk: Desk) -> APIRouter:
    """The route of one entity type."""
    router = APIRouter()

    async def follow(socket: WebSocket) -> None:
        async def opened(caller: Caller) -> EventBatches:
            given, last_id = parameters_of(socket), socket.headers.get(LAST_ID)
            wish = Wish.of(entity_type, given, last_id, caller.mask(entity_type.name))
            return await subscriptions.open(wish, desk.work)

        await serve_socket(socket, partial(desk.admit, socket, entity_type.name, "read"), opened)

    router.add_api_websocket_route(f"/stream/v1/{entity_type.name}", follow)
    return router


async def serve_socket(
    socket: WebSocket,
    admit: Callable[[], Caller],
    opened: Callable[[Caller], Awaitable[EventBatches]],
) -> None:
    """Send the events of a subscription until they end, the client leaves or its token expires.

    ``admit`` checks who asks: a refusal is an HTTP status, before the connection is open.
    ``opened`` begins the subscription; its error is an event.
    """
    try:
        caller = admit()
    except EverstateError as error:
        refusal = answer_of(error, socket, "WebSocket")
        await refuse(refusal, socket.scope, socket.receive, socket.send)
        return
    await socket.accept()
    try:
        batches = while_valid(await opened(caller), caller.expires)
    except EverstateError as error:
        await _send_events(socket, _only(failed(error)))
        return
    async with anyio.create_task_group() as group:
        group.start_soon(_until_left, socket, group.cancel_scope)
        await _send_events(socket, batches)
        group.cancel_scope.cancel()


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
    await _took(socket.close(code, _cut(reason)))


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


def _cut(reason: str) -> str:
    """The beginning of a text that fits into a close frame."""
    return reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore")
