"""Health routes: whether the process is alive, and whether it is ready to serve requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response

from everstate.config import Config
from everstate.errors import EverstateError, Unavailable
from everstate.http.answers import JSON, HttpAnswer
from everstate.http.asgi import Desk, respond
from everstate.http.openapi import answers
from everstate.log.topics import Topics
from everstate.sources.way_in import ReadinessCheck, Served

_LOG_S: Final = 3.0
_ANSWER_S: Final = 1.0
_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}


class Health:
    """Asks each way in, and a broker if requests need the log.

    A result is cached for a second, which limits the load of frequent checks on the servers.
    """

    def __init__(self, config: Config, ways: Sequence[Served]) -> None:
        self._config, self._ways = config, ways
        self._topics: Topics | None = None
        self._asked_at = -_ANSWER_S
        self._found: EverstateError | None = None

    def check(self) -> HttpAnswer:
        """Answer that all are ready, or raise Unavailable naming what is not; one caller at a time.

        Cost: one row of each store and one request to a broker; at most 3 s for the broker.
        """
        if time.monotonic() - self._asked_at >= _ANSWER_S:
            self._found = self._ask()
            self._asked_at = time.monotonic()
        if self._found is not None:
            raise self._found.with_traceback(None)
        return HttpAnswer(200, {}, '{"status":"ready"}')

    def close(self) -> None:
        """Close the connection to the brokers."""
        if self._topics is not None:
            self._topics.close()
            self._topics = None

    def _ask(self) -> EverstateError | None:
        for what, check in self._checks():
            try:
                check()
            except EverstateError as error:
                # It names the server in the answer; its own message goes only to the log.
                return Unavailable(error.message, public=what)
        return None

    def _checks(self) -> Iterator[ReadinessCheck]:
        asked = False
        for served in self._ways:
            if served.needs_log and not asked:
                asked = True
                yield "the log does not answer.", self._reach
            yield from served.checks()

    def _reach(self) -> None:
        self._topics = self._topics or Topics(self._config)
        self._topics.reach(_LOG_S)


def health_router(health: Health, desk: Desk) -> APIRouter:
    """`GET /health` and `GET /ready`; both without a token."""
    router = APIRouter(tags=["health"])
    # While a server is down, callers wait here and do not occupy request threads.
    one_asks = asyncio.Lock()

    async def alive(request: Request) -> Response:
        desk.admit_everyone(request)
        return respond(HttpAnswer(200, {}, '{"status":"alive"}'))

    async def ready(request: Request) -> Response:
        desk.admit_everyone(request)
        async with one_asks:
            return respond(await desk.work(health.check))

    for path, endpoint in (("/health", alive), ("/ready", ready)):
        router.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            operation_id=path[1:],
            responses=answers(200, content={JSON: _STATUS}, secured=False),
        )
    return router
