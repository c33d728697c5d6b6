"""Adapts the web framework to this package: reads request bodies, makes responses of answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import APIRouter, Request, Response
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import HTTPConnection

from everstate.api_config import Right
from everstate.changes import Provenance
from everstate.errors import EverstateError, RequestTooLarge
from everstate.http.admission import admission_of
from everstate.http.answers import JSON, HttpAnswer, HttpRequest, check_length
from everstate.http.callers import Caller, Callers, provenance_of
from everstate.http.limits import Limits
from everstate.http.openapi import JsonSchema

T = TypeVar("T")
_SMALL_BYTES: Final = 16_384
AnswerPast = Callable[[Request, str, str], Awaitable[Response | None]]
"""Answers a request for a past state of an entity type's key; ``None``: it asks for the present."""

KEY: Final = "{key:everstate_key}"
"""Path parameter for a key: it may have slashes and newlines (`%2F`, `%0A`), and is not empty."""


class _KeyConvertor(Convertor[str]):
    # `.` must match newlines too: otherwise `$` would match before a trailing newline.
    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("everstate_key", _KeyConvertor())


class Desk:
    """Checks callers, reads requests, and runs them in at most ``threads`` threads at once.

    Calls of stores block, and the event loop must not. Every route asks the desk who calls, and
    says what for: the answer of one that did not ask is not sent, see
    :class:`~everstate.api.only_admitted.OnlyAdmitted`.
    """

    def __init__(
        self,
        callers: Callers,
        *,
        body_bytes_max: int,
        threads: int,
        limits: Limits | None = None,
    ) -> None:
        self.callers = callers
        self._limit = body_bytes_max
        self._threads = threads
        self._limits = limits or Limits(None, 1)
        self._limiter: CapacityLimiter | None = None

    async def read(self, request: Request, entity: str, right: Right) -> HttpRequest:
        """The request with its whole body, for a caller who has the right on the entity type.

        Raises Unauthenticated, TooManyRequests, NotPermitted and RequestTooLarge.
        """
        headers = headers_of(request)
        caller = self.admit(request, entity, right)
        check_length(headers, self._limit)
        body = await read_body(request, self._limit)
        return HttpRequest(
            method=request.method,
            path=request.url.path,
            headers=headers,
            caller=caller,
            body=body,
            mask=caller.mask(entity),
        )

    async def answer(
        self, request: Request, entity: str, right: Right, call: Callable[[HttpRequest], HttpAnswer]
    ) -> Response:
        """The answer of a blocking call, for a caller who has the right on the entity type.

        Raises what :meth:`read` and the call raise.
        """
        incoming = await self.read(request, entity, right)
        return respond(await self.work(lambda: call(incoming)))

    def admit(self, connection: HTTPConnection, entity: str, right: Right) -> Caller:
        """Who sends a request or opens a WebSocket, and has the right on the entity type.

        Raises Unauthenticated, TooManyRequests and NotPermitted.
        """
        caller, admission = self.identify(connection), admission_of(connection)
        admission.is_decided = True
        caller.require(entity, right)
        admission.checked.append((entity, right))
        return caller

    def identify(
        self, connection: HTTPConnection, headers: Mapping[str, str] | None = None
    ) -> Caller:
        """The caller of a request, for a route that checks rights later; found at the first call.

        ``headers``: where its token is, if not in its own. Raises Unauthenticated and
        TooManyRequests.
        """
        admission = admission_of(connection)
        if admission.caller is None:
            given = headers_of(connection) if headers is None else headers
            try:
                admission.caller = self.callers.caller(given)
                self._limits.take(admission.caller.name)
            except EverstateError:
                admission.is_decided = True
                raise
        return admission.caller

    def admit_any(self, connection: HTTPConnection) -> Caller:
        """Who sends a request, for a route that shows each caller what is for it.

        Raises Unauthenticated and TooManyRequests.
        """
        caller = self.identify(connection)
        admission_of(connection).is_decided = True
        return caller

    def admit_everyone(self, connection: HTTPConnection) -> None:
        """Let everyone in, to what reveals nothing about any entity."""
        admission = admission_of(connection)
        admission.is_decided = admission.is_open = True

    def provenance_of(self, request: Request) -> Provenance:
        """Provenance of what a request writes to the entity type and the key of its path.

        Raises Unauthenticated, TooManyRequests, NotPermitted and MissingProvenance.
        """
        _, version, entity, *_ = request.url.path.split("/")
        caller = self.admit(request, entity, "write")
        return provenance_of(
            headers_of(request),
            caller,
            api_version=version,
            entity=entity,
            key=request.path_params.get("key"),
        )

    async def work(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(self._threads)
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)


def add_route(
    router: APIRouter,
    method: str,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    *,
    name: str,
    summary: str | None,
    responses: dict[int | str, JsonSchema],
    parameters: Sequence[JsonSchema] = (),
    body: JsonSchema | None = None,
    **more: Any,
) -> None:
    """Add a route with its description; ``name`` is its operation id."""
    router.add_api_route(
        path,
        endpoint,
        methods=[method],
        operation_id=name,
        summary=summary,
        responses=responses,
        openapi_extra={
            **({"parameters": [*parameters]} if parameters else {}),
            **({} if body is None else {"requestBody": body}),
        },
        **more,
    )


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request; raises RequestTooLarge as soon as it has more than ``limit`` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise RequestTooLarge(limit)
    return bytes(body)


async def beside_loop(size: int, call: Callable[[], T]) -> T:
    """Run what reads a body of ``size`` bytes: in a thread, unless the body is small.

    While a large body is validated, the event loop answers nobody else; for a small one a thread
    would cost more than the validation.
    """
    return call() if size <= _SMALL_BYTES else await anyio.to_thread.run_sync(call)


def headers_of(request: HTTPConnection) -> dict[str, str]:
    """Headers by lower-case name; values of a repeated header are joined to one list."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def respond(answer: HttpAnswer) -> Response:
    """The framework's response for an answer."""
    if answer.body is None:
        return Response(status_code=answer.status, headers=answer.headers)
    return Response(answer.body, status_code=answer.status, headers=answer.headers, media_type=JSON)
