"""The HTTP application of a project: its entity types' routes, health, OpenAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

import everstate
from everstate.api.access import check_access
from everstate.api.feeding import Feeding
from everstate.api.guards import HeadAsGet, OnlyLocalNames, OnlyOwnPages
from everstate.api.headers import SecureHeaders
from everstate.api.health import Health, health_router
from everstate.api.only_admitted import OnlyAdmitted, noted_in
from everstate.api.problems import PREFIXES, VIEWS, handle_errors, places
from everstate.api.reading import Reading
from everstate.api.reading_router import feed_router, listing_router, past_of, reading_router
from everstate.api.stream_router import subscription_router, view_stream_router
from everstate.api.subscribing import Subscriptions
from everstate.api.view_following import ViewSubscriptions
from everstate.api.view_reading import PLACE, ViewReading
from everstate.api.view_router import view_router
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.config import Config
from everstate.console import WebConsole, wants_page
from everstate.http.answers import HttpAnswer
from everstate.http.asgi import Desk, respond
from everstate.http.callers import Callers
from everstate.http.limits import Limits
from everstate.http.openapi import Schemas
from everstate.sources.crud.openapi import patch_schemas
from everstate.sources.way_in import Serving
from everstate.sources.ways import serve_ways, ways_in


def create_api(config: Config, app: App) -> FastAPI:
    """The ASGI application; it opens its stores and the log, and closes them at shutdown.

    Raises Unavailable when a server does not answer.
    """
    check_access(config.api, app)
    reading = Reading(config, app)
    desk = Desk(
        Callers(config.api),
        body_bytes_max=config.log.message_bytes_max,
        threads=config.api.threads,
        limits=Limits(config.api.requests_per_s, config.api.requests_burst),
    )
    schemas = Schemas(list(app.entities.values()), patch_schemas())
    past, subscriptions = past_of(reading, desk), Subscriptions(config, app)
    served = serve_ways(ways_in(config, app), Serving(desk, schemas, past, reading.find))
    written = {name for each in served for name in each.reads}
    health = Health(config, served)
    views, streams = ViewReading(config, app, reading.views), ViewSubscriptions(config, app)
    feeds = {name: Feeding(config, name, is_open=desk.callers.local) for name in app.entities}

    api = FastAPI(
        title=app.name,
        version=everstate.__version__,
        lifespan=_lifespan(
            desk,
            [each.open for each in served],
            [
                *(each.close for each in reversed(served)),
                *(health.close, subscriptions.close, reading.close),
                *(streams.close, views.close, *(each.close for each in feeds.values())),
            ],
        ),
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
    )
    _guard(api, config.api, is_local=desk.callers.local)
    api.include_router(health_router(health, desk))
    api.include_router(view_router(app, views, desk))
    api.include_router(view_stream_router(app, streams, desk))
    for name, entity_type in app.entities.items():
        read_only = name not in written
        router = reading_router(entity_type, reading, desk, schemas, is_read_only=read_only)
        api.include_router(router)
        api.include_router(listing_router(entity_type, reading, desk))
        api.include_router(subscription_router(name, subscriptions, desk))
        api.include_router(feed_router(entity_type, feeds[name], desk))
    api.include_router(subscription_router(None, subscriptions, desk))
    for each in served:
        for router in each.routers():
            api.include_router(router)

    def end_streams() -> None:
        subscriptions.close()
        streams.close()

    api.state.end_streams = end_streams
    console = WebConsole(config, app, reading.views, desk)
    _add_console(api, console)
    _describe(api, schemas, console)
    return api


def _guard(api: FastAPI, settings: ApiConfig, *, is_local: bool) -> None:
    """What wraps the routes: guards, the innermost first, and answers for errors."""
    handle_errors(api)
    api.add_middleware(OnlyAdmitted, note=noted_in(settings.audit_reads))
    if is_local:
        api.add_middleware(OnlyLocalNames)
    api.add_middleware(OnlyOwnPages)
    api.add_middleware(HeadAsGet)
    api.add_middleware(SecureHeaders, is_local=is_local)


def _lifespan(
    desk: Desk, opening: Sequence[Callable[[], object]], closing: Sequence[Callable[[], object]]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What an application does when it starts and when it ends, each in its order."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            for call in opening:
                await desk.work(call)
            yield
        finally:
            for call in closing:
                await desk.work(call)

    return lifespan


def _add_console(api: FastAPI, console: WebConsole) -> None:
    """Add its pages, and `GET /`: the console for a browser; a list of the routes for programs."""
    api.include_router(console.router())
    overview = console.guarded(console.overview)

    async def root(request: Request) -> Response:
        if wants_page(request):
            return await overview(request)
        console.desk.admit_everyone(request)
        body = {
            "name": api.title,
            "entities": places(api.openapi()),
            "views": PLACE,
            "openapi": _OPENAPI,
            "docs": _DOCS,
            "health": "/health",
            "ready": "/ready",
        }
        headers = {"Vary": "Accept"}
        return respond(HttpAnswer(200, headers, msgspec.json.encode(body).decode()))

    api.add_api_route("/", root, methods=["GET"], include_in_schema=False)


def _describe(api: FastAPI, schemas: Schemas, console: WebConsole) -> None:
    """Make and serve `/openapi.json` from the routes and everstate's schemas; `/docs` shows it."""
    desk = console.desk
    described: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not described:
            made = get_openapi(
                title=api.title, version=api.version, routes=api.routes, description=_WHAT
            )
            components = made.setdefault("components", {})
            found = components.get("schemas", {})
            for name in _UNUSED:
                found.pop(name, None)
            components["schemas"] = dict(sorted({**found, **schemas.components}.items()))
            if not desk.callers.local:
                components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                for path, operations in made["paths"].items():
                    if path.startswith(("/v1/", VIEWS, *(f"{each}/" for each in PREFIXES))):
                        for operation in operations.values():
                            operation["security"] = [{"token": []}]
            described.update(made)
        return described

    async def described_to_everyone(request: Request) -> Response:
        desk.admit_everyone(request)
        return respond(HttpAnswer(200, {}, msgspec.json.encode(api.openapi()).decode()))

    async def shown_to_everyone(request: Request) -> Response:
        desk.admit_everyone(request)
        return console.routes_page(api.openapi())

    api.openapi = openapi  # type: ignore[method-assign]
    api.add_api_route(_DOCS, shown_to_everyone, include_in_schema=False)
    api.add_api_route(_OPENAPI, described_to_everyone, include_in_schema=False)


_OPENAPI = "/openapi.json"
_DOCS: Final = "/docs"
_WHAT = "Every write becomes one change in the log, with its writer and both states of the entity."
_UNUSED: Final = ("HTTPValidationError", "ValidationError")
"""Schemas of the web framework's own errors, which no route answers."""
