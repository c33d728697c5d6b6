"""The routes of one entity type: POST, GET, PUT, PATCH, DELETE, and the list."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from everstate.http import openapi as says
from everstate.http.answers import JSON
from everstate.http.asgi import KEY, AnswerPast, Desk, Routes
from everstate.http.callers import TOKEN
from everstate.http.openapi import Schemas
from everstate.sources.crud.openapi import list_parameters, patch_body
from everstate.sources.crud.resource import VERSION, Resource


def entity_router(resource: Resource, desk: Desk, schemas: Schemas, past: AnswerPast) -> APIRouter:
    """Routes of an entity type on its source of truth, described in OpenAPI.

    ``past`` answers a read of a past state, which the source of truth does not have.
    """
    routes = Routes(desk, resource.name, resource.path)
    _add_collection(routes, resource, desk, schemas)
    _add_reading(routes, resource, desk, schemas, past)
    _add_writing(routes, resource, desk, schemas)
    return routes.router


def _add_collection(routes: Routes, resource: Resource, desk: Desk, schemas: Schemas) -> None:
    name, kind, local = resource.name, resource.entity_type, desk.callers.local

    async def listed(request: Request) -> Response:
        parameters = request.query_params.multi_items()
        return await desk.answer(
            request, name, "read", lambda asked: resource.list(asked, parameters)
        )

    routes.write(
        *("POST", "", resource.create),
        entity=name,
        name=f"create_{name}",
        summary=f"Create a {name}",
        # A repeated request gets the first answer, which was kept.
        statuses=(201, 400, 409, 413, 415, 422),
        content={JSON: schemas.read(kind)},
        sent=dict.fromkeys(("ETag", "Location", TOKEN), (201,)),
        parameters=says.write_headers(local=local),
        body=says.entity_body(schemas, kind),
        status_code=201,
    )
    routes.add(
        *("GET", "", listed),
        name=f"list_{name}",
        summary=f"List {name} entities, a page at a time",
        statuses=(200, 400),
        content={JSON: schemas.page(kind)},
        parameters=list_parameters(resource.filters, resource.page_max),
    )


def _add_reading(
    routes: Routes, resource: Resource, desk: Desk, schemas: Schemas, past: AnswerPast
) -> None:
    name = resource.name

    async def read(request: Request) -> Response:
        key = request.path_params["key"]
        found = await past(request, name, key)
        if found is not None:
            return found
        return await desk.answer(request, name, "read", lambda asked: resource.read(asked, key))

    routes.add(
        *("GET", f"/{KEY}", read),
        name=f"read_{name}",
        summary=f"Read a {name} from its source of truth, or a past state from the views",
        statuses=(200, 304, 400, 404, 410, 412, 422, 504),
        content={JSON: schemas.read(resource.entity_type)},
        sent={"ETag": (200, 304)},
        parameters=[says.KEY_IN_PATH, *says.conditions(), *says.past(), says.wait_for()],
    )


def _add_writing(routes: Routes, resource: Resource, desk: Desk, schemas: Schemas) -> None:
    name, state = resource.name, {JSON: schemas.read(resource.entity_type)}
    headers = [*says.conditions(), *says.write_headers(local=desk.callers.local)]
    write = partial(routes.write, entity=name, parameters=[says.KEY_IN_PATH, *headers])
    write(
        *("PUT", f"/{KEY}", resource.replace),
        name=f"replace_{name}",
        summary=f"Replace a {name}, or create it",
        statuses=(200, 201, 400, 412, 413, 415, 422),
        content=state,
        sent={"ETag": (200, 201), TOKEN: (200, 201), "Location": (201,)},
        body=says.entity_body(schemas, resource.entity_type),
    )
    write(
        *("PATCH", f"/{KEY}", resource.patch),
        name=f"patch_{name}",
        summary=f"Change parts of a {name}",
        statuses=(200, 400, 404, 412, 413, 415, 422),
        content=state,
        sent={"ETag": (200,), TOKEN: (200,)},
        body=patch_body(),
    )
    write(
        *("DELETE", f"/{KEY}", resource.delete),
        name=f"delete_{name}",
        summary=f"Delete a {name}; its version is kept",
        statuses=(204, 400, 404, 412, 413, 422),
        sent={VERSION: (204,), TOKEN: (204,)},
        status_code=204,
        response_class=Response,
    )
