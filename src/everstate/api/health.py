"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from fastapi import APIRouter, Response

from everstate.config import Config
from everstate.errors import EverstateError, Unavailable
from everstate.log.topics import Topics
from everstate.sources.crud.answers import Answer
from everstate.sources.crud.asgi import Desk, respond
from everstate.sources.crud.events import EventLog
from everstate.sources.crud.openapi import answers
from everstate.sources.crud.store import Store

_LOG_S: Final = 3.0
_ANSWER_S: Final = 1.0
_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}


class Health:
    """Asks each store; and a broker, where requests wait for the log: events and commands.

    ``check_commands`` raises when commands cannot be answered.

    What was found holds for a second: who asks often costs the servers no more than that.
    """

    def __init__(
        self,
        config: Config,
        stores: Mapping[str, Store],
        log: EventLog | None,
        *,
        needs_log: bool,
        check_commands: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._stores, self._log = config, stores, log
        self._needs_log, self._check_commands = needs_log, check_commands
        self._topics: Topics | None = None
        self._asked_at = -_ANSWER_S
        self._found: EverstateError | None = None

    def check(self) -> Answer:
        """Ready, or Unavailable saying what is not; one caller at a time.

        Cost: one row of each store and one question to a broker; at most 3 s for the broker.
        """
        if time.monotonic() - self._asked_at >= _ANSWER_S:
            self._found = self._ask()
            self._asked_at = time.monotonic()
        if self._found is not None:
            raise self._found.with_traceback(None)
        return Answer(200, {}, '{"status":"ready"}')

    def close(self) -> None:
        """Give up the connection to the brokers."""
        if self._topics is not None:
            self._topics.close()
            self._topics = None

    def _ask(self) -> EverstateError | None:
        try:
            for name, store in self._stores.items():
                with _named(f"the store of {name} does not answer."):
                    store.page(limit=1)
            if self._log is not None and not self._log.sending:
                said = "events are not being sent."
                raise Unavailable(said, public=said)
            if self._needs_log:
                with _named("the log does not answer."):
                    self._topics = self._topics or Topics(self._config)
                    self._topics.reach(_LOG_S)
            with _named("commands cannot be answered."):
                self._check_commands()
        except EverstateError as error:
            return error
        return None


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in the answer what is away, and in the log what it said."""
    try:
        yield
    except EverstateError as error:
        raise Unavailable(error.message, public=what) from error


def health_router(health: Health, desk: Desk) -> APIRouter:
    """`GET /health` and `GET /ready`; both without a token."""
    router = APIRouter(tags=["health"])
    # While a server is away, those who ask wait here and hold no thread of the requests.
    one_asks = asyncio.Lock()

    async def alive() -> Response:
        return respond(Answer(200, {}, '{"status":"alive"}'))

    async def ready() -> Response:
        async with one_asks:
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
