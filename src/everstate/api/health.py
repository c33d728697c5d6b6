"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Response

from everstate.errors import Unavailable
from everstate.sources.crud.answers import Answer
from everstate.sources.crud.asgi import Desk, respond
from everstate.sources.crud.events import EventLog
from everstate.sources.crud.openapi import answers
from everstate.sources.crud.store import Store

_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}


class Health:
    """Asks each store, and whether events are being sent."""

    def __init__(self, stores: Mapping[str, Store], log: EventLog | None) -> None:
        self._stores, self._log = stores, log

    def check(self) -> Answer:
        """Ready, or Unavailable saying what is not. Cost: one row of each store."""
        for store in self._stores.values():
            store.page(limit=1)
        if self._log is not None and not self._log.sending:
            raise Unavailable("events are not being sent.")
        return Answer(200, {}, '{"status":"ready"}')


def health_router(health: Health, desk: Desk) -> APIRouter:
    """`GET /health` and `GET /ready`; both without a token."""
    router = APIRouter(tags=["health"])

    async def alive() -> Response:
        return respond(Answer(200, {}, '{"status":"alive"}'))

    async def ready() -> Response:
        return respond(await desk.work(health.check))

    for path, endpoint in (("/health", alive), ("/ready", ready)):
        router.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            operation_id=path[1:],
            responses=answers(200, schema=_STATUS, secured=False),
        )
    return router
