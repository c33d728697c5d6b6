"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Self

import httpx

from everstate.changes import Provenance
from everstate.changes.quoting import joined
from everstate.changes.triggers import State
from everstate.client.events import Event, Parser
from everstate.client.feeds import BEGINNING, FeedPage, FeedWalk
from everstate.client.requests import (
    PAGE,
    RETRY_S,
    ClientRequest,
    Found,
    RequestFailed,
    Saved,
    body_of,
    failure,
    found,
    listed,
    many,
    page_after,
    place,
    reading,
    redirected,
    saved,
    writing,
)
from everstate.client.views import ViewRows, following, page_of, row_request, rows_request


class AsyncClient:
    """Reads, writes and follows the entities of one server; close it, or use ``async with``.

    ``token``: the caller's token; without one the server takes the service and identifier of
    ``provenance``, which also belongs to each write that has none of its own. Every method raises
    RequestFailed with the server's reason (status 0: it did not answer; redirects are not
    followed), and InvalidRequest for a name or key that cannot be part of a URL.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        provenance: Provenance | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._address = self._open(base_url=url, headers=headers, timeout=timeout_s)
        self._provenance = provenance

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # What a client sends goes through these four; the blocking client has others.

    def _open(self, **settings: Any) -> httpx.URL:
        self._http = httpx.AsyncClient(**settings)
        return self._http.base_url

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self._http.request(method, path, **more)

    def _stream(self, path: str, **more: Any) -> AbstractAsyncContextManager[httpx.Response]:
        return self._http.stream("GET", path, **more)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def get(
        self,
        entity: str,
        key: str,
        *,
        at: datetime | None = None,
        recorded_at: datetime | None = None,
        version: int | None = None,
        wait_for: str | None = None,
    ) -> Found:
        """One entity: now, ``at`` a world time, as ``recorded_at`` a time, or at a version."""
        times = {"at": at, "recorded_at": recorded_at}
        answer = await self._send(reading(place(entity, key), wait_for, times, version=version))
        return found(key, answer)

    async def get_many(
        self,
        entity: str,
        keys: Sequence[str],
        *,
        at: datetime | None = None,
        wait_for: str | None = None,
    ) -> dict[str, Found | None]:
        """At most 1,000 entities by key, all at one moment; ``None``: there is none."""
        items = (await self._object(many(entity, keys, at, wait_for)))["items"]
        return {key: listed(key, item) for key, item in items.items()}

    async def list(
        self,
        entity: str,
        *,
        where: Sequence[str] = (),
        at: datetime | None = None,
        wait_for: str | None = None,
    ) -> AsyncIterator[Found]:
        """Entities that meet conditions (`nights>3`), now or ``at`` a world time, by their keys.

        A page at a time: later pages are of later moments. :meth:`view_rows` has other orders.
        """
        path, conditions = f"/query{place(entity)}", joined(where) or None
        request = reading(path, wait_for, {"at": at}, where=conditions, limit=PAGE)
        async for item in self._items(request):
            yield Found(item["key"], item["state"], item["version"], item["as_of"])

    def deleted(self, entity: str, *, wait_for: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """The deleting versions of entities that are deleted now, by their keys."""
        path = f"/query{place(entity, None, 'deleted')}"
        return self._items(reading(path, wait_for, {}, limit=PAGE))

    def written(
        self,
        entity: str,
        *,
        service: str | None = None,
        identifier: str | None = None,
        actor: str | None = None,
        correlation: str | None = None,
        kind: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        wait_for: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Changes by who wrote them and when they were recorded, in the order of recording."""
        request = reading(
            f"/query{place(entity, None, 'changes')}",
            wait_for,
            {"since": since, "until": until},
            service=service,
            identifier=identifier,
            actor=actor,
            correlation=correlation,
            kind=kind,
            limit=PAGE,
        )
        return self._items(request)

    def history(
        self,
        entity: str,
        key: str,
        *,
        after: int = 0,
        changed: str | None = None,
        service: str | None = None,
        identifier: str | None = None,
        actor: str | None = None,
        correlation: str | None = None,
        kind: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        wait_for: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Versions of an entity after a version, oldest first, a page at a time.

        ``changed``: only those that changed this field. The other filters are those of
        :meth:`written`.
        """
        request = reading(
            place(entity, key, "history"),
            wait_for,
            {"since": since, "until": until},
            after=after,
            changed=changed,
            service=service,
            identifier=identifier,
            actor=actor,
            correlation=correlation,
            kind=kind,
            limit=PAGE,
        )
        return self._items(request)

    async def diff(
        self, entity: str, key: str, since: int | datetime, until: int | datetime | None = None
    ) -> dict[str, Any]:
        """What changed from one version or time to another one: fields, and a JSON Patch."""
        sides = {"from": _side(since), "to": _side(until)}
        return await self._object(reading(place(entity, key, "diff"), None, {}, **sides))

    async def explain(
        self, entity: str, key: str, *, field: str | None = None, version: int | None = None
    ) -> dict[str, Any]:
        """Where a version comes from; ``field``: the version that last wrote it."""
        below = ("explain",) if field is None else ("explain", field)
        return await self._object(reading(place(entity, key, *below), None, {}, version=version))

    async def provenance(self, entity: str, key: str) -> dict[str, Any]:
        """Who last wrote each field, and what each service last wrote."""
        return await self._object(reading(place(entity, key, "provenance"), None, {}))

    async def put(
        self,
        entity: str,
        key: str,
        state: State,
        *,
        provenance: Provenance | None = None,
        expected_version: int | None = None,
        once: str | None = None,
    ) -> Saved:
        """Create or replace an entity; ``once``: an Idempotency-Key."""
        who = provenance or self._provenance
        request = writing("PUT", place(entity, key), dict(state), who, expected_version, once)
        return saved(key, await self._send(request))

    async def patch(
        self,
        entity: str,
        key: str,
        changes: State,
        *,
        provenance: Provenance | None = None,
        expected_version: int | None = None,
        once: str | None = None,
    ) -> Saved:
        """Change some fields of an entity (JSON Merge Patch, RFC 7386)."""
        who = provenance or self._provenance
        request = writing("PATCH", place(entity, key), dict(changes), who, expected_version, once)
        return saved(key, await self._send(request))

    async def delete(
        self,
        entity: str,
        key: str,
        *,
        provenance: Provenance | None = None,
        expected_version: int | None = None,
        once: str | None = None,
    ) -> Saved:
        """Delete an entity."""
        who = provenance or self._provenance
        request = writing("DELETE", place(entity, key), None, who, expected_version, once)
        return saved(key, await self._send(request))

    def subscribe(
        self,
        entity: str,
        *,
        key: str | None = None,
        since: str | None = None,
        current: bool = False,
        kinds: Sequence[str] = (),
        changed: str | None = None,
        becomes: str | None = None,
        service: str | None = None,
        identifier: str | None = None,
        actor: str | None = None,
        when_slow: str | None = None,
    ) -> AsyncIterator[Event]:
        """Changes of an entity type as they come, for ever; see :class:`Event`.

        ``since``: a token, ``"beginning"`` or ``"now"``. ``current``: first the present rows.
        ``becomes``: `field:value`. When the connection is lost, the subscription continues after
        the last event by itself: no change is missing and none comes twice. Raises RequestFailed
        when the server refuses the subscription, or ends it with an error.
        """
        query = {
            "key": key,
            "since": since,
            "current": "true" if current else None,
            "kind": ",".join(kinds) or None,
            "changed": changed,
            "becomes": becomes,
            "service": service,
            "identifier": identifier,
            "actor": actor,
            "when_slow": when_slow,
        }
        return self._follow(reading(f"/stream{place(entity)}", None, {}, **query))

    async def view_rows(
        self,
        name: str,
        *,
        where: Sequence[str] = (),
        order: Sequence[str] = (),
        wait_for: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """All rows of a view, a page at a time: of one version, later pages of later positions.

        ``where``: conditions on columns, `nights>3`. ``order``: columns, with `-` for the largest
        first.
        """
        after: str | None = None
        while True:
            page = await self.view_page(
                name, where=where, order=order, after=after, wait_for=wait_for
            )
            for row in page.rows:
                yield row
            after = page.after
            if after is None:
                return

    async def view_page(
        self,
        name: str,
        *,
        where: Sequence[str] = (),
        order: Sequence[str] = (),
        after: str | None = None,
        limit: int = PAGE,
        words: str | None = None,
        wait_for: str | None = None,
    ) -> ViewRows:
        """A page of the rows of a view, and the position that they have.

        ``words``: the best rows of a search, without order and ``after``.
        """
        request = rows_request(name, where, order, wait_for, after=after, limit=limit, words=words)
        answer = await self._send(request)
        return page_of(body_of(answer), answer.headers)

    async def view_row(self, name: str, *key: Any, wait_for: str | None = None) -> dict[str, Any]:
        """The row of a view that has a key: a value for each of its columns."""
        return await self._object(row_request(name, key, wait_for))

    def follow_view(
        self, name: str, *, where: Sequence[str] = (), since: str | None = None
    ) -> AsyncIterator[Event]:
        """The rows of a view as they change, for ever: events `snapshot` and `changed`.

        ``where``: only rows with these values, `city=Wien`. ``since``: the token of the last event
        that you have. When the connection is lost, the subscription continues after the last event
        by itself, with a `snapshot` if what changed meanwhile is not remembered. Raises
        RequestFailed when the server refuses the subscription, or ends it with an error.
        """
        return self._follow(following(name, where, since))

    async def feed(self, entity: str, *, since: str = BEGINNING) -> AsyncIterator[FeedPage]:
        """Changes of an entity type as pages, from ``since`` on to what there is now.

        ``since``: the :attr:`FeedPage.bookmark` of an earlier page, ``"beginning"`` or ``"now"``.
        A walk that begins after a bookmark misses no change and gets none twice. A page that is
        closed comes from any HTTP cache on the way. Raises RequestFailed (410: the changes are
        not stored any more), and InvalidToken.
        """
        walk = FeedWalk(entity, since)
        walk.begin(await self._object(walk.listing()))
        while (request := walk.following()) is not None:
            page = walk.took(await self._object(request))
            if page is not None:
                yield page

    async def _follow(self, request: ClientRequest) -> AsyncIterator[Event]:
        """The events of a stream, which is begun again after its last event when it is cut off."""
        parser = Parser()
        while True:
            headers = {} if parser.token is None else {"Last-Event-ID": parser.token}
            parser = Parser(parser.token)
            try:
                async with self._stream(
                    request.path, params=request.query, headers=headers
                ) as answer:
                    if not answer.is_success:
                        await answer.aread()
                        raise _failed(answer)
                    async for chunk in answer.aiter_bytes():
                        for event in parser.take(chunk):
                            if event.name == "error":
                                raise failure(0, event.data)
                            if event.name != "slow":
                                yield event
            except httpx.TransportError:
                pass
            except RequestFailed as error:
                if error.status != 503 and error.kind != "Unavailable":
                    raise
            await self._pause(RETRY_S)

    async def _send(self, request: ClientRequest) -> httpx.Response:
        try:
            answer = await self._request(
                request.method,
                request.path,
                params=request.query,
                headers=httpx.Headers(request.headers, encoding="utf-8"),
                content=request.content,
            )
        except httpx.TransportError as error:
            raise RequestFailed(0, "Unavailable", f"{self._address}: {error}") from error
        if not answer.is_success:
            raise _failed(answer)
        return answer

    async def _items(self, request: ClientRequest) -> AsyncIterator[dict[str, Any]]:
        """The items of all pages."""
        while True:
            page = await self._object(request)
            for each in page["items"]:
                yield each
            if page["after"] is None:
                return
            request = page_after(request, page["after"])

    async def _object(self, request: ClientRequest) -> dict[str, Any]:
        body: dict[str, Any] = body_of(await self._send(request))
        return body


def _failed(answer: httpx.Response) -> RequestFailed:
    if answer.has_redirect_location:
        return redirected(answer.status_code, answer.headers["Location"])
    try:
        return failure(answer.status_code, answer.json())
    except ValueError:
        return failure(answer.status_code, None)


def _side(side: int | datetime | None) -> str | int | None:
    return side.isoformat() if isinstance(side, datetime) else side
