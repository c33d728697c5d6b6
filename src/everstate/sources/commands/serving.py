"""The routes of commands, with a client that lives as long as the API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter

from everstate.config import Config
from everstate.errors import Unavailable
from everstate.http.asgi import Desk
from everstate.sources.commands.client import CommandClient
from everstate.sources.commands.router import router
from everstate.sources.way_in import ReadinessCheck, Served
from everstate.views.project import Project

_CLOSED: Final = "commands are not accepted yet, or no longer."


class ServedCommands(Served):
    """One route for each command of each entity type."""

    needs_log = True

    def __init__(self, config: Config, app: Project, desk: Desk) -> None:
        self._config, self._app, self._desk = config, app, desk
        self._client: CommandClient | None = None

    def open(self) -> None:
        """Connect the client."""
        self._client = CommandClient(self._config, self._app)

    def close(self) -> None:
        """Close the client; requests are refused from now on."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def checks(self) -> Iterable[ReadinessCheck]:
        """Whether commands can be answered."""
        yield "commands cannot be answered.", lambda: self._opened().check()

    def routers(self) -> Iterable[APIRouter]:
        """One router for all."""
        yield router(
            self._app,
            self._opened,
            self._desk.provenance_of,
            mask_of=lambda request, entity: self._desk.identify(request).mask(entity),
            body_bytes_max=self._config.log.message_bytes_max,
        )

    def _opened(self) -> CommandClient:
        if self._client is None:
            raise Unavailable(_CLOSED, public=_CLOSED)
        return self._client
