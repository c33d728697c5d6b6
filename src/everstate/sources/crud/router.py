"""The routes of one entity type: POST, GET, PUT, PATCH, DELETE, and the list."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from everstate.http import openapi as says
from everstate.http.asgi import KEY, AnswerPast, Desk, add_route
from everstate.http.callers import TOKEN
from everstate.http.openapi import Schemas
from everstate.sources.crud.openapi import list_parameters, patch_body
from everstate.sources.crud.resource import VERSION, Resource

_READ = (200, 304, 400, 404, 410, 412, 422, 504)
_WRITTEN = (400, 412, 413, 415, 422)


def entity_router(resource: Resource, desk: Desk, schemas: Schemas, past: AnswerPast) -> APIRouter:
    """Routes of an entity type on its source of truth, described in OpenAPI.

    ``past`` answers a read of a past state, which the source of truth does not have.
    """
    router = APIRouter(tags=[resource.name])
    _add_collection(router, resource, desk, schemas)
    _add_reading(router, resource, desk, schemas, past)
    _add_writing(router, resource, desk, schemas)
    return router


def _add_collection(router: APIRouter, resource: Resource, desk: Desk, schemas: Schemas) -> None:
    name, kind, local = resource.name, resource.entity_type, desk.callers.local

    async def create(request: Request) -> Response:
        return await desk.answer(request, name, "write", resource.create)

    async def listed(request: Request) -> Response:
        parameters = request.query_params.multi_items()
        return await desk.answer(
            request, name, "read", lambda asked: resource.list(asked, parameters)
        )

    state = schemas.read(kind)
    made = says.answers(201, 400, 409, 413, 415, 422, schema=state, secured=not local)
    # 200: a repeated request gets the first answer, which was kept.
    add_route(
        *(router, "POST", resource.path, create),
        status_code=201,
        name=f"create_{name}",
        summary=f"Create a {name}",
        responses=says.with_headers(made, "ETag", "Location", TOKEN, statuses=(201,)),
        parameters=says.write_headers(local=local),
        body=says.entity_body(schemas, kind),
    )
    add_route(
        *(router, "GET", resource.path, listed),
        name=f"list_{name}",
        summary=f"List {name} entities, a page at a time",
        responses=says.answers(200, 400, schema=schemas.page(kind), secured=not local),
        parameters=list_parameters(resource.filters, resource.page_max),
    )


def _add_reading(
    router: APIRouter, resource: Resource, desk: Desk, schemas: Schemas, past: AnswerPast
) -> None:
    name = resource.name

    async def read(request: Request, key: str) -> Response:
        found = await past(request, name, key)
        if found is not None:
            return found
        return await desk.answer(request, name, "read", lambda asked: resource.read(asked, key))

    state = schemas.read(resource.entity_type)
    found = says.answers(*_READ, schema=state, secured=not desk.callers.local)
    add_route(
        *(router, "GET", f"{resource.path}/{KEY}", read),
        name=f"read_{name}",
        summary=f"Read a {name} from its source of truth, or a past state from the views",
        responses=says.with_headers(found, "ETag", statuses=(200, 304)),
        parameters=[*says.conditions(), *says.past(), says.wait_for()],
    )


def _add_writing(router: APIRouter, resource: Resource, desk: Desk, schemas: Schemas) -> None:
    name, local = resource.name, desk.callers.local
    place, state = f"{resource.path}/{KEY}", schemas.read(resource.entity_type)
    headers = says.conditions() + says.write_headers(local=local)

    async def replace(request: Request, key: str) -> Response:
        return await desk.answer(request, name, "write", lambda asked: resource.replace(asked, key))

    async def patch(request: Request, key: str) -> Response:
        return await desk.answer(request, name, "write", lambda asked: resource.patch(asked, key))

    async def delete(request: Request, key: str) -> Response:
        return await desk.answer(request, name, "write", lambda asked: resource.delete(asked, key))

    replaced = says.answers(200, 201, *_WRITTEN, schema=state, secured=not local)
    replaced = says.with_headers(replaced, "ETag", TOKEN, statuses=(200, 201))
    patched = says.answers(200, 404, *_WRITTEN, schema=state, secured=not local)
    add_route(
        *(router, "PUT", place, replace),
        name=f"replace_{name}",
        summary=f"Replace a {name}, or create it",
        responses=says.with_headers(replaced, "Location", statuses=(201,)),
        parameters=headers,
        body=says.entity_body(schemas, resource.entity_type),
    )
    add_route(
        *(router, "PATCH", place, patch),
        name=f"patch_{name}",
        summary=f"Change parts of a {name}",
        responses=says.with_headers(patched, "ETag", TOKEN, statuses=(200,)),
        parameters=headers,
        body=patch_body(),
    )
    deleted = says.answers(204, 400, 404, 412, 413, 422, secured=not local)
    add_route(
        *(router, "DELETE", place, delete),
        status_code=204,
        response_class=Response,
        name=f"delete_{name}",
        summary=f"Delete a {name}; its version is kept",
        responses=says.with_headers(deleted, VERSION, TOKEN, statuses=(204,)),
        parameters=headers,
    )
