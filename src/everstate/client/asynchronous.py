"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from datetime import datetime
from typing import Any, Self, Unpack

import httpx
from httpx_sse import EventSource, SSEError

from everstate.changes import Provenance
from everstate.changes.json_numbers import decode
from everstate.changes.quoting import joined
from everstate.changes.triggers import State
from everstate.client.feeds import BEGINNING, FeedPage, FeedWalk
from everstate.client.requests import (
    PAGE,
    RETRY_S,
    ChangesFilter,
    ClientRequest,
    Event,
    Found,
    RequestFailed,
    Saved,
    ViewRows,
    WriteSettings,
    body_of,
    failure,
    filters,
    found,
    page_of,
    place,
    reading,
    redirected,
    saved,
    unexpected,
    view_place,
    writing,
)


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
        request = reading(place(entity, key), wait_for, **times, version=version)
        return found(key, await self._send(request))

    async def get_many(
        self,
        entity: str,
        keys: Sequence[str],
        *,
        at: datetime | None = None,
        wait_for: str | None = None,
    ) -> dict[str, Found | None]:
        """At most 1,000 entities by key, all at one moment; ``None``: there is none."""
        asked = {"keys": list(keys), "at": None if at is None else at.isoformat()}
        request = reading(f"/query{place(entity, None, 'keys')}", wait_for)
        items = (await self._object(request.posting(asked)))["items"]
        return {
            key: None if item is None else Found(key, item["state"], item["version"], item["as_of"])
            for key, item in items.items()
        }

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
        request = reading(path, wait_for, at=at, where=conditions, limit=PAGE)
        async for item in self._items(request):
            yield Found(item["key"], item["state"], item["version"], item["as_of"])

    def deleted(self, entity: str, *, wait_for: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """The deleting versions of entities that are deleted now, by their keys."""
        path = f"/query{place(entity, None, 'deleted')}"
        return self._items(reading(path, wait_for, limit=PAGE))

    def written(
        self, entity: str, *, wait_for: str | None = None, **by: Unpack[ChangesFilter]
    ) -> AsyncIterator[dict[str, Any]]:
        """Changes by who wrote them and when they were recorded, in the order of recording."""
        path = f"/query{place(entity, None, 'changes')}"
        return self._items(reading(path, wait_for, **filters(by), limit=PAGE))

    def history(
        self,
        entity: str,
        key: str,
        *,
        after: int = 0,
        changed: str | None = None,
        wait_for: str | None = None,
        **by: Unpack[ChangesFilter],
    ) -> AsyncIterator[dict[str, Any]]:
        """Versions of an entity after a version, oldest first, a page at a time.

        ``changed``: only those that changed this field. The other filters are those of
        :meth:`written`.
        """
        path = place(entity, key, "history")
        asked = reading(path, wait_for, after=after, changed=changed, **filters(by), limit=PAGE)
        return self._items(asked)

    async def diff(
        self, entity: str, key: str, since: int | datetime, until: int | datetime | None = None
    ) -> dict[str, Any]:
        """What changed from one version or time to another one: fields, and a JSON Patch."""
        sides = {"from": since, "to": until}
        return await self._object(reading(place(entity, key, "diff"), None, **sides))

    async def explain(
        self, entity: str, key: str, *, field: str | None = None, version: int | None = None
    ) -> dict[str, Any]:
        """Where a version comes from; ``field``: the version that last wrote it."""
        below = ("explain",) if field is None else ("explain", field)
        return await self._object(reading(place(entity, key, *below), version=version))

    async def provenance(self, entity: str, key: str) -> dict[str, Any]:
        """Who last wrote each field, and what each service last wrote."""
        return await self._object(reading(place(entity, key, "provenance")))

    async def put(self, entity: str, key: str, state: State, **how: Unpack[WriteSettings]) -> Saved:
        """Create or replace an entity; ``once``: an Idempotency-Key."""
        return await self._write("PUT", entity, key, dict(state), how)

    async def patch(
        self, entity: str, key: str, changes: State, **how: Unpack[WriteSettings]
    ) -> Saved:
        """Change some fields of an entity (JSON Merge Patch, RFC 7386)."""
        return await self._write("PATCH", entity, key, dict(changes), how)

    async def delete(self, entity: str, key: str, **how: Unpack[WriteSettings]) -> Saved:
        """Delete an entity."""
        return await self._write("DELETE", entity, key, None, how)

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
        thin: bool = False,
    ) -> AsyncIterator[Event]:
        """Changes of an entity type as they come, for ever; see :class:`Event`.

        ``entity``: also several, `guest,order`. ``since``: a token, a time, ``"beginning"`` or
        ``"now"``. ``current``: first the present rows. ``becomes``: `field:value`. ``thin``: a
        link in place of the states. When the connection is lost, the subscription continues after
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
            "thin": "true" if thin else None,
        }
        return self._follow(reading(f"/stream{place(entity)}", **query))

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
        query = {"where": joined(where) or None, "order": ";".join(order) or None}
        path, page = view_place(name), {"after": after, "limit": limit, "q": words}
        request = reading(path, wait_for, **query, **page)
        answer = await self._send(request)
        return page_of(body_of(answer), answer.headers)

    async def view_row(self, name: str, *key: Any, wait_for: str | None = None) -> dict[str, Any]:
        """The row of a view that has a key: a value for each of its columns."""
        return await self._object(reading(view_place(name, "rows", *key), wait_for))

    def follow_view(
        self, name: str, *, where: Sequence[str] = (), since: str | None = None
    ) -> AsyncIterator[Event]:
        """The rows of a view as they change, for ever: events `snapshot` and `changed`.

        ``where``: only rows with these values, `city=Wien`. ``since``: the token of the last event
        that you have. When the connection is lost, the subscription continues after the last event
        by itself, with a `snapshot` if what changed meanwhile is not remembered. Raises
        RequestFailed when the server refuses the subscription, or ends it with an error.
        """
        path = view_place(name, "stream")
        return self._follow(reading(path, where=joined(where) or None, since=since))

    async def feed(self, entity: str, *, since: str = BEGINNING) -> AsyncIterator[FeedPage]:
        """Changes of an entity type as pages, from ``since`` on to what there is now.

        ``entity``: also several, `guest,order`: in the order of their common stream.
        ``since``: the :attr:`FeedPage.bookmark` of an earlier page, ``"beginning"`` or ``"now"``.
        A walk that begins after a bookmark misses no change and gets none twice. A page that is
        closed comes from any HTTP cache on the way. Raises RequestFailed (410: the changes are
        not stored any more), and InvalidToken.
        """
        while "," in entity:
            found = await self._object(reading(f"/feed{place(entity)}", since=since))
            yield FeedPage(entity, 0, False, found["changes"], since := found["token"])
            if found["live"]:
                return
        walk = FeedWalk(entity, since)
        walk.begin(await self._object(walk.listing()))
        while (request := walk.following()) is not None:
            page = walk.took(await self._object(request))
            if page is not None:
                yield page

    async def _follow(self, request: ClientRequest) -> AsyncIterator[Event]:
        """The events of a stream, which is begun again after its last event when it is cut off."""
        token: str | None = None
        while True:
            headers = {} if token is None else {"Last-Event-ID": token}
            try:
                async with self._stream(
                    request.path, params=request.query, headers=headers
                ) as answer:
                    if not answer.is_success:
                        await answer.aread()
                        raise _failed(answer)
                    async with aclosing(EventSource(answer).aiter_sse()) as events:
                        async for event in events:
                            token = event.id or token
                            # Without data only the position is new.
                            if event.event == "error":
                                raise failure(0, decode(event.data))
                            if event.data and event.event != "slow":
                                yield Event(event.event, decode(event.data), token)
            except SSEError as error:
                raise unexpected(answer, "no Server-Sent Events") from error
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

    async def _write(
        self, method: str, entity: str, key: str, body: Any, how: WriteSettings
    ) -> Saved:
        if how.get("provenance") is None:
            how = {**how, "provenance": self._provenance}
        request = writing(method, place(entity, key), body, **how)
        return saved(key, await self._send(request))

    async def _items(self, request: ClientRequest) -> AsyncIterator[dict[str, Any]]:
        """The items of all pages."""
        while True:
            page = await self._object(request)
            for each in page["items"]:
                yield each
            if page["after"] is None:
                return
            request = request._replace(query={**request.query, "after": page["after"]})

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
