"""Everything of views that an application has: their routes, and what these keep open."""

from __future__ import annotations

from fastapi import APIRouter

from everstate.api.view_following import ViewSubscriptions
from everstate.api.view_reading import ViewReading
from everstate.api.view_router import view_router
from everstate.api.view_stream_router import view_stream_router
from everstate.app import App
from everstate.config import Config
from everstate.http.asgi import Desk
from everstate.serving.reader_pool import ReaderPool


class ViewRoutes:
    """The routes of the views of a project."""

    def __init__(self, config: Config, app: App, readers: ReaderPool, desk: Desk) -> None:
        self._app, self._desk = app, desk
        self._reading = ViewReading(config, app, readers)
        self._subscriptions = ViewSubscriptions(config, app)

    def routes(self) -> APIRouter:
        """Their routes."""
        router = APIRouter()
        router.include_router(view_router(self._app, self._reading, self._desk))
        router.include_router(view_stream_router(self._app, self._subscriptions, self._desk))
        return router

    def end_streams(self) -> None:
        """End all subscriptions; their subscribers get an event that says so."""
        self._subscriptions.close()

    def close(self) -> None:
        """End what is left, and close the connections; no question may be open."""
        self._subscriptions.close()
        self._reading.close()
