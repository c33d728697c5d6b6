"""Routes that read views: `GET /views/v1`, `/views/v1/{view}` and `/views/v1/{view}/rows/{key}`.

The parts of a key are those of the path as it was sent: a slash inside of one is sent as `%2F`.
"""

from __future__ import annotations

from functools import partial
from typing import Final
from urllib.parse import unquote

from fastapi import APIRouter, Request, Response

from everstate.api.reading_router import parameters_of
from everstate.api.view_access import read_of_any, read_of_view
from everstate.api.view_reading import LAG_CHANGES, LAG_SECONDS, PLACE, VIEW_VERSION, ViewReading
from everstate.errors import NotFound
from everstate.http import openapi as says
from everstate.http.asgi import KEY, Desk, respond
from everstate.http.callers import TOKEN
from everstate.http.openapi import JsonSchema
from everstate.views.project import Project, known_views

_TEXT: Final[JsonSchema] = {"type": "string"}
_TIME: Final[JsonSchema] = {"type": "string", "format": "date-time"}
_STATUSES: Final = (200, 304, 400, 404, 422, 504)
_KNOWN: Final = says.conditions()[1:]
_PAGE: Final[JsonSchema] = {
    "type": "object",
    "required": ["items", "after"],
    "properties": {
        "items": {"type": "array", "items": {"type": "object"}},
        "after": {"type": ["string", "null"]},
    },
}
_LIST: Final[JsonSchema] = {
    "type": "object",
    "required": ["items"],
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "entities", "kind", "version", "state", "columns", "key"],
            },
        }
    },
}
_ROWS: Final = [
    says.query("where", _TEXT, "Conditions on columns: `nights>3`; several with `;` between."),
    says.query("order", _TEXT, "Columns to sort by: `-nights` for the largest first; with `;`."),
    says.query(
        "after",
        {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"},
        "Continue after the page that named this.",
    ),
    says.query("q", _TEXT, "Of a view with `search`: words; the best rows come first."),
    says.query("at", _TIME, "Of a timeline: the rows that were valid at this time."),
]


def view_router(project: Project, reading: ViewReading, desk: Desk) -> APIRouter:
    """The routes of all views of a project."""
    router = APIRouter(tags=["views"])
    secured = not desk.callers.local
    view = view_parameter(project)
    most = {"type": "integer", "minimum": 1, "maximum": reading.page_max}
    limit = says.query("limit", most, "Most rows of the page.")
    key = _in_path("key", {"type": "string", "minLength": 1}, "Values of the view's key, with `/`.")

    async def listed(request: Request) -> Response:
        incoming = read_of_any(desk, request)
        return respond(await desk.work(partial(reading.listed, incoming, parameters_of(request))))

    async def rows(request: Request) -> Response:
        incoming = await read_of_view(desk, request, project)
        name = request.path_params["view"]
        return respond(
            await desk.work(partial(reading.rows, incoming, parameters_of(request), name))
        )

    async def row(request: Request) -> Response:
        incoming = await read_of_view(desk, request, project)
        name = request.path_params["view"]
        call = partial(reading.row, incoming, parameters_of(request), name, _key(request))
        return respond(await desk.work(call))

    router.add_api_route(
        PLACE,
        listed,
        methods=["GET"],
        operation_id="list_views",
        summary="All views: columns, key, version, position, lag and state",
        responses=says.answers(200, 304, 400, schema=_LIST, secured=secured),
        openapi_extra={"parameters": _KNOWN},
    )
    router.add_api_route(
        f"{PLACE}/{{view}}",
        rows,
        methods=["GET"],
        operation_id="read_view",
        summary="A page of the rows of a view, at one position",
        responses=_answers(_PAGE, secured=secured),
        openapi_extra={"parameters": [view, limit, *_ROWS, *_KNOWN, says.wait_for()]},
    )
    router.add_api_route(
        f"{PLACE}/{{view}}/rows/{KEY}",
        row,
        methods=["GET"],
        operation_id="read_view_row",
        summary="The row of a view that has a key",
        responses=_answers({"type": "object"}, secured=secured),
        openapi_extra={"parameters": [view, key, *_KNOWN, says.wait_for()]},
    )
    return router


def view_parameter(project: Project) -> JsonSchema:
    """The parameter of the path that names a view."""
    names = sorted({*known_views(project), *project.refused_views})
    return _in_path("view", {"type": "string", "enum": names}, "Name of the view.")


def _answers(schema: JsonSchema, *, secured: bool) -> dict[int | str, JsonSchema]:
    found = says.answers(*_STATUSES, schema=schema, secured=secured)
    found = says.with_headers(found, TOKEN, VIEW_VERSION, "ETag", statuses=(200, 304))
    for status in (200, 304):
        for name in (LAG_CHANGES, LAG_SECONDS):
            found[status]["headers"][name] = {"schema": {"type": "string"}}
    return found


def _key(request: Request) -> list[str]:
    """The parts of the key, of the path as it was sent; raises NotFound."""
    sent = bytes(request.scope.get("raw_path") or request.scope["path"].encode())
    parts = sent.split(b"/")[5:]
    try:
        return [unquote(part.decode("ascii"), errors="strict") for part in parts]
    except UnicodeDecodeError:
        raise NotFound("a key of a row is text in UTF-8.") from None


def _in_path(name: str, schema: JsonSchema, what: str) -> JsonSchema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": schema,
        "description": what,
    }
