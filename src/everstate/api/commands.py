"""Commands over HTTP: a client that lives as long as the application, and its routes."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request

from everstate.app import App
from everstate.changes import Provenance
from everstate.config import Config
from everstate.errors import Unavailable
from everstate.sources.commands.answer import Answer
from everstate.sources.commands.client import CommandClient
from everstate.sources.commands.router import router
from everstate.sources.crud.provenance import Callers, provenance_of

COMMAND_SCHEMAS: Final = ("CommandAnswered", "CommandProblem")
"""Schemas of the answers, by their names in the OpenAPI document."""

_VERSION: Final = "v1"
_CLOSED: Final = "commands are not taken yet, or no longer."


class CommandDesk:
    """Sends commands for requests; opens its client when the application starts."""

    def __init__(self, config: Config, app: App, callers: Callers) -> None:
        self._config, self._app, self._callers = config, app, callers
        self._client: CommandClient | None = None

    def open(self) -> None:
        """Connect; nothing when no entity type takes commands."""
        if self._app.command_groups:
            self._client = CommandClient(self._config, self._app)

    def close(self) -> None:
        """Give up the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def check(self) -> None:
        """Raise an error of ours when commands cannot be answered now."""
        if self._app.command_groups:
            if self._client is None:
                raise Unavailable(_CLOSED, public=_CLOSED)
            self._client.check()

    def routes(self) -> APIRouter:
        """One route for each command of each entity type."""
        limit = self._config.log.message_bytes_max
        return router(self._app, self, self._provenance, body_bytes_max=limit)

    async def send_async(self, *arguments: Any, **more: Any) -> Answer:
        """As :meth:`CommandClient.send_async`; raises Unavailable while it is not open."""
        if self._client is None:
            raise Unavailable(_CLOSED, public=_CLOSED)
        return await self._client.send_async(*arguments, **more)

    def _provenance(self, request: Request) -> Provenance:
        headers, entity = request.headers, request.url.path.split("/")[2]
        caller, key = self._callers.caller(headers), request.path_params["key"]
        return provenance_of(headers, caller, api_version=_VERSION, entity=entity, key=key)
