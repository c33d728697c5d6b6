"""Routes of feeds: `GET /feed/v1/{entity}`, the heads below it, and their pages."""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter

from everstate.api.atom import ATOM_TYPE, SERVICE_TYPE
from everstate.api.feeding import Feeding
from everstate.changes import EntityType, Kind
from everstate.http import openapi as says
from everstate.http.answers import JSON
from everstate.http.asgi import Desk, Routes
from everstate.serving.feeds import FEED_NAME

_PAGE: Final = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_FEED: Final = says.in_path("feed", {"type": "string", "pattern": FEED_NAME}, "One of the list.")
_KIND: Final = says.query("kind", {"enum": [*Kind]}, "Only changes of this kind.")


def feed_router(entity_type: EntityType, feeding: Feeding, desk: Desk) -> APIRouter:
    """The routes of one entity type."""
    entity = entity_type.name
    routes = Routes(desk, entity, feeding.place)
    ask = partial(
        routes.ask,
        read=partial(desk.read, entity=entity, right="read"),
        after=says.conditions()[1:],
        statuses=(200, 304, 400, 404, 422),
        content={JSON: says.OBJECT, ATOM_TYPE: says.STRING},
    )
    ask(
        "",
        feeding.listed,
        content={JSON: says.OBJECT, SERVICE_TYPE: says.STRING},
        name=f"feeds_{entity}",
        summary=f"The feeds of {entity} changes: one of each partition of the changelog",
    )
    ask(
        "/{feed}",
        feeding.page,
        *(_FEED, _KIND),
        name=f"feed_{entity}",
        summary=f"The newest page of a feed of {entity} changes, which is not closed yet",
    )
    ask(
        "/{feed}/{page}",
        feeding.page,
        *(_FEED, says.in_path("page", _PAGE, "Number of the page, from 0 on."), _KIND),
        statuses=(200, 304, 400, 404, 410, 422),
        name=f"feed_{entity}_page",
        summary=f"A page of a feed of {entity} changes; a closed one never changes",
    )
    return routes.router
