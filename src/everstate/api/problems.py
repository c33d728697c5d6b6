"""Every error as `application/problem+json` (RFC 9457)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from everstate.errors import (
    AlreadyExists,
    EverstateError,
    InvalidBody,
    InvalidChange,
    PreconditionFailed,
    Unauthenticated,
    UnknownEntity,
    VersionConflict,
)
from everstate.sources.crud.openapi import PROBLEM
from everstate.telemetry import Sparingly

LOGGER = logging.getLogger("everstate.api")

_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_RETRY_AFTER_S: Final = "1"
_refused: Final = Sparingly(LOGGER, logging.WARNING)


def handle_errors(api: FastAPI) -> None:
    """Answer each error of a request as a problem."""
    api.add_exception_handler(EverstateError, _ours)
    api.add_exception_handler(HTTPException, _frameworks)
    api.add_exception_handler(ClientDisconnect, _gone)
    api.add_exception_handler(Exception, _unexpected)


def problem(
    status: int,
    title: str,
    detail: str,
    *,
    kind: str = "about:blank",
    more: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A response that is a problem; ``more`` are members of its own."""
    body = {"type": kind, "title": title, "status": status, "detail": detail, **(more or {})}
    encoded = msgspec.json.encode(body)
    return Response(encoded, status, headers=dict(headers or {}), media_type=PROBLEM)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, EverstateError)
    status, name = error.http_status, type(error).__name__
    if status >= 500:
        LOGGER.warning("%s %s: %s", request.method, request.url.path, error.message)
    if isinstance(error, Unauthenticated):
        client = request.client.host if request.client else "?"
        _refused.log("login refused: %s %s from %s", request.method, request.url.path, client)
    headers = {}
    if status == 503:
        headers["Retry-After"] = _RETRY_AFTER_S
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    more = _members(error)
    if error.public_advice:
        more["advice"] = error.public_advice
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return problem(
        status,
        words[0] + words[1:].lower(),
        error.public,
        kind=f"urn:everstate:error:{name}",
        more=more,
        headers=headers,
    )


def _members(error: EverstateError) -> dict[str, Any]:
    """What an error carries that a program wants to read."""
    if isinstance(error, VersionConflict):
        return {"version": error.actual}
    if isinstance(error, PreconditionFailed | AlreadyExists):
        return {"version": error.version}
    if isinstance(error, InvalidBody):
        listed = [{"field": field, "reason": reason} for field, reason in error.problems]
        return {"problems": listed}
    if isinstance(error, InvalidChange):
        return {"problems": [{"field": error.field, "reason": error.reason}]}
    return {}


async def _frameworks(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        known, parts = places(request.app.openapi()), request.url.path.split("/")
        if len(parts) > 2 and parts[2] not in known:
            return await _ours(request, UnknownEntity(parts[2], tuple(known)))
        listed = known[parts[2]] if len(parts) > 2 else ["GET /"]
        detail = f"there is nothing at {request.url.path}; there is {', '.join(listed)}."
        return problem(404, "Not Found", detail)
    detail = f"{request.method} {request.url.path}: {error.detail}."
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        headers = {**{k: v for k, v in headers.items() if k.lower() != "allow"}, "Allow": allowed}
        detail = f"{request.url.path} takes {allowed}, not {request.method}."
    return problem(error.status_code, str(error.detail), detail, headers=headers)


def _allowed(request: Request) -> list[str]:
    """Methods of the path over all its routes; the framework knows only those of one."""
    asked = [{**request.scope, "method": method} for method in _METHODS]
    allowed = [
        str(scope["method"])
        for scope in asked
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]
    return ["GET", "HEAD", *allowed[1:]] if allowed[:1] == ["GET"] else allowed


def places(described: Mapping[str, Any]) -> dict[str, list[str]]:
    """What an OpenAPI document has of each entity type: methods and path of its routes."""
    found: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        if path.startswith("/v1/"):
            methods = " ".join(method.upper() for method in operations)
            found.setdefault(path.split("/")[2], []).append(f"{methods} {path}")
    return found


async def _gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads it; the request ended before its body did."""
    return problem(400, "Bad Request", "the body ended before it was whole.")


async def _unexpected(request: Request, error: Exception) -> Response:
    LOGGER.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "Internal Server Error", EverstateError.unsaid)
