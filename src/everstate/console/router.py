"""Routes of the console: each answers a page, or the part of it that the script asks for."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response

from everstate.app import App
from everstate.attention.looking import Looking
from everstate.config import Config
from everstate.console import access, dead, entities, servers, views
from everstate.console.fresh import FreshValue
from everstate.console.overview import overview
from everstate.console.pages import PLACE, ROOT, Pages, entity_url
from everstate.console.routes import described_routes
from everstate.console.servers import naming_server
from everstate.errors import EverstateError, Unauthenticated, Unavailable
from everstate.http.asgi import KEY, Desk, read_body
from everstate.http.callers import EVERY
from everstate.serving import Reader
from everstate.serving.masking import Masks, entities_read_by, no_masks
from everstate.serving.words import explanation_lines
from everstate.telemetry import RateLimitedLogger

_FORM_BYTES_MAX: Final = 8_192
_STATIC_S: Final = 86_400
_WAIT_S: Final = 3.0
"""How long a page waits for facts of all servers; then it shows what is known, and asks again."""
_LOOK_S: Final = 60.0
"""How long a program waits for them."""
_SOURCES: Final = {
    "store": "PostgreSQL, written by requests or by services through the outbox",
    "cassandra": "Cassandra",
    "commands": "the log, written by commands",
    "log": "the log, written as events",
    "capture": "another system's database, which is captured",
}
_refused: Final = RateLimitedLogger(logging.getLogger("everstate.api"), logging.WARNING)
_Answer = Callable[[Request], Awaitable[Response]]


def wants_page(request: Request) -> bool:
    """Whether a request for `/` is a browser's, which takes HTML, and not a program's."""
    return "text/html" in request.headers.get("accept", "")


class WebConsole:
    """The pages of one project; no route changes anything but the browser's own cookie."""

    def __init__(self, config: Config, app: App, reader: Reader, desk: Desk) -> None:
        self._config, self._app = config, app
        self._reader, self.desk = reader, desk
        look = partial(overview, Looking(config, app, reader), config, app)
        self._overview = FreshValue(lambda: desk.work(look))
        self._dead = FreshValue(lambda: desk.work(partial(dead.reasons, config)))
        self._sources = FreshValue(lambda: desk.work(partial(servers.captures, config, app)))
        self._handlers = FreshValue(lambda: desk.work(partial(servers.handlers, config, app)))
        self._kept = FreshValue(lambda: self._read(no_masks, views.views_page))
        self._topics = FreshValue(lambda: self._read(no_masks, servers.log_page, app))
        self._pages = Pages(app.name, has_login=not desk.callers.local)
        self._kinds = [(name, _SOURCES[app.source_of(name)]) for name in app.entities]

    def router(self) -> APIRouter:
        """The routes; those of entity types come last, because they match any path."""
        made = APIRouter(include_in_schema=False)
        made.add_api_route(f"{PLACE}/static/{{name}}", self._static, methods=["GET"])
        if not self.desk.callers.local:
            made.add_api_route(f"{PLACE}/login", self._login, methods=["POST"])
            made.add_api_route(f"{PLACE}/logout", self._logout, methods=["POST"])
        for path, answer in (
            (f"{PLACE}/overview", self.overview),
            (f"{PLACE}/views", self._views),
            (f"{PLACE}/views/{{name}}", self._view),
            (f"{PLACE}/log", self._log),
            (f"{PLACE}/dead", self._dead_reasons),
            (f"{PLACE}/dead/reason", self._dead_letters),
            (f"{PLACE}/dead/letter", self._dead_letter),
            (f"{PLACE}/handlers", self._failed_changes),
            (f"{PLACE}/sources", self._captures),
            (ROOT, self._entities),
            (f"{ROOT}/{{entity}}", self._keys),
            (f"{ROOT}/{{entity}}/{KEY}", self._entity),
        ):
            made.add_api_route(path, self.guarded(answer), methods=["GET"])
        return made

    def guarded(self, answer: _Answer) -> _Answer:
        """A route for callers only, whose errors are pages."""

        async def guarded(request: Request) -> Response:
            part = "part" in request.query_params
            try:
                self.desk.identify(request, access.headers_of_page(request))
                return await answer(request)
            except Unauthenticated:
                tried = access.COOKIE in request.cookies
                return self._ask_for_token(access.address_of(request), tried=tried)
            except EverstateError as error:
                return self._pages.error(error, part=part)

        return guarded

    def routes_page(self, openapi: Mapping[str, Any]) -> Response:
        """The page of the API's routes and schemas."""
        groups, schemas = described_routes(openapi), openapi["components"]["schemas"]
        return self._pages.page("routes.html", groups=groups, schemas=schemas)

    async def overview(self, request: Request) -> Response:
        """The first page; a part of it when the script asks for that; or its conditions as JSON.

        Who may not see it is led to the entities.
        """
        if request.url.path == "/" and not self.desk.identify(request).may(EVERY, "operate"):
            self.desk.admit_any(request)
            return self._pages.redirect(ROOT)
        self.desk.admit(request, EVERY, "operate")
        if request.query_params.get("format") == "json":
            found = await self._overview.look(_LOOK_S)
            if found is None:
                said = "the servers did not answer in time."
                raise Unavailable(said, public=said)
            return self._pages.json(found.as_json())
        entities = tuple(self._app.entities)
        return await self._fresh(request, "overview", self._overview, entities=entities)

    async def _fresh(
        self,
        request: Request,
        name: str,
        value: FreshValue[Any],
        shown: Callable[[Any], Any] = lambda found: found,
        **facts: Any,
    ) -> Response:
        """A page about a value that is asked once for all pages, or its part that changes.

        ``shown``: what this caller sees of the value.
        """
        found = await value.look(_WAIT_S)
        found = None if found is None else shown(found)
        template = f"{name}_part.html" if "part" in request.query_params else f"{name}.html"
        return self._pages.page(template, found=found, age_s=value.age_s, **facts)

    async def _views(self, request: Request) -> Response:
        caller = self.desk.admit_any(request)
        shown = partial(views.shown_to, project=self._app, caller=caller)
        return await self._fresh(request, "views", self._kept, shown)

    async def _view(self, request: Request) -> Response:
        given, name = dict(request.query_params), request.path_params["name"]
        for entity in entities_read_by(self._app, name):
            self.desk.admit(request, entity, "read")
        kept = await self._kept.look(_WAIT_S)
        versions = None if kept is None else kept.of(name)
        page = await self._read(self._masks(request), views.rows_page, name, versions, given)
        return self._pages.page("view.html", page=page, age_s=self._kept.age_s)

    async def _log(self, request: Request) -> Response:
        self.desk.admit(request, EVERY, "operate")
        return await self._fresh(request, "log", self._topics)

    async def _dead_reasons(self, request: Request) -> Response:
        self._admit_to_dead(request, EVERY)
        return await self._fresh(request, "dead", self._dead, most=dead.REASONS_MAX)

    async def _dead_letters(self, request: Request) -> Response:
        given = dict(request.query_params)
        self._admit_to_dead(request, given.get("entity") or EVERY)
        entity, reason, found = await self.desk.work(partial(dead.letters, self._config, given))
        return self._pages.page(
            "dead_reason.html", named=entity, reason=reason, found=found, most=dead.LETTERS_MAX
        )

    async def _dead_letter(self, request: Request) -> Response:
        given = dict(request.query_params)
        self._admit_to_dead(request, given.get("entity") or EVERY)
        found = await self.desk.work(partial(dead.letter, self._config, given))
        parts = (("Key", dead.content_of(found.key)), ("Value", dead.content_of(found.value)))
        return self._pages.page("dead_letter.html", letter=found, parts=parts)

    def _admit_to_dead(self, request: Request, entity: str) -> None:
        """A rejected record or change, and its reason, may have the value of any field."""
        caller = self.desk.admit(request, entity, "operate")
        caller.require(entity, "read")
        for each in self._app.entities if entity == EVERY else (entity,):
            caller.mask(each).refuse_all("what was rejected")

    async def _failed_changes(self, request: Request) -> Response:
        self._admit_to_dead(request, EVERY)
        return await self._fresh(request, "handlers", self._handlers)

    async def _captures(self, request: Request) -> Response:
        self.desk.admit(request, EVERY, "operate")
        return await self._fresh(request, "sources", self._sources, kinds=self._kinds)

    async def _entities(self, request: Request) -> Response:
        caller = self.desk.admit_any(request)
        kinds = [(name, source) for name, source in self._kinds if caller.may(name, "read")]
        return self._pages.page("entities.html", kinds=kinds)

    async def _entity(self, request: Request) -> Response:
        entity, key = request.path_params["entity"], request.path_params["key"]
        self.desk.admit(request, entity, "read")
        return await self._one(request, entity, key)

    async def _one(self, request: Request, entity: str, key: str) -> Response:
        """What a request asks of one entity: a page, a part, an explanation, or JSON."""
        given, masks = dict(request.query_params), self._masks(request)
        if "explain" in given:
            found, field = await self._read(masks, entities.explained, entity, key, given)
            lines = explanation_lines(found)
            return self._pages.page(
                "explain.html", found=found, lines=lines, field=field, entity=entity
            )
        if given.get("format") == "json":
            return self._pages.json(
                await self._read(masks, entities.state_json, entity, key, given)
            )
        page = await self._read(masks, entities.entity_page, entity, key, given)
        template = "entity_part.html" if "part" in given else "entity.html"
        status = 200 if page.missing is None else 404
        at = given.get("at", "")
        return self._pages.page(template, status=status, page=page, entity=entity, at=at)

    async def _keys(self, request: Request) -> Response:
        """Keys of an entity type; a key that exists leads to its entity."""
        entity, given = request.path_params["entity"], dict(request.query_params)
        self.desk.admit(request, entity, "read")
        masks = self._masks(request)
        if "key" in given and await self._read(masks, entities.is_there, entity, given["key"]):
            if given["key"] in (".", ".."):
                return await self._one(request, entity, given["key"])
            return self._pages.redirect(entity_url(entity, given["key"]))
        start = given.get("key", given.get("from", ""))
        keys, more = await self._read(masks, entities.keys_page, entity, start)
        sought = given.get("key")
        return self._pages.page(
            "keys.html", keys=keys, more=more, start=start, entity=entity, sought=sought
        )

    def _masks(self, request: Request) -> Masks:
        """What the caller of a page does not see."""
        return self.desk.identify(request).mask

    async def _read(self, masks: Masks, question: Callable[..., Any], *given: Any) -> Any:
        """Ask a reader in a thread."""

        def asked() -> Any:
            try:
                return question(self._reader.seen_by(masks), *given)
            except Unavailable as error:
                raise naming_server(self._config, error) from error

        return await self.desk.work(asked)

    async def _static(self, request: Request, name: str) -> Response:
        self.desk.admit_everyone(request)
        found = self._pages.static.get(name)
        if found is None:
            return Response(status_code=404)
        headers = {"Cache-Control": f"max-age={_STATIC_S}"}
        return Response(found[0], headers=headers, media_type=found[1])

    def _ask_for_token(self, next_address: str, *, tried: bool) -> Response:
        return self._pages.page("login.html", status=401, tried=tried, next=next_address)

    async def _login(self, request: Request) -> Response:
        next_path = "/"
        self.desk.admit_everyone(request)
        try:
            access.check_same_site(request)
            body = await read_body(request, _FORM_BYTES_MAX)
            form = parse_qs(body.decode("utf-8", "replace"))
            next_path = access.path_within(form.get("next", [""])[0])
            token = access.token_in_form(form)
            self.desk.callers.caller({"authorization": f"Bearer {token}"})
        except Unauthenticated:
            client = request.client.host if request.client else "?"
            _refused.log("login to the console refused, from %s", client)
            return self._ask_for_token(next_path, tried=True)
        except EverstateError as error:
            return self._pages.error(error, part=False)
        response = self._pages.redirect(next_path)
        access.set_cookie(response, request, token)
        return response

    async def _logout(self, request: Request) -> Response:
        self.desk.admit_everyone(request)
        try:
            access.check_same_site(request)
        except EverstateError as error:
            return self._pages.error(error, part=False)
        response = self._pages.redirect("/")
        response.delete_cookie(access.COOKIE, path="/", httponly=True, samesite="strict")
        return response
