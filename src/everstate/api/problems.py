"""Every error as `application/problem+json` (RFC 9457)."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import Match

from everstate.api.headers import secure_headers
from everstate.errors import (
    AlreadyExists,
    Deleted,
    EverstateError,
    InvalidBody,
    InvalidChange,
    NotCaughtUp,
    NotPermitted,
    PreconditionFailed,
    TooManyRequests,
    Unauthenticated,
    UnknownEntity,
    VersionConflict,
)
from everstate.http.openapi import PROBLEM
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger("everstate.api")

PREFIXES: Final = ("/stream", "/query", "/feed")
"""The path of a route that has no single entity, before `/v1/{entity}`."""
VIEWS: Final = "/views/"
"""The path of a route of views, before `v1`."""
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
ONLY: Final = "everstate.only"
"""In a request's scope: the methods of a route that took it although it has no such method."""
_RETRY_AFTER_S: Final = "1"
_TEXT_MAX: Final = 2_000
_refused: Final = RateLimitedLogger(logger, logging.WARNING)


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
    """A problem response; ``more`` are its extension members."""
    body = {"type": kind, "title": title, "status": status, "detail": detail, **(more or {})}
    body = _shortened(body)
    encoded = msgspec.json.encode(body)
    return Response(encoded, status, headers=dict(headers or {}), media_type=PROBLEM)


def _shortened(part: Any) -> Any:
    """The part of a problem without the middle of its long texts, which quote what was sent."""
    if isinstance(part, dict):
        return {name: _shortened(each) for name, each in part.items()}
    if isinstance(part, list):
        return [_shortened(each) for each in part]
    if not isinstance(part, str) or len(part) <= _TEXT_MAX:
        return part
    left_out = len(part) - _TEXT_MAX
    half = _TEXT_MAX // 2
    return f"{part[:half]} … {left_out:,} characters … {part[-half:]}"


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, EverstateError)
    return answer_of(error, request, request.method)


def answer_of(error: EverstateError, connection: HTTPConnection, method: str) -> Response:
    """The problem response of an error, which is logged where somebody must know of it."""
    status, name = error.http_status, type(error).__name__
    if status >= 500:
        logger.warning("%s %s: %s", method, connection.url.path, error.message)
    if isinstance(error, Unauthenticated):
        client = connection.client.host if connection.client else "?"
        _refused.log("login refused: %s %s from %s", method, connection.url.path, client)
    if isinstance(error, NotPermitted):
        _refused.log("not permitted: %s %s: %s", method, connection.url.path, error.message)
    headers = {}
    if status == 503 or isinstance(error, NotCaughtUp):
        headers["Retry-After"] = _RETRY_AFTER_S
    if isinstance(error, TooManyRequests):
        headers["Retry-After"] = str(math.ceil(error.wait_s))
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
    """Extension members of an error's problem, for programs."""
    if isinstance(error, VersionConflict):
        return {"version": error.actual}
    if isinstance(error, PreconditionFailed | AlreadyExists | Deleted):
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
        known, entity = places(request.app.openapi()), _entity_in(request.url.path)
        if entity is not None and entity not in known:
            return await _ours(request, UnknownEntity(entity, tuple(known)))
        listed = ["GET /"] if entity is None else known[entity]
        detail = f"there is nothing at {request.url.path}; there is {', '.join(listed)}."
        return problem(404, "Not Found", detail)
    detail = f"{request.method} {request.url.path}: {error.detail}."
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request))
        headers = {**{k: v for k, v in headers.items() if k.lower() != "allow"}, "Allow": allowed}
        detail = f"{request.url.path} takes {allowed}, not {request.method}."
    return problem(error.status_code, str(error.detail), detail, headers=headers)


def _allowed(request: Request) -> list[str]:
    """Methods of the path over all its routes; the framework lists only those of one route."""
    only = request.scope.get(ONLY)
    if only is not None:
        return list(only)
    asked = [{**request.scope, "method": method} for method in _METHODS]
    allowed = [
        str(scope["method"])
        for scope in asked
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]
    return ["GET", "HEAD", *allowed[1:]] if allowed[:1] == ["GET"] else allowed


def places(described: Mapping[str, Any]) -> dict[str, list[str]]:
    """Methods and paths of the routes of each entity type, from an OpenAPI document."""
    found: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        entity = _entity_in(path)
        if entity is not None and not entity.startswith("{"):
            methods = " ".join(method.upper() for method in operations)
            found.setdefault(entity, []).append(f"{methods} {path}")
    return found


def _entity_in(path: str) -> str | None:
    """The name of the entity type in `/v1/guest/eva`, `/stream/v1/guest` and their like."""
    if path.startswith(VIEWS):
        return None
    for prefix in PREFIXES:
        path = path.removeprefix(prefix)
    parts = path.split("/")
    return parts[2] if len(parts) > 2 else None


async def _gone(_request: Request, _error: Exception) -> Response:
    """Response that no client reads: the client disconnected before the body was complete."""
    return problem(400, "Bad Request", "the body is incomplete.")


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    # The framework answers such an error outside of the guards.
    headers = secure_headers(request.url.scheme)
    return problem(500, "Internal Server Error", EverstateError.fallback_message, headers=headers)
