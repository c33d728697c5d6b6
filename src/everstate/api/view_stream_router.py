"""Routes of subscriptions to views: `/views/v1/{view}/stream`, by SSE and by WebSocket."""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter, Request, Response, WebSocket
from fastapi.sse import EventSourceResponse

from everstate.api.guards import IS_HEAD
from everstate.api.reading_router import parameters_of
from everstate.api.socket_router import serve_socket
from everstate.api.subscribing import LAST_ID, EventBatches
from everstate.api.subscription_router import STREAM_HEADERS, EventResponse
from everstate.api.view_access import admit_to_view, read_of_view
from everstate.api.view_following import ViewSubscriptions, ViewWish
from everstate.api.view_reading import PLACE
from everstate.api.view_router import view_parameter
from everstate.http import openapi as says
from everstate.http.asgi import Desk, add_route
from everstate.http.callers import Caller
from everstate.http.openapi import JsonSchema
from everstate.views.project import Project

_STREAM: Final = f"{PLACE}/{{view}}/stream"
_PARAMETERS: Final = [
    says.text("where", "Only rows with these values: `city=Wien`; several with `;`."),
    says.text(
        "since",
        "The id of the last event that you have; after a disconnect `Last-Event-ID` takes its "
        "place. Without it all rows come first.",
    ),
]


def view_stream_router(project: Project, subscriptions: ViewSubscriptions, desk: Desk) -> APIRouter:
    """The routes of all views; both have the same path."""
    router = APIRouter(tags=["views"])

    async def stream(request: Request) -> Response:
        incoming = await read_of_view(desk, request, project)
        wish = _wish(request)
        if request.scope.get(IS_HEAD):
            return Response(media_type=EventSourceResponse.media_type, headers=STREAM_HEADERS)
        opened = await subscriptions.open(wish, desk.work)
        return EventResponse(opened, incoming.caller.expires)

    async def follow(socket: WebSocket) -> None:
        async def opened(_: Caller) -> EventBatches:
            return await subscriptions.open(_wish(socket), desk.work)

        view = socket.path_params["view"]
        await serve_socket(socket, partial(admit_to_view, desk, socket, project, view), opened)

    add_route(
        *(router, "GET", _STREAM, stream),
        name="stream_view",
        summary="The rows of a view as Server-Sent Events: all, then what differs at each position",
        responses=_answers(secured=not desk.callers.local),
        parameters=[view_parameter(project), *_PARAMETERS],
    )
    router.add_api_websocket_route(_STREAM, follow)
    return router


def _wish(connection: Request | WebSocket) -> ViewWish:
    given, last_id = parameters_of(connection), connection.headers.get(LAST_ID)
    return ViewWish.of(connection.path_params["view"], given, last_id)


def _answers(*, secured: bool) -> dict[int | str, JsonSchema]:
    found = says.answers(200, 400, 404, 422, schema={"type": "object"}, secured=secured)
    found[200] = {
        "description": "Events `snapshot`, `changed` and `error`.",
        "content": {EventSourceResponse.media_type: {"schema": says.STRING}},
    }
    return found
