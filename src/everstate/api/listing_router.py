"""Routes that read many entities at once: `/query/v1/{entity}` and what is below it."""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter

from everstate.api.listing import CHANGES_CURSOR, Listing
from everstate.changes import EntityType
from everstate.http import openapi as says
from everstate.http.answers import JSON
from everstate.http.asgi import Desk, Routes
from everstate.http.openapi import JsonSchema
from everstate.serving.listing import KEYS_MAX

_AFTER: Final = says.query(
    "after",
    {"type": "string", "pattern": CHANGES_CURSOR},
    "Continue after the page that named this.",
)
_KEYS: Final[JsonSchema] = {
    "type": "object",
    "required": ["keys"],
    "additionalProperties": False,
    "properties": {
        "keys": {"type": "array", "items": says.STRING, "maxItems": KEYS_MAX},
        "at": {"anyOf": [says.TIME, {"type": "null"}]},
    },
}


def listing_router(entity_type: EntityType, listing: Listing, desk: Desk) -> APIRouter:
    """Routes of one entity type."""
    entity = entity_type.name
    routes, limit = Routes(desk, entity, f"/query/v1/{entity}"), says.limit(listing.page_max)
    ask = partial(
        routes.ask,
        read=partial(desk.read, entity=entity, right="read"),
        bound={"entity": entity},
        after=[says.wait_for(), *says.conditions()[1:]],
        statuses=(200, 304, 400, 404, 413, 422, 504),
        content={JSON: says.OBJECT},
    )
    ask(
        "",
        listing.entities,
        says.text("where", "Conditions: `nights>3`; several with `;` between."),
        says.text("order", "Fields to sort by: `-nights` for the largest first; several with `;`."),
        says.query("at", says.TIME, "Entities as they were at this time in the world."),
        limit,
        says.text("after", "Only keys after this one; without `order`."),
        name=f"query_{entity}_list",
        summary=f"{entity} entities that meet conditions on their fields, now or at a time",
    )
    ask(
        "/keys",
        listing.keys,
        name=f"query_{entity}_keys",
        summary=f"Many {entity} entities by key, all at one moment",
        method="POST",
        body=says.body_of((JSON, _KEYS)),
        after=[says.wait_for()],
        statuses=(200, 400, 404, 413, 422, 504),
    )
    ask(
        "/deleted",
        listing.deleted,
        limit,
        says.text("after", "Only keys after this one."),
        name=f"query_{entity}_deleted",
        summary=f"{entity} entities that are deleted now, and who deleted them",
    )
    ask(
        "/changes",
        listing.written,
        *(*says.written_by(), limit, _AFTER),
        name=f"query_{entity}_changes",
        summary=f"Changes of {entity} entities by who wrote them and when",
    )
    return routes.router
