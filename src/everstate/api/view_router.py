"""Routes that read views: `GET /views/v1`, `/views/v1/{view}` and `/views/v1/{view}/rows/{key}`.

The parts of a key are those of the path as it was sent: a slash inside of one is sent as `%2F`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from starlette.requests import HTTPConnection

from everstate.api.view_reading import LAG_CHANGES, LAG_SECONDS, PLACE, VIEW_VERSION, ViewReading
from everstate.http import openapi as says
from everstate.http.answers import JSON, HttpRequest
from everstate.http.asgi import KEY, Desk, Routes, headers_of
from everstate.http.callers import TOKEN, Caller
from everstate.http.openapi import JsonSchema
from everstate.serving.masking import entities_read_by
from everstate.views.project import Project, known_views

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
    says.text("q", "Of a view with `search`, or in OpenSearch: words; the best rows come first."),
    says.query("at", says.TIME, "Of a timeline: the rows that were valid at this time."),
]


def view_router(project: Project, reading: ViewReading, desk: Desk) -> APIRouter:
    """The routes of all views of a project."""
    routes = Routes(desk, "views", PLACE)
    ask = partial(
        routes.ask,
        read=partial(read_of_view, desk, project=project),
        before=[view_parameter(project)],
        after=[*_KNOWN, says.wait_for()],
        statuses=(200, 304, 400, 404, 422, 504),
        sent=dict.fromkeys((TOKEN, VIEW_VERSION, "ETag"), (200, 304)),
        sometimes_sent=dict.fromkeys((LAG_CHANGES, LAG_SECONDS), (200, 304)),
    )
    routes.ask(
        "",
        reading.listed,
        read=partial(read_of_any, desk),
        name="list_views",
        summary="All views: columns, key, version, position, lag and state",
        statuses=(200, 304, 400),
        content={JSON: _LIST},
        after=_KNOWN,
    )
    most = {"type": "integer", "minimum": 1, "maximum": reading.page_max}
    ask(
        "/{view}",
        reading.rows,
        *(says.query("limit", most, "Most rows of the page."), *_ROWS),
        content={JSON: _PAGE},
        name="read_view",
        summary="A page of the rows of a view, at one position",
    )
    ask(
        f"/{{view}}/rows/{KEY}",
        reading.row,
        says.in_path(
            "key", {"type": "string", "minLength": 1}, "Values of the view's key, with `/`."
        ),
        content={JSON: says.OBJECT},
        name="read_view_row",
        summary="The row of a view that has a key",
    )
    return routes.router


def view_parameter(project: Project) -> JsonSchema:
    """The parameter of the path that names a view."""
    names = sorted({*known_views(project), *project.refused_views})
    return says.in_path("view", {"type": "string", "enum": names}, "Name of the view.")


def admit_to_view(desk: Desk, connection: HTTPConnection, project: Project) -> Caller:
    """The caller, who may read the view of the path: every entity type in it, without a mask.

    A row may have the values of any field of these types under another name, so that a caller from
    whom fields are hidden does not see the rows at all.
    Raises Unauthenticated, TooManyRequests, and NotPermitted also where a field is hidden.
    """
    view = connection.path_params["view"]
    entities = entities_read_by(project, view)
    caller = desk.admit(connection, entities[0], "read")
    for entity in entities:
        desk.admit(connection, entity, "read")
        caller.mask(entity).refuse_all(f"the rows of view {view}")
    return caller


async def read_of_view(desk: Desk, request: Request, project: Project) -> HttpRequest:
    """The request of a caller who may read the view of its path."""
    admit_to_view(desk, request, project)
    return await desk.read(
        request, entities_read_by(project, request.path_params["view"])[0], "read"
    )


async def read_of_any(desk: Desk, request: Request) -> HttpRequest:
    """The request of any caller, for an answer that has only what the caller may see."""
    caller = desk.admit_any(request)
    return HttpRequest(
        method=request.method, path=request.url.path, headers=headers_of(request), caller=caller
    )
