"""Routes that read many entities at once: `/query/v1/{entity}` and what is below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter, Request, Response

from everstate.api.listing import CHANGES_CURSOR, Listing
from everstate.api.reading import Parameters
from everstate.api.reading_router import parameters_of
from everstate.changes import EntityType
from everstate.http import openapi as says
from everstate.http.answers import JSON, HttpAnswer, HttpRequest
from everstate.http.asgi import Desk, add_route
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


class _Question(NamedTuple):
    path: str
    name: str
    summary: str
    answer: Callable[[HttpRequest, Parameters, str], HttpAnswer]
    parameters: Sequence[JsonSchema] = ()
    body: JsonSchema | None = None


def _questions(listing: Listing) -> Sequence[_Question]:
    limit = says.limit(listing.page_max)
    return (
        _Question(
            "",
            "list",
            "{} entities that meet conditions on their fields, now or at a time",
            listing.entities,
            [
                says.text("where", "Conditions: `nights>3`; several with `;` between."),
                says.text(
                    "order", "Fields to sort by: `-nights` for the largest first; several with `;`."
                ),
                says.query("at", says.TIME, "Entities as they were at this time in the world."),
                *(
                    limit,
                    says.text("after", "Only keys after this one; without `order`."),
                ),
            ],
        ),
        _Question(
            "/keys",
            "keys",
            "Many {} entities by key, all at one moment",
            listing.keys,
            body=says.body_of((JSON, _KEYS)),
        ),
        _Question(
            "/deleted",
            "deleted",
            "{} entities that are deleted now, and who deleted them",
            listing.deleted,
            [limit, says.text("after", "Only keys after this one.")],
        ),
        _Question(
            "/changes",
            "changes",
            "Changes of {} entities by who wrote them and when",
            listing.written,
            [*says.written_by(), limit, _AFTER],
        ),
    )


def listing_router(entity_type: EntityType, listing: Listing, desk: Desk) -> APIRouter:
    """Routes of one entity type."""
    router = APIRouter(tags=[entity_type.name])
    for question in _questions(listing):
        _add(router, f"/query/v1/{entity_type.name}", question, entity_type.name, desk)
    return router


def _add(router: APIRouter, place: str, question: _Question, entity: str, desk: Desk) -> None:
    async def answer(request: Request) -> Response:
        return await desk.answer(
            *(request, entity, "read"),
            lambda asked: question.answer(asked, parameters_of(request), entity),
        )

    known = says.conditions()[1:] if question.body is None else []
    statuses = (200, 400, 404, 413, 422, 504, *((304,) if known else ()))
    add_route(
        *(router, "GET" if question.body is None else "POST", f"{place}{question.path}", answer),
        name=f"query_{entity}_{question.name}",
        summary=question.summary.format(entity),
        responses=says.answers(*statuses, schema=says.OBJECT, secured=not desk.callers.local),
        parameters=[*question.parameters, says.wait_for(), *known],
        body=question.body,
    )
