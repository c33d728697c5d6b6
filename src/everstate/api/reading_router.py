"""Routes that read the views: `GET /v1/{entity}/{key}` and what is below it.

`/history`, `/diff`, `/explain`, `/explain/{field}` and `/provenance` are what they are only as
parts of the path as it was sent: a key that ends in `/history` is sent with `%2F`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import Scope

from everstate.api.problems import ONLY
from everstate.api.reading import PAST, Method, Reading
from everstate.changes import EntityType
from everstate.errors import InvalidQuery
from everstate.http import openapi as says
from everstate.http.asgi import KEY, AnswerPast, Desk, add_route
from everstate.http.openapi import JsonSchema, Schemas

_STATUSES: Final = (200, 304, 400, 404, 410, 422, 504)
_FIELD: Final = "{field}"


class _BelowKey(APIRoute):
    """A route whose path ends in a word: the last part of the path as it was sent."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        words = self.path.partition(KEY)[2].split("/")[1:]
        if match is not Match.NONE and words:
            sent = bytes(scope.get("raw_path") or scope["path"].encode()).split(b"/")
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
        return await desk.answer(
            *(request, entity, "read"),
            lambda asked: reading.entity(asked, parameters_of(request), entity, key),
        )

    return past


class _Question(NamedTuple):
    """One route: what its path has below the key, its name, and what it says of itself."""

    path: str
    name: str
    summary: str
    parameters: Sequence[JsonSchema] = ()


_NOW: Final = _Question(
    "",
    "",
    "Read a {} from the views: now, at a time, or at a version",
    says.past(),
)
_END: Final[JsonSchema] = {"anyOf": [says.VERSION, says.TIME]}
_QUESTIONS: Final = (
    _Question(
        "/history",
        "history",
        "Versions of a {}, a page at a time, each with its writer and changed fields",
        [
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
        ],
    ),
    _Question(
        "/diff",
        "diff",
        "Changed fields of a {} between two versions or times",
        [
            {**says.query("from", _END, "A version, or a time."), "required": True},
            says.query("to", _END, "A version, or a time. Default: the newest version."),
        ],
    ),
    _Question(
        "/explain",
        "explanation",
        "Origin of a version of a {} in log, lake and source, and the views that applied it",
        [says.query("version", says.VERSION, "Number of the version. Default: the newest.")],
    ),
    _Question(
        f"/explain/{_FIELD}",
        "field",
        "Origin of the version of a {} that last changed a field",
        [says.in_path("field", says.STRING, "A field of the state; dots separate nested fields.")],
    ),
    _Question(
        "/provenance",
        "provenance",
        "Who last wrote each field of a {}, and what each service last wrote",
    ),
)


def reading_router(
    entity_type: EntityType,
    reading: Reading,
    desk: Desk,
    schemas: Schemas,
    *,
    is_read_only: bool,
) -> APIRouter:
    """Routes of one entity type; ``is_read_only``: no other routes have its present state."""
    place = f"/v1/{entity_type.name}/{KEY}"
    router = APIRouter(tags=[entity_type.name], route_class=_BelowKey)
    methods: Mapping[str, Method] = {
        "history": reading.history,
        "diff": reading.diff,
        "explanation": reading.explain,
        "field": reading.explain,
        "provenance": reading.provenance,
    }
    for question in _QUESTIONS:
        if question.name == "history":
            question = question._replace(
                parameters=[
                    says.limit(reading.page_max),
                    *question.parameters,
                    _changed(entity_type),
                ]
            )
        method = methods[question.name]
        _add(router, place, question, entity_type.name, method, desk, says.OBJECT)
    if is_read_only:
        state = schemas.read(entity_type)
        _add(router, place, _NOW, entity_type.name, reading.entity, desk, state)
    return router


def _changed(entity_type: EntityType) -> JsonSchema:
    # Nested fields are taken too, but no schema tells which of them a model has.
    names = {"type": "string", "enum": [*entity_type.field_names]}
    what = "Only versions that changed this field; dots lead to nested fields."
    return says.query("changed", names, what)


def _add(
    router: APIRouter,
    place: str,
    question: _Question,
    entity: str,
    method: Method,
    desk: Desk,
    schema: JsonSchema,
) -> None:
    async def answer(request: Request, key: str) -> Response:
        more = {name: value for name, value in request.path_params.items() if name != "key"}
        return await desk.answer(
            *(request, entity, "read"),
            lambda asked: method(asked, parameters_of(request), entity, key, **more),
        )

    found = says.answers(*_STATUSES, schema=schema, secured=not desk.callers.local)
    add_route(
        *(router, "GET", f"{place}{question.path}", answer),
        name="_".join(filter(None, ("read", entity, question.name))),
        summary=question.summary.format(entity),
        responses=says.with_headers(found, "ETag", statuses=(200, 304)),
        parameters=[*question.parameters, *says.conditions()[1:], says.wait_for()],
    )


def parameters_of(request: HTTPConnection) -> Mapping[str, str]:
    """Parameters of the query; raises InvalidQuery for one that is given twice."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in found:
            raise InvalidQuery(f"{name} is given twice.")
        found[name] = value
    return found
