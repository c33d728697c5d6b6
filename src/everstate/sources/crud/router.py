"""The routes of one entity type: POST, GET, PUT, PATCH, DELETE, and the list."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from everstate.http import openapi as says
from everstate.http.asgi import KEY, AnswerPast, Desk, respond
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
        incoming = await desk.read(request, name, "write")
        return respond(await desk.work(partial(resource.create, incoming)))

    async def listed(request: Request) -> Response:
        incoming = await desk.read(request, name, "read")
        parameters = request.query_params.multi_items()
        return respond(await desk.work(partial(resource.list, incoming, parameters)))

    state = schemas.read(kind)
    made = says.answers(201, 400, 409, 413, 415, 422, schema=state, secured=not local)
    # 200: a repeated request gets the first answer, which was kept.
    router.add_api_route(
        resource.path,
        create,
        methods=["POST"],
        status_code=201,
        operation_id=f"create_{name}",
        summary=f"Create a {name}",
        responses=says.with_headers(made, "ETag", "Location", TOKEN, statuses=(201,)),
        openapi_extra=_extra(says.write_headers(local=local), says.entity_body(schemas, kind)),
    )
    router.add_api_route(
        resource.path,
        listed,
        methods=["GET"],
        operation_id=f"list_{name}",
        summary=f"List {name} entities, a page at a time",
        responses=says.answers(200, 400, schema=schemas.page(kind), secured=not local),
        openapi_extra=_extra(list_parameters(resource.filters, resource.page_max)),
    )


def _add_reading(
    router: APIRouter, resource: Resource, desk: Desk, schemas: Schemas, past: AnswerPast
) -> None:
    async def read(request: Request, key: str) -> Response:
        found = await past(request, resource.name, key)
        if found is not None:
            return found
        incoming = await desk.read(request, resource.name, "read")
        return respond(await desk.work(partial(resource.read, incoming, key)))

    state = schemas.read(resource.entity_type)
    found = says.answers(*_READ, schema=state, secured=not desk.callers.local)
    router.add_api_route(
        f"{resource.path}/{KEY}",
        read,
        methods=["GET"],
        operation_id=f"read_{resource.name}",
        summary=f"Read a {resource.name} from its source of truth, or a past state from the views",
        responses=says.with_headers(found, "ETag", statuses=(200, 304)),
        openapi_extra=_extra([*says.conditions(), *says.past(), says.wait_for()]),
    )


def _add_writing(router: APIRouter, resource: Resource, desk: Desk, schemas: Schemas) -> None:
    name, local = resource.name, desk.callers.local
    place, state = f"{resource.path}/{KEY}", schemas.read(resource.entity_type)
    headers = says.conditions() + says.write_headers(local=local)

    async def replace(request: Request, key: str) -> Response:
        incoming = await desk.read(request, name, "write")
        return respond(await desk.work(partial(resource.replace, incoming, key)))

    async def patch(request: Request, key: str) -> Response:
        incoming = await desk.read(request, name, "write")
        return respond(await desk.work(partial(resource.patch, incoming, key)))

    async def delete(request: Request, key: str) -> Response:
        incoming = await desk.read(request, name, "write")
        return respond(await desk.work(partial(resource.delete, incoming, key)))

    replaced = says.answers(200, 201, *_WRITTEN, schema=state, secured=not local)
    replaced = says.with_headers(replaced, "ETag", TOKEN, statuses=(200, 201))
    patched = says.answers(200, 404, *_WRITTEN, schema=state, secured=not local)
    router.add_api_route(
        place,
        replace,
        methods=["PUT"],
        operation_id=f"replace_{name}",
        summary=f"Replace a {name}, or create it",
        responses=says.with_headers(replaced, "Location", statuses=(201,)),
        openapi_extra=_extra(headers, says.entity_body(schemas, resource.entity_type)),
    )
    router.add_api_route(
        place,
        patch,
        methods=["PATCH"],
        operation_id=f"patch_{name}",
        summary=f"Change parts of a {name}",
        responses=says.with_headers(patched, "ETag", TOKEN, statuses=(200,)),
        openapi_extra=_extra(headers, patch_body()),
    )
    deleted = says.answers(204, 400, 404, 412, 413, 422, secured=not local)
    router.add_api_route(
        place,
        delete,
        methods=["DELETE"],
        status_code=204,
        response_class=Response,
        operation_id=f"delete_{name}",
        summary=f"Delete a {name}; its version is kept",
        responses=says.with_headers(deleted, VERSION, TOKEN, statuses=(204,)),
        openapi_extra=_extra(headers),
    )


def _extra(parameters: list[dict[str, Any]], body: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"parameters": parameters, **({} if body is None else {"requestBody": body})}
