"""Between the web framework and the requests of this room: bodies in, answers out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request, Response
from starlette.convertors import Convertor, register_url_convertor

from everstate.changes import Provenance
from everstate.errors import RequestTooLarge
from everstate.sources.crud.answers import JSON, Answer, Incoming, check_length
from everstate.sources.crud.provenance import Callers, provenance_of

T = TypeVar("T")

KEY: Final = "{key:everstate_key}"
"""A part of a path as a key: it may have slashes and newlines (`%2F`, `%0A`), and is not empty."""


class _KeyConvertor(Convertor[str]):
    # With the newline, which a dot leaves out: `$` would find its place in front of a last one.
    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("everstate_key", _KeyConvertor())


class Desk:
    """Reads requests, and has them worked on by at most ``threads`` threads at once.

    The stores wait for their servers, and the event loop must not.
    """

    def __init__(self, callers: Callers, *, body_bytes_max: int, threads: int) -> None:
        self.callers = callers
        self._limit = body_bytes_max
        self._threads = threads
        self._limiter: CapacityLimiter | None = None

    async def read(self, request: Request) -> Incoming:
        """The request with its whole body; raises Unauthenticated and RequestTooLarge."""
        headers = _headers(request)
        caller = self.callers.caller(headers)
        check_length(headers, self._limit)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limit:
                raise RequestTooLarge(self._limit)
        return Incoming(
            method=request.method,
            path=request.url.path,
            headers=headers,
            caller=caller,
            body=bytes(body),
        )

    def provenance_of(self, request: Request) -> Provenance:
        """Provenance of what a request writes; raises Unauthenticated and MissingProvenance."""
        headers, path = _headers(request), request.path_params
        _, version, entity, *_ = request.url.path.split("/")
        caller = self.callers.caller(headers)
        return provenance_of(
            headers, caller, api_version=version, entity=entity, key=path.get("key")
        )

    async def work(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(self._threads)
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)


def _headers(request: Request) -> dict[str, str]:
    """Headers by their names in lower case; one that came several times is one list."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def respond(answer: Answer) -> Response:
    """The framework's response of an answer."""
    if answer.body is None:
        return Response(status_code=answer.status, headers=answer.headers)
    return Response(answer.body, status_code=answer.status, headers=answer.headers, media_type=JSON)
