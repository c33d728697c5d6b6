"""Routes of feeds: `GET /feed/v1/{entity}`, the heads below it, and their pages."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from everstate.api.atom import ATOM_TYPE, SERVICE_TYPE
from everstate.api.feeding import Feeding
from everstate.api.reading_router import parameters_of
from everstate.changes import EntityType, Kind
from everstate.http import openapi as says
from everstate.http.asgi import Desk, add_route
from everstate.http.openapi import JsonSchema
from everstate.serving.feeds import FEED_NAME

_PAGE_MAX: Final = 10**15 - 1
_KNOWN: Final = says.conditions()[1:]
_KIND: Final = says.query("kind", {"enum": [*Kind]}, "Only changes of this kind.")


def feed_router(entity_type: EntityType, feeding: Feeding, desk: Desk) -> APIRouter:
    """The routes of one entity type."""
    name, place, secured = entity_type.name, feeding.place, not desk.callers.local
    router = APIRouter(tags=[name])

    async def listed(request: Request) -> Response:
        return await desk.answer(
            request, name, "read", lambda asked: feeding.listed(asked, parameters_of(request))
        )

    async def page(request: Request) -> Response:
        feed, number = request.path_params["feed"], request.path_params.get("page")
        return await desk.answer(
            *(request, name, "read"),
            lambda asked: feeding.page(asked, parameters_of(request), feed, number),
        )

    add_route(
        *(router, "GET", place, listed),
        name=f"feeds_{name}",
        summary=f"The feeds of {name} changes: one of each partition of the changelog",
        responses=_answers(SERVICE_TYPE, secured=secured),
        parameters=_KNOWN,
    )
    feed = says.in_path("feed", {"type": "string", "pattern": FEED_NAME}, "One of the list.")
    add_route(
        *(router, "GET", f"{place}/{{feed}}", page),
        name=f"feed_{name}",
        summary=f"The newest page of a feed of {name} changes, which is not closed yet",
        responses=_answers(ATOM_TYPE, secured=secured),
        parameters=[feed, _KIND, *_KNOWN],
    )
    number = {"type": "integer", "minimum": 0, "maximum": _PAGE_MAX}
    at = says.in_path("page", number, "Number of the page, from 0 on.")
    add_route(
        *(router, "GET", f"{place}/{{feed}}/{{page}}", page),
        name=f"feed_{name}_page",
        summary=f"A page of a feed of {name} changes; a closed one never changes",
        responses=_answers(ATOM_TYPE, 410, secured=secured),
        parameters=[feed, at, _KIND, *_KNOWN],
    )
    return router


def _answers(xml: str, *more: int, secured: bool) -> dict[int | str, JsonSchema]:
    found = says.answers(
        *(200, 304, 400, 404, 422), *more, schema={"type": "object"}, secured=secured
    )
    found[200]["content"][xml] = {"schema": says.STRING}
    return found
