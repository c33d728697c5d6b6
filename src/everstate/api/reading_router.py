"""Routes that read an entity type: `GET /v1/{entity}/{key}` and below it, lists, and feeds.

`/history`, `/diff`, `/explain`, `/explain/{field}` and `/provenance` are what they are only as
parts of the path as it was sent: a key that ends in `/history` is sent with `%2F`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from everstate.api.atom import ATOM_TYPE, SERVICE_TYPE
from everstate.api.feeding import Feeding
from everstate.api.problems import ONLY
from everstate.api.reading import CHANGES_CURSOR, PAST, Reading
from everstate.changes import EntityType, Kind
from everstate.http import openapi as says
from everstate.http.answers import JSON
from everstate.http.asgi import KEY, AnswerPast, Desk, Routes, parameters_of, sent_path_of
from everstate.http.openapi import JsonSchema, Schemas
from everstate.serving.feeds import FEED_NAME
from everstate.serving.listing import KEYS_MAX

_FIELD: Final = "{field}"


class _BelowKey(APIRoute):
    """A route whose path ends in a word: the last part of the path as it was sent."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        words = self.path.partition(KEY)[2].split("/")[1:]
        if match is not Match.NONE and words:
            sent = sent_path_of(scope).split(b"/")
            for word, part in zip(words, sent[-len(words) :], strict=True):
                if word not in (_FIELD, part.decode("latin-1")):
                    return Match.NONE, {}
            # With another method too: else that would be asked of a key that has the word in it.
            return Match.FULL, {**child, ONLY: ("GET", "HEAD")}
        return match, child


def past_of(reading: Reading, desk: Desk) -> AnswerPast:
    """What answers a read of an entity's past, where other routes have the present."""

    async def past(request: Request, entity: str, key: str) -> Response | None:
        if not any(name in request.query_params for name in PAST):
            return None
        # The caller is checked before the parameters.
        return await desk.answer(
            *(request, entity, "read"),
            lambda asked: reading.entity(asked, parameters_of(request, PAST), entity, key),
        )

    return past


_END: Final[JsonSchema] = {"anyOf": [says.VERSION, says.TIME]}
_HISTORY: Final = (
    says.query("before", says.VERSION, "Only versions before this one."),
    says.query(
        "after",
        {**says.VERSION, "minimum": 0},
        "Only the oldest versions after this one; 0: from the first version on.",
    ),
    says.query("order", {"enum": ["oldest", "newest"]}, "Which comes first on the page."),
    says.query(
        "diff",
        {"enum": ["fields", "patch"]},
        "Changes as fields with both values, or as a JSON Patch (RFC 6902).",
    ),
    *says.written_by(),
)
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
_PAGE: Final = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
_FEED: Final = says.in_path("feed", {"type": "string", "pattern": FEED_NAME}, "One of the list.")
_KIND: Final = says.query("kind", {"enum": [*Kind]}, "Only changes of this kind.")


def reading_router(
    entity_type: EntityType,
    reading: Reading,
    desk: Desk,
    schemas: Schemas,
    *,
    is_read_only: bool,
) -> APIRouter:
    """Routes of one entity type; ``is_read_only``: no other routes have its present state."""
    entity = entity_type.name
    routes = Routes(desk, entity, f"/v1/{entity}/{KEY}", _BelowKey)
    ask = partial(
        routes.ask,
        read=partial(desk.read, entity=entity, right="read"),
        bound={"entity": entity},
        before=[says.KEY_IN_PATH],
        after=[*says.conditions()[1:], says.wait_for()],
        statuses=(200, 304, 400, 404, 410, 422, 504),
        content={JSON: says.OBJECT},
        sent={"ETag": (200, 304)},
    )
    ask(
        "/history",
        reading.history,
        *(says.limit(reading.page_max), *_HISTORY, _changed(entity_type)),
        name=f"read_{entity}_history",
        summary=f"Versions of a {entity}, a page at a time, each with its writer and changed "
        "fields",
    )
    ask(
        "/diff",
        reading.diff,
        {**says.query("from", _END, "A version, or a time."), "required": True},
        says.query("to", _END, "A version, or a time. Default: the newest version."),
        name=f"read_{entity}_diff",
        summary=f"Changed fields of a {entity} between two versions or times",
    )
    ask(
        "/explain",
        reading.explain,
        says.query("version", says.VERSION, "Number of the version. Default: the newest."),
        name=f"read_{entity}_explanation",
        summary=f"Origin of a version of a {entity} in log, lake and source, and the views that "
        "applied it",
    )
    ask(
        f"/explain/{_FIELD}",
        reading.explain,
        says.in_path("field", says.STRING, "A field of the state; dots separate nested fields."),
        name=f"read_{entity}_field",
        summary=f"Origin of the version of a {entity} that last changed a field",
    )
    ask(
        "/provenance",
        reading.provenance,
        name=f"read_{entity}_provenance",
        summary=f"Who last wrote each field of a {entity}, and what each service last wrote",
    )
    if is_read_only:
        ask(
            "",
            reading.entity,
            *says.past(),
            content={JSON: schemas.read(entity_type)},
            name=f"read_{entity}",
            summary=f"Read a {entity} from the views: now, at a time, or at a version",
        )
    return routes.router


def listing_router(entity_type: EntityType, reading: Reading, desk: Desk) -> APIRouter:
    """Routes of one entity type."""
    entity = entity_type.name
    routes, limit = Routes(desk, entity, f"/query/v1/{entity}"), says.limit(reading.page_max)
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
        reading.entities,
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
        reading.keys,
        name=f"query_{entity}_keys",
        summary=f"Many {entity} entities by key, all at one moment",
        method="POST",
        body=says.body_of((JSON, _KEYS)),
        after=[says.wait_for()],
        statuses=(200, 400, 404, 413, 422, 504),
    )
    ask(
        "/deleted",
        reading.deleted,
        limit,
        says.text("after", "Only keys after this one."),
        name=f"query_{entity}_deleted",
        summary=f"{entity} entities that are deleted now, and who deleted them",
    )
    ask(
        "/changes",
        reading.written,
        *(*says.written_by(), limit, _AFTER),
        name=f"query_{entity}_changes",
        summary=f"Changes of {entity} entities by who wrote them and when",
    )
    return routes.router


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


def _changed(entity_type: EntityType) -> JsonSchema:
    # Nested fields are taken too, but no schema tells which of them a model has.
    names = {"type": "string", "enum": [*entity_type.field_names]}
    what = "Only versions that changed this field; dots lead to nested fields."
    return says.query("changed", names, what)
