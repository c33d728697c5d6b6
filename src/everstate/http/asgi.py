"""Adapts the web framework to this package: reads request bodies, makes responses of answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import HTTPConnection
from starlette.types import Scope

from everstate.api_config import Right
from everstate.changes import Provenance
from everstate.errors import EverstateError, InvalidQuery, RequestTooLarge
from everstate.http import openapi as says
from everstate.http.answers import JSON, HttpAnswer, HttpRequest, Parameters, check_length
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
        caller = self.admit(request, entity, right)
        body = await self.body_of(request)
        return HttpRequest(
            method=request.method,
            path=request.url.path,
            headers=headers_of(request),
            caller=caller,
            body=body,
            sent_path=sent_path_of(request.scope),
            mask=caller.mask(entity),
        )

    async def body_of(self, request: Request) -> bytes:
        """The whole body of a request; raises RequestTooLarge."""
        check_length(headers_of(request), self._limit)
        return await read_body(request, self._limit)

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


class Routes:
    """Routes that OpenAPI lists together, each with its description; all ask one desk."""

    def __init__(
        self, desk: Desk, tag: str, place: str = "", route_class: type[APIRoute] = APIRoute
    ) -> None:
        """``place``: the beginning of their paths."""
        self.router = APIRouter(tags=[tag], route_class=route_class)
        self._desk, self._place = desk, place

    def add(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        name: str,
        summary: str,
        statuses: Sequence[int],
        content: Mapping[str, JsonSchema] | None = None,
        what: str | None = None,
        sent: Mapping[str, Sequence[int]] | None = None,
        sometimes_sent: Mapping[str, Sequence[int]] | None = None,
        parameters: Sequence[JsonSchema] = (),
        body: JsonSchema | None = None,
        **more: Any,
    ) -> None:
        """Add a route.

        ``name``: its operation id. ``content``: schemas of a successful answer by media type, and
        ``what`` says what it is. ``sent``: headers of answers, and the statuses that have them.
        """
        responses = says.answers(*statuses, content=content, secured=not self._desk.callers.local)
        if what is not None:
            responses[200]["description"] = what
        says.add_headers(responses, sent or {}, required=True)
        says.add_headers(responses, sometimes_sent or {})
        self.router.add_api_route(
            f"{self._place}{path}",
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

    def write(
        self,
        method: str,
        path: str,
        call: Callable[..., HttpAnswer],
        *,
        entity: str,
        **described: Any,
    ) -> None:
        """Add a route that writes to an entity type; the call gets the request, and the key."""

        async def endpoint(request: Request) -> Response:
            written = partial(call, **request.path_params)
            return await self._desk.answer(request, entity, "write", written)

        self.add(method, path, endpoint, **described)

    def ask(
        self,
        path: str,
        call: Callable[..., HttpAnswer],
        *own: JsonSchema,
        read: Callable[[Request], Awaitable[HttpRequest]],
        method: str = "GET",
        before: Sequence[JsonSchema] = (),
        after: Sequence[JsonSchema] = (),
        bound: Mapping[str, str] | None = None,
        **described: Any,
    ) -> None:
        """Add a route that answers a question.

        ``read`` checks who asks. The call gets the request, the parameters of its query and, by
        name, what is ``bound`` and the parts of its path. A parameter that is not described, among
        its ``own`` ones or those ``before`` and ``after`` them, is refused.
        """
        parameters = [*before, *own, *after]
        known, bound = names_of(parameters), bound or {}

        async def endpoint(request: Request) -> Response:
            incoming = await read(request)
            given = parameters_of(request, known)
            asked = partial(call, incoming, given, **bound, **request.path_params)
            return respond(await self._desk.work(asked))

        self.add(method, path, endpoint, parameters=parameters, **described)


def names_of(parameters: Iterable[JsonSchema]) -> tuple[str, ...]:
    """Names of the described parameters that are in the query."""
    return tuple(each["name"] for each in parameters if each["in"] == "query")


def parameters_of(request: HTTPConnection, known: Sequence[str]) -> Parameters:
    """Parameters of the query.

    Raises InvalidQuery for one that is given twice, or that is not among those of the route.
    """
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in found:
            raise InvalidQuery(f"{name} is given twice.")
        found[name] = value
    for name in found:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise InvalidQuery(f"there is no parameter {name!r}.", advice=f"There are: {listed}.")
    return found


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


def sent_path_of(scope: Scope) -> bytes:
    """The path of a request as it was sent, if the server tells it."""
    return bytes(scope.get("raw_path") or scope["path"].encode())


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


ADMISSION: Final = "everstate.admission"
"""In a request's scope: its :class:`Admission`."""


@dataclass(slots=True)
class Admission:
    """What was checked before a request is answered."""

    caller: Caller | None = None
    """Who asks, when that is known."""
    checked: list[tuple[str, Right]] = field(default_factory=list)
    """Entity types and the rights that the caller was found to have on them."""
    is_decided: bool = False
    """Whether a route has asked the desk; if that refused, the answer is the refusal."""
    is_open: bool = False
    """Whether the route is for everyone."""


def admission_of(connection: HTTPConnection) -> Admission:
    """What is known of a request so far."""
    found = connection.scope.setdefault(ADMISSION, Admission())
    assert isinstance(found, Admission)
    return found
