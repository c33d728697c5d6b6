"""The routes of an event entity type: POST appends to the log, GET reads the view `latest`."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.tokens import written_token
from everstate.errors import InvalidBody
from everstate.http import openapi as says
from everstate.http.answers import JSON, HttpAnswer, HttpRequest, content_type_of, masked
from everstate.http.asgi import KEY, AnswerPast, Desk, Routes, beside_loop, respond
from everstate.http.callers import TOKEN, occurred_at_of, provenance_of
from everstate.http.etags import etag
from everstate.http.openapi import Schemas
from everstate.sources.crud.bodies import read_entity, read_json
from everstate.sources.crud.events import EventLog
from everstate.sources.way_in import Find

_OCCURRED: Final = "occurred_at"
_VERSION: Final = 1


def event_router(
    project: str,
    entity_type: EntityType,
    log: EventLog,
    desk: Desk,
    schemas: Schemas,
    find: Find,
    past: AnswerPast,
) -> APIRouter:
    """`POST /v1/{entity}` and `GET /v1/{entity}/{key}`; facts have no PUT, PATCH or DELETE."""
    name, local = entity_type.name, desk.callers.local
    path, routes, state = f"/v1/{name}", Routes(desk, name), {JSON: schemas.read(entity_type)}

    async def append(request: Request) -> Response:
        incoming = await desk.read(request, name, "write")
        call = partial(_append, incoming, entity_type, log, project)
        acknowledged, answer = await beside_loop(len(incoming.body), call)
        await asyncio.wrap_future(acknowledged)
        return respond(answer)

    async def read(request: Request) -> Response:
        key = request.path_params["key"]
        answered = await past(request, name, key)
        if answered is not None:
            return answered
        incoming = await desk.read(request, name, "read")
        found = await desk.work(partial(find, name, key, incoming.wait_for))
        if incoming.conditions.not_modified(_VERSION):
            return respond(masked(HttpAnswer(304, {"ETag": etag(_VERSION)}), incoming.mask))
        answer = HttpAnswer(200, {"ETag": etag(_VERSION)}, found.decode())
        return respond(masked(answer, incoming.mask))

    routes.add(
        *("POST", path, append),
        name=f"append_{name}",
        summary=f"Append a {name} to the log; a repeated one counts once",
        statuses=(201, 400, 409, 413, 415, 422),
        content=state,
        sent=dict.fromkeys(("ETag", "Location", TOKEN), (201,)),
        parameters=says.provenance_headers(local=local),
        body=says.entity_body(schemas, entity_type),
        status_code=201,
    )
    routes.add(
        *("GET", f"{path}/{KEY}", read),
        name=f"read_{name}",
        summary=f"Read a {name} from the views",
        statuses=(200, 304, 400, 404, 422, 504),
        content=state,
        sent={"ETag": (200, 304)},
        parameters=[
            says.KEY_IN_PATH,
            *says.conditions()[1:],
            says.wait_for(),
            *says.past(),
        ],
    )
    return routes.router


def _append(
    incoming: HttpRequest, entity_type: EntityType, log: EventLog, project: str
) -> tuple[Future[None], HttpAnswer]:
    """Send the event in a body; the answer is for when the future is done."""
    name, (event, key) = entity_type.name, _event_of(entity_type, incoming)
    given = incoming.headers, incoming.caller
    writer = provenance_of(*given, api_version="v1", entity=name, key=key)
    at = _occurred_at(incoming, event)
    acknowledged = log.append(name, event, provenance=writer, occurred_at=at)
    token = str(written_token(project, name, key, _VERSION))
    location = f"/v1/{name}/{quote(key, safe='')}"
    headers = {"ETag": etag(_VERSION), "Location": location, TOKEN: token}
    answer = HttpAnswer(201, headers, entity_type.encode(event).decode())
    return acknowledged, masked(answer, incoming.mask)


def _event_of(entity_type: EntityType, incoming: HttpRequest) -> tuple[BaseModel, str]:
    """The event and its key, which the client must send: a generated one would differ each time."""
    content_type_of(incoming.headers, (JSON,))
    if incoming.mask:
        incoming.mask.check_written(read_json(incoming.body))
    event = read_entity(entity_type, incoming.body)
    is_field = entity_type.key in type(event).model_fields
    if is_field and entity_type.key not in event.model_fields_set:
        reason = "is missing: the writer must give an event its id, so that it can be repeated"
        raise InvalidBody(entity_type.name, ((entity_type.key, reason),))
    return event, entity_type.key_of(event)


def _occurred_at(incoming: HttpRequest, event: BaseModel) -> datetime | None:
    """When it happened: the header, else the event's own `occurred_at`; ``None``: now."""
    said = occurred_at_of(incoming.headers)
    if said is not None:
        return said
    own = getattr(event, _OCCURRED, None)
    return own if isinstance(own, datetime) and own.tzinfo is not None else None
