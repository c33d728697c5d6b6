"""Every route × every right × every entity type: who is let in, and who is not.

The routes are those of the application, so that a new one that is not in ``NEEDS`` fails here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import BaseRoute
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from callers import caller_entry
from everstate.api.application import create_api
from everstate.api_config import ApiConfig, Right
from everstate.app import App
from everstate.config import Config
from kit.models import declare_bell, declare_visit
from kit.serving import serving
from running_stack import RunningStack

RIGHTS: tuple[Right, ...] = get_args(Right)
Scope = Literal["entity", "all types", "any caller", "everyone"]


class Need(NamedTuple):
    """The rights that a route needs, and on what."""

    rights: tuple[Right, ...]
    scope: Scope


ENTITY_READ, ENTITY_WRITE = Need(("read",), "entity"), Need(("write",), "entity")
OPERATE = Need(("operate",), "all types")
SEVERAL = Need(("read",), "all types")
DEAD = Need(("operate", "read"), "all types")
ANY, EVERYONE = Need((), "any caller"), Need((), "everyone")

NEEDS: dict[tuple[str, str], Need] = {
    ("GET", "/"): EVERYONE,
    ("GET", "/health"): EVERYONE,
    ("GET", "/ready"): EVERYONE,
    ("GET", "/openapi.json"): EVERYONE,
    ("GET", "/docs"): EVERYONE,
    ("GET", "/console/-/static/{name}"): EVERYONE,
    ("POST", "/console/-/login"): EVERYONE,
    ("POST", "/console/-/logout"): EVERYONE,
    ("GET", "/console"): ANY,
    ("GET", "/console/-/views"): ANY,
    ("GET", "/console/-/overview"): OPERATE,
    ("GET", "/console/-/log"): OPERATE,
    ("GET", "/console/-/dead"): DEAD,
    ("GET", "/console/-/dead/reason"): DEAD,
    ("GET", "/console/-/dead/letter"): DEAD,
    ("GET", "/console/-/handlers"): DEAD,
    ("GET", "/console/-/sources"): OPERATE,
    ("GET", "/console/-/views/{name}"): ENTITY_READ,
    ("GET", "/console/{entity}"): ENTITY_READ,
    ("GET", "/console/{entity}/{key}"): ENTITY_READ,
    ("POST", "/v1/{entity}"): ENTITY_WRITE,
    ("GET", "/v1/{entity}"): ENTITY_READ,
    ("GET", "/v1/{entity}/{key}"): ENTITY_READ,
    ("PUT", "/v1/{entity}/{key}"): ENTITY_WRITE,
    ("PATCH", "/v1/{entity}/{key}"): ENTITY_WRITE,
    ("DELETE", "/v1/{entity}/{key}"): ENTITY_WRITE,
    ("POST", "/v1/{entity}/{key}/commands/Ring"): ENTITY_WRITE,
    ("GET", "/v1/{entity}/{key}/history"): ENTITY_READ,
    ("GET", "/v1/{entity}/{key}/diff"): ENTITY_READ,
    ("GET", "/v1/{entity}/{key}/explain"): ENTITY_READ,
    ("GET", "/v1/{entity}/{key}/explain/{field}"): ENTITY_READ,
    ("GET", "/v1/{entity}/{key}/provenance"): ENTITY_READ,
    ("GET", "/query/v1/{entity}"): ENTITY_READ,
    ("POST", "/query/v1/{entity}/keys"): ENTITY_READ,
    ("GET", "/query/v1/{entity}/deleted"): ENTITY_READ,
    ("GET", "/query/v1/{entity}/changes"): ENTITY_READ,
    ("GET", "/feed/v1/{entity}"): ENTITY_READ,
    ("GET", "/feed/v1/{entity}/{feed}"): ENTITY_READ,
    ("GET", "/feed/v1/{entity}/{feed}/{page}"): ENTITY_READ,
    ("GET", "/feed/v1/{entities}"): SEVERAL,
    ("GET", "/stream/v1/{entities}"): SEVERAL,
    ("WebSocket", "/stream/v1/{entities}"): SEVERAL,
    ("GET", "/stream/v1/{entity}"): ENTITY_READ,
    ("WebSocket", "/stream/v1/{entity}"): ENTITY_READ,
    ("GET", "/views/v1"): ANY,
    ("GET", "/views/v1/{view}"): ENTITY_READ,
    ("GET", "/views/v1/{view}/rows/{key}"): ENTITY_READ,
    ("GET", "/views/v1/{view}/stream"): ENTITY_READ,
    ("WebSocket", "/views/v1/{view}/stream"): ENTITY_READ,
}

app = App("hotel")


@app.entity("guest", key="id")
class Guest(BaseModel):
    id: str
    name: str


declare_visit(app)
declare_bell(app)
TYPES = tuple(app.entities)


class Asked(NamedTuple):
    """One route, as it is asked."""

    method: str
    template: str
    """Its path, with `{entity}` for the name of an entity type."""
    entity: str | None
    path: str


def each_route(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """The routes of an application, also of the routers that it includes."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from each_route(included.routes)


@contextmanager
def made(config: Config, app: App) -> Iterator[FastAPI]:
    """An application that is looked at, and not served."""
    api = create_api(config, app)
    try:
        yield api
    finally:
        asyncio.run(_ended(api))


async def _ended(api: FastAPI) -> None:
    """Close what an application has opened."""
    async with api.router.lifespan_context(api):
        pass


