"""Commands over REST: ``POST /v1/{entity}/{key}/commands/{Name}``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final
from uuid import UUID, uuid5

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response
from pydantic import BaseModel

from everstate.changes import Provenance
from everstate.changes.row_json import row_json
from everstate.declarations.commands import CommandGroup
from everstate.errors import (
    EverstateError,
    NotPermitted,
    PreconditionFailed,
    TooManyRequests,
    Unauthenticated,
)
from everstate.http.answers import check_length, content_type_of
from everstate.http.asgi import KEY, beside_loop, headers_of, read_body
from everstate.http.callers import idempotency_key_of, occurred_at_of
from everstate.http.etags import parse_condition
from everstate.http.masks import NO_MASK, Mask
from everstate.sources.commands.answer import Answer
from everstate.sources.commands.client import TIMEOUT_S, CommandClient
from everstate.sources.commands.wire import Outcome, encode
from everstate.telemetry import RateLimitedLogger
from everstate.views.project import Project

logger = logging.getLogger("everstate.api")

_KEYS: Final = UUID("6f0a3d3e-8f0c-5b0e-9d5a-0a1b6a0b7c11")
_WAIT_S_MAX: Final = 60.0
_failed: Final = RateLimitedLogger(logger, logging.WARNING)
_STATUS: Final = {
    Outcome.ACCEPTED: 200,
    Outcome.REJECTED: 422,
    Outcome.CONFLICT: 412,
    Outcome.PARKED: 500,
    Outcome.TIMED_OUT: 504,
}

ProvenanceOf = Callable[[Request], Provenance]
"""Provenance of a request; raises when its caller is missing or unknown."""
MaskOf = Callable[[Request, str], Mask]
"""What the caller of a request does not see of an entity type."""


class CommandAnswered(BaseModel):
    """Body of an accepted command."""

    commandId: UUID
    outcome: str
    entity: str
    key: str
    version: int
    changes: list[dict[str, Any]]


class CommandProblem(BaseModel):
    """Body of every other answer (RFC 9457), with the command id to repeat it by."""

    type: str
    title: str
    status: int
    detail: str
    commandId: UUID | None = None
    code: str | None = None
    version: int | None = None
    data: dict[str, Any] | None = None


def router(
    app: Project,
    client: Callable[[], CommandClient],
    provenance_of: ProvenanceOf,
    *,
    mask_of: MaskOf = lambda _request, _entity: NO_MASK,
    body_bytes_max: int = 1_048_576,
) -> APIRouter:
    """One route for each command of each entity type; ``client`` raises while it is not open.

    Headers: ``If-Match`` is a condition on the entity's version, as for CRUD; ``Idempotency-Key``
    identifies the command (a UUID is its id; any other text is hashed to one for each caller), and
    another command, body or caller with that id is refused; ``Prefer: wait=5`` limits the wait, in
    seconds; ``Everstate-Occurred-At`` is when it happened in the world. Answers: 200, 412 the
    condition does not hold, 415 the body is not JSON, 422 rejected, invalid, or the id is of
    another request, 500 parked, 504 timed out.
    """
    made = APIRouter(tags=["commands"])
    for group in app.command_groups.values():
        for name, model in group.by_name.items():
            _add(made, group, name, model, client, provenance_of, mask_of, body_bytes_max)
    return made


def _add(
    made: APIRouter,
    group: CommandGroup,
    name: str,
    model: type[BaseModel],
    client: Callable[[], CommandClient],
    provenance_of: ProvenanceOf,
    mask_of: MaskOf,
    body_bytes_max: int,
) -> None:
    async def post(
        request: Request,
        key: str,
        if_match: Annotated[list[str] | None, Header()] = None,
        idempotency_key: Annotated[str | None, Header()] = None,
        prefer: Annotated[str | None, Header()] = None,
    ) -> Response:
        command_id = None
        try:
            # The caller is checked first: nothing is read for a caller without permission.
            provenance = provenance_of(request)
            headers = headers_of(request)
            content_type_of(headers, ("application/json",))
            check_length(headers, body_bytes_max)
            command_id = _command_id(provenance, group.name, key, idempotency_key)
            condition = None if if_match is None else ", ".join(if_match)
            match = parse_condition("If-Match", condition)
            body = await read_body(request, body_bytes_max)
            command = await beside_loop(len(body), partial(group.read, name, body))
            answer = await client().send_async(
                group.name,
                key,
                command,
                provenance=provenance,
                command_id=command_id,
                occurred_at=occurred_at_of(headers),
                if_match=condition,
                timeout_s=_wait_s(prefer),
            )
            if answer.outcome is Outcome.CONFLICT:
                refusal = PreconditionFailed(group.name, key, str(match), answer.version or 0)
                return _problem(refusal, answer, answer.command_id)
        except (Unauthenticated, NotPermitted, TooManyRequests):
            raise  # the application answers, and logs the caller
        except EverstateError as error:
            return _problem(error, None, command_id)
        return _answered(answer, mask_of(request, group.name))

    made.add_api_route(
        f"/v1/{group.name}/{KEY}/commands/{name}",
        post,
        methods=["POST"],
        name=f"{group.name} {name}",
        operation_id=f"{group.name}_{name}",
        response_model=None,
        responses={
            200: {"model": CommandAnswered, "description": "Accepted"},
            **{
                status: {"model": CommandProblem, "description": HTTPStatus(status).phrase}
                for status in (400, 412, 415, 422, 500, 504)
            },
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": model.model_json_schema()}},
            }
        },
        description=(model.__doc__ or f"Command {name}.").strip(),
    )


def _command_id(
    provenance: Provenance, entity: str, key: str, idempotency_key: str | None
) -> UUID | None:
    if idempotency_key is None:
        return None
    text = idempotency_key_of({"idempotency-key": idempotency_key})
    try:
        return UUID(text)
    except ValueError:
        named = [provenance.service_name, provenance.identifier, entity, key, text]
        return uuid5(_KEYS, encode(named).decode())


def _wait_s(prefer: str | None) -> float:
    for part in (prefer or "").split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "wait" and value.isascii() and value.isdigit():
            return min(float(value[:10]), _WAIT_S_MAX)
    return TIMEOUT_S


def _answered(answer: Answer, mask: Mask) -> Response:
    error = answer.error()
    if error is not None:
        return _problem(error, answer, answer.command_id)
    body = {
        "commandId": str(answer.command_id),
        "outcome": answer.outcome.value,
        "entity": answer.entity,
        "key": answer.key,
        "version": answer.version,
        "changes": [
            {
                "id": str(each.id),
                "version": each.version,
                "kind": each.kind,
                "event": mask.event({"type": each.type, "data": each.data}),
            }
            for each in answer.changes
        ],
    }
    tag = {"ETag": f'"{answer.version}"'}
    return Response(row_json(body), headers=tag, media_type="application/json")


def _problem(error: EverstateError, answer: Answer | None, command_id: UUID | None) -> Response:
    status = error.http_status if answer is None else _STATUS[answer.outcome]
    kind = type(error).__name__
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _failed.log("the answer to command %s is %d: %s", command_id, status, error)
    body: dict[str, Any] = {
        "type": f"urn:everstate:error:{kind}",
        "title": kind,
        "status": status,
        "detail": str(error) if answer is not None else error.public,
        "commandId": None if command_id is None else str(command_id),
    }
    if answer is not None:
        details = {
            "code": answer.code,
            "version": answer.version,
            "data": dict(answer.data) or None,
        }
        body |= {name: value for name, value in details.items() if value is not None}
    headers = {"Retry-After": "1"} if error.retryable else {}
    return Response(row_json(body), status, headers, "application/problem+json")
