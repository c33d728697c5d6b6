"""The routes of an event entity type: POST appends to the log, GET reads the view `latest`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.errors import InvalidBody
from everstate.sources.crud import openapi as says
from everstate.sources.crud.answers import JSON, Answer, Incoming, content_type_of
from everstate.sources.crud.asgi import KEY, Desk, respond
from everstate.sources.crud.bodies import read_entity
from everstate.sources.crud.conditions import etag
from everstate.sources.crud.events import EventLog
from everstate.sources.crud.openapi import Schemas
from everstate.sources.crud.provenance import occurred_at_of, provenance_of

Find = Callable[[str, str], bytes]
"""State of an event (entity type, key) as the views have it; raises NotFound."""

_OCCURRED: Final = "occurred_at"
_VERSION: Final = 1


def event_router(
    entity_type: EntityType,
    log: EventLog,
    desk: Desk,
    schemas: Schemas,
    find: Find,
    *,
    api_version: str = "v1",
) -> APIRouter:
    """`POST /v1/{entity}` and `GET /v1/{entity}/{key}`; facts have no PUT, PATCH or DELETE."""
    name, local = entity_type.name, desk.callers.local
    path = f"/{api_version}/{name}"
    router = APIRouter(tags=[name])

    async def append(request: Request) -> Response:
        incoming = await desk.read(request)
        event, key = _event_of(entity_type, incoming)
        done = log.append(
            name,
            event,
            provenance=provenance_of(
                incoming.headers, incoming.caller, api_version=api_version, entity=name, key=key
            ),
            occurred_at=_occurred_at(incoming, event),
        )
        await asyncio.wrap_future(done)
        headers = {"ETag": etag(_VERSION), "Location": f"{path}/{quote(key, safe='')}"}
        return respond(Answer(201, headers, entity_type.encode(event).decode()))

    async def read(request: Request, key: str) -> Response:
        incoming = await desk.read(request)
        state = await desk.work(partial(find, name, key))
        if incoming.conditions.not_modified(_VERSION):
            return respond(Answer(304, {"ETag": etag(_VERSION)}))
        return respond(Answer(200, {"ETag": etag(_VERSION)}, state.decode()))

    state = schemas.read(entity_type)
    taken = says.answers(201, 400, 409, 413, 415, 422, schema=state, secured=not local)
    found = says.answers(200, 304, 400, 404, 422, schema=state, secured=not local)
    router.add_api_route(
        path,
        append,
        methods=["POST"],
        status_code=201,
        operation_id=f"append_{name}",
        summary=f"Append a {name} to the log; the same one twice counts once",
        responses=says.with_headers(taken, "ETag", "Location", statuses=(201,)),
        openapi_extra={
            "parameters": says.provenance_headers(local=local),
            "requestBody": says.entity_body(schemas, entity_type),
        },
    )
    router.add_api_route(
        f"{path}/{KEY}",
        read,
        methods=["GET"],
        operation_id=f"read_{name}",
        summary=f"Read a {name}, once the views have it",
        responses=says.with_headers(found, "ETag", statuses=(200, 304)),
        openapi_extra={"parameters": says.conditions()[1:]},
    )
    return router


def _event_of(entity_type: EntityType, incoming: Incoming) -> tuple[BaseModel, str]:
    """The event and its key, which the writer gives: a made one would be new each time."""
    content_type_of(incoming.headers, (JSON,))
    event = read_entity(entity_type, incoming.body)
    is_field = entity_type.key in type(event).model_fields
    if is_field and entity_type.key not in event.model_fields_set:
        reason = "is missing: an event's id is given by its writer, so that it can be repeated"
        raise InvalidBody(entity_type.name, ((entity_type.key, reason),))
    return event, entity_type.key_of(event)


def _occurred_at(incoming: Incoming, event: BaseModel) -> datetime | None:
    """When it happened: as the header says, or the event's own `occurred_at`, or now."""
    said = occurred_at_of(incoming.headers)
    if said is not None:
        return said
    own = getattr(event, _OCCURRED, None)
    return own if isinstance(own, datetime) and own.tzinfo is not None else None