def asked(routes: Iterable[BaseRoute], types: Sequence[str] = TYPES) -> Iterator[Asked]:
    """Every route of an application; one with `{entity}` in it for each entity type."""
    for route in each_route(routes):
        path: str = getattr(route, "path_format", None) or route.path  # type: ignore[attr-defined]
        for method in sorted(getattr(route, "methods", None) or ["WebSocket"]):
            parts = path.split("/")
            named = [name for name in types if name in parts]
            template = "/".join("{entity}" if part in named else part for part in parts)
            if named:
                yield Asked(method, template, named[0], _filled(path))
            elif "{entity}" in path or "/views/{name}" in path or "{view}" in path:
                for name in types:
                    view = path.replace("{entity}", name).replace("{name}", f"{name}_latest")
                    view = view.replace("{view}", name)
                    yield Asked(method, template, name, _filled(view))
            else:
                yield Asked(method, template, None, _filled(path))


def _filled(path: str) -> str:
    values = {"key": "k1", "field": "name", "feed": f"{'0' * 16}-0", "page": "0", "name": "x.css"}
    return path.format(**values, entities="guest,visit")


def unknown_routes(api: FastAPI) -> list[str]:
    """Routes of an application that the table does not have."""
    routes = asked(api.routes)
    return sorted({f"{m} {t}" for m, t, _, _ in routes if (m, t) not in NEEDS})


class Somebody(NamedTuple):
    """A caller who has rights on one entity type, or on all of them (`*`)."""

    on: str
    rights: tuple[Right, ...]

    @property
    def token(self) -> str:
        return f"token of {self.on} {self.rights}"

    def is_let_in(self, need: Need, entity: str | None) -> bool:
        """What the answer must be."""
        if need.scope in ("everyone", "any caller"):
            return True
        if not {*need.rights} <= {*self.rights}:
            return False
        return self.on == "*" or (need.scope == "entity" and self.on == entity)


PEOPLE = [
    *(Somebody(on, (right,)) for on in ("*", *TYPES) for right in RIGHTS),
    Somebody("*", ("read", "operate")),
]


@pytest.fixture
def secured(stack: RunningStack, database: str, topic_prefix: str, tmp_path: Path) -> Config:
    tokens = {
        f"{number}": caller_entry(each.token, permissions={each.on: each.rights})
        for number, each in enumerate(PEOPLE)
    }
    given = stack.config
    return given.model_copy(
        update={
            "store": given.store.model_copy(update={"dsn": database}),
            "log": given.log.model_copy(update={"prefix": topic_prefix}),
            "archive": given.archive.model_copy(update={"path": str(tmp_path / "lake")}),
            "api": ApiConfig(tokens=tokens),
        }
    )


def status_of(client: httpx.Client, route: Asked, token: str | None) -> int:
    """The status with which a request is answered, of a stream without its events."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if route.method == "WebSocket":
        address = f"{str(client.base_url).rstrip('/')}{route.path}".replace("http", "ws", 1)
        try:
            with connect(address, additional_headers=headers, proxy=None, close_timeout=1):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code
    content = None if route.method in ("GET", "DELETE") else b"{}"
    if route.path.endswith("/login"):
        content = f"token={PEOPLE[0].token}".encode()
    with client.stream(route.method, route.path, headers=headers, content=content) as answer:
        return answer.status_code


@pytest.mark.timeout(600)
def test_every_route_lets_in_who_has_its_right_and_nobody_else(secured: Config) -> None:
    wrong, count = [], 0
    with (
        serving(secured, app) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        with made(secured, app) as api:
            routes = list(asked(api.routes))
        for route in routes:
            need = NEEDS[route.method, route.template]
            without = status_of(client, route, None)
            if (without == 401) == (need.scope == "everyone"):
                wrong.append(f"{route.method} {route.path} without a token: {without}")
            for each in PEOPLE:
                status = status_of(client, route, each.token)
                count += 1
                is_let_in = each.is_let_in(need, route.entity)
                if status == 401 or (status != 403) != is_let_in:
                    wrong.append(f"{route.method} {route.path}, {each}: {status}")
    assert wrong == []
    assert count > 1_000
    assert {(each.method, each.template) for each in routes} == NEEDS.keys()


def test_a_route_that_is_not_in_the_table_is_noticed(secured: Config) -> None:
    def later() -> None:
        """A route that somebody adds."""

    with made(secured, app) as api:
        assert unknown_routes(api) == []
        api.add_api_route("/v1/guest/{key}/secrets", later, methods=["GET"])
        assert unknown_routes(api) == ["GET /v1/{entity}/{key}/secrets"]


def problem(address: str, path: str, token: str, **more: Any) -> dict[str, Any]:
    """The problem with which a request is refused."""
    headers = {"Authorization": f"Bearer {token}"}
    answer = httpx.get(f"{address}{path}", headers=headers, **more)
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    return found


def test_a_refusal_names_what_is_missing(secured: Config) -> None:
    writer = Somebody("guest", ("write",)).token
    with serving(secured, app) as address:
        refused = problem(address, "/v1/guest/k1", writer)
        assert refused["status"] == 403
        assert refused["type"] == "urn:everstate:error:NotPermitted"
        assert "it lacks `read` on guest" in refused["detail"]


def test_the_console_shows_each_caller_what_is_for_it(secured: Config) -> None:
    def headers(who: Somebody) -> dict[str, str]:
        return {"Authorization": f"Bearer {who.token}", "Accept": "text/html"}

    reader = headers(Somebody("guest", ("read",)))
    with serving(secured, app) as address, httpx.Client(base_url=address, timeout=60) as client:
        listed = client.get("/console", headers=reader).text
        assert "/console/guest" in listed
        assert "/console/visit" not in listed
        first = client.get("/", headers=reader)
        assert (first.status_code, first.headers["location"]) == (303, "/console")
        assert client.get("/", headers=headers(Somebody("*", ("operate",)))).status_code == 200
        refused = client.get("/console/visit", headers=reader)
        assert refused.status_code == 403
        assert "it lacks <code>read</code> on visit" in refused.text
