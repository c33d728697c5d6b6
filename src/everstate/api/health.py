"""Health routes: whether the process is alive, and whether it is ready to serve requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response

from everstate.config import Config
from everstate.console.fresh import FreshValue
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
    """Asks each way in, and a broker if requests need the log."""

    def __init__(self, config: Config, ways: Sequence[Served]) -> None:
        self._config, self._ways = config, ways
        self._topics: Topics | None = None

    def check(self) -> HttpAnswer:
        """Answer that all are ready, or raise Unavailable naming what is not; one caller at a time.

        Cost: one row of each store and one request to a broker; at most 3 s for the broker.
        """
        for what, check in self._checks():
            try:
                check()
            except EverstateError as error:
                # It names the server in the answer; its own message goes only to the log.
                raise Unavailable(error.message, public=what) from error
        return HttpAnswer(200, {}, '{"status":"ready"}')

    def close(self) -> None:
        """Close the connection to the brokers."""
        if self._topics is not None:
            self._topics.close()
            self._topics = None

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
    # It limits the load of frequent checks on the servers. While one is down, callers wait for one
    # answer and do not occupy request threads.
    checked = FreshValue(lambda: desk.work(health.check), _ANSWER_S)

    async def alive(request: Request) -> Response:
        desk.admit_everyone(request)
        return respond(HttpAnswer(200, {}, '{"status":"alive"}'))

    async def ready(request: Request) -> Response:
        desk.admit_everyone(request)
        answer = await checked.look()
        assert answer is not None, "it waits for one"
        return respond(answer)

    for path, endpoint in (("/health", alive), ("/ready", ready)):
        router.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            operation_id=path[1:],
            responses=answers(200, content={JSON: _STATUS}, secured=False),
        )
    return router
