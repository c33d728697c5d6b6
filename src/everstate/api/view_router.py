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
from everstate.http.asgi import KEY, Desk, add_route, respond
from everstate.http.callers import TOKEN
from everstate.http.openapi import JsonSchema
from everstate.views.project import Project, known_views

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
    says.text("where", "Conditions on columns: `nights>3`; several with `;` between."),
    says.text("order", "Columns to sort by: `-nights` for the largest first; with `;`."),
    says.query(
        "after",
        {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"},
        "Continue after the page that named this.",
    ),
    says.text("q", "Of a view with `search`: words; the best rows come first."),
    says.query("at", says.TIME, "Of a timeline: the rows that were valid at this time."),
]


def view_router(project: Project, reading: ViewReading, desk: Desk) -> APIRouter:
    """The routes of all views of a project."""
    router = APIRouter(tags=["views"])
    secured = not desk.callers.local
    view = view_parameter(project)
    most = {"type": "integer", "minimum": 1, "maximum": reading.page_max}
    limit = says.query("limit", most, "Most rows of the page.")
    key = says.in_path(
        "key", {"type": "string", "minLength": 1}, "Values of the view's key, with `/`."
    )

    async def listed(request: Request) -> Response:
        incoming = read_of_any(desk, request)
        return respond(await desk.work(partial(reading.listed, incoming, parameters_of(request))))

    async def rows(request: Request) -> Response:
        incoming = await read_of_view(desk, request, project)
        name = request.path_params["view"]
        call = partial(reading.rows, incoming, parameters_of(request), name)
        return respond(await desk.work(call))

    async def row(request: Request) -> Response:
        incoming = await read_of_view(desk, request, project)
        name = request.path_params["view"]
        call = partial(reading.row, incoming, parameters_of(request), name, _key(request))
        return respond(await desk.work(call))

    add_route(
        *(router, "GET", PLACE, listed),
        name="list_views",
        summary="All views: columns, key, version, position, lag and state",
        responses=says.answers(200, 304, 400, schema=_LIST, secured=secured),
        parameters=_KNOWN,
    )
    add_route(
        *(router, "GET", f"{PLACE}/{{view}}", rows),
        name="read_view",
        summary="A page of the rows of a view, at one position",
        responses=_answers(_PAGE, secured=secured),
        parameters=[view, limit, *_ROWS, *_KNOWN, says.wait_for()],
    )
    add_route(
        *(router, "GET", f"{PLACE}/{{view}}/rows/{KEY}", row),
        name="read_view_row",
        summary="The row of a view that has a key",
        responses=_answers(says.OBJECT, secured=secured),
        parameters=[view, key, *_KNOWN, says.wait_for()],
    )
    return router


def view_parameter(project: Project) -> JsonSchema:
    """The parameter of the path that names a view."""
    names = sorted({*known_views(project), *project.refused_views})
    return says.in_path("view", {"type": "string", "enum": names}, "Name of the view.")


def _answers(schema: JsonSchema, *, secured: bool) -> dict[int | str, JsonSchema]:
    found = says.answers(*_STATUSES, schema=schema, secured=secured)
    found = says.with_headers(found, TOKEN, VIEW_VERSION, "ETag", statuses=(200, 304))
    for status in (200, 304):
        for name in (LAG_CHANGES, LAG_SECONDS):
            found[status]["headers"][name] = {"schema": says.STRING}
    return found


def _key(request: Request) -> list[str]:
    """The parts of the key, of the path as it was sent; raises NotFound."""
    sent = bytes(request.scope.get("raw_path") or request.scope["path"].encode())
    parts = sent.split(b"/")[5:]
    try:
        return [unquote(part.decode("ascii"), errors="strict") for part in parts]
    except UnicodeDecodeError:
        raise NotFound("a key of a row is text in UTF-8.") from None
