"""The HTTP application of a project: its entity types' routes, health, OpenAPI."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

import everstate
from everstate.api.commands import COMMAND_SCHEMAS, CommandDesk
from everstate.api.guards import HeadAsGet, OnlyLocalNames
from everstate.api.health import Health, health_router
from everstate.api.latest import Latest
from everstate.api.problems import handle_errors, places
from everstate.api.stores import close_stores, open_stores
from everstate.app import App
from everstate.config import Config
from everstate.sources.crud.answers import Answer
from everstate.sources.crud.asgi import Desk, respond
from everstate.sources.crud.event_router import event_router
from everstate.sources.crud.events import EventLog
from everstate.sources.crud.openapi import Schemas
from everstate.sources.crud.provenance import Callers
from everstate.sources.crud.resource import Resource
from everstate.sources.crud.router import entity_router
from everstate.sources.crud.store import Store


def create_api(config: Config, app: App, stores: Mapping[str, Store] | None = None) -> FastAPI:
    """The ASGI application; it opens its stores and the log, and closes them when it ends.

    ``stores`` are the caller's own, by entity type, and stay open. Raises Unavailable when a
    server does not answer.
    """
    opened = open_stores(config, app) if stores is None else {}
    used = opened if stores is None else stores
    events = app.entities_from("log")
    log, latest = EventLog(config, events), Latest(config, app)
    desk = Desk(
        Callers(config.api),
        body_bytes_max=config.log.message_bytes_max,
        threads=config.api.threads,
    )
    commands = CommandDesk(config, app, desk.callers)
    needs_log = bool(events or app.command_groups)
    health = Health(
        config,
        used,
        log if events else None,
        needs_log=needs_log,
        check_commands=commands.check,
    )
    schemas = Schemas([*(store.entity_type for store in used.values()), *events])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            if events:
                await desk.work(log.open)
            await desk.work(commands.open)
            yield
        finally:
            await desk.work(commands.close)
            await desk.work(log.close)
            health.close()
            latest.close()
            close_stores(opened)

    api = FastAPI(
        title=app.name,
        version=everstate.__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    handle_errors(api)
    if desk.callers.local:
        api.add_middleware(OnlyLocalNames)
    api.add_middleware(HeadAsGet)
    api.include_router(health_router(health, desk))
    api.include_router(commands.routes())
    for store in used.values():
        resource = Resource(
            store,
            page_max=config.api.page_max,
            message_bytes_max=config.log.message_bytes_max,
        )
        api.include_router(entity_router(resource, desk, schemas))
    for entity_type in events:
        api.include_router(event_router(entity_type, log, desk, schemas, latest.find))
    _list_what_there_is(api)
    _describe(api, schemas, secured=not desk.callers.local)
    return api


def _list_what_there_is(api: FastAPI) -> None:
    """Add `GET /`: where to look next."""

    async def listed() -> Response:
        body = {
            "name": api.title,
            "entities": places(api.openapi()),
            "openapi": "/openapi.json",
            "health": "/health",
            "ready": "/ready",
        }
        return respond(Answer(200, {}, msgspec.json.encode(body).decode()))

    api.add_api_route("/", listed, methods=["GET"], include_in_schema=False)


def _describe(api: FastAPI, schemas: Schemas, *, secured: bool) -> None:
    """Make `/openapi.json` out of the routes and our own schemas."""
    described: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not described:
            made = get_openapi(
                title=api.title, version=api.version, routes=api.routes, description=_WHAT
            )
            components = made.setdefault("components", {})
            answers = {
                name: each
                for name, each in components.get("schemas", {}).items()
                if name in COMMAND_SCHEMAS
            }
            components["schemas"] = dict(sorted({**answers, **schemas.components}.items()))
            if secured:
                components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                _secure(made["paths"])
            described.update(made)
        return described

    api.openapi = openapi  # type: ignore[method-assign]


def _secure(paths: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    for path, operations in paths.items():
        if path.startswith("/v1/"):
            for operation in operations.values():
                operation["security"] = [{"token": []}]


_WHAT = "Every write is one change in the log: who made it, the whole entity after and before."
