"""The blocking client: the methods of the one for asyncio, over connections that block.

A coroutine that waits for nothing comes to its end in one step. So the methods of
:class:`AsyncClient` need no event loop here, and each of them is written once.
"""

from __future__ import annotations

import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx

from everstate.changes import Provenance
from everstate.client.asynchronous import AsyncClient

P = ParamSpec("P")
R = TypeVar("R")


class _Blocking(AsyncClient):
    """Requests and pauses that are over when they are awaited."""

    def _open(self, **settings: Any) -> httpx.URL:
        self.connections = httpx.Client(**settings)
        return self.connections.base_url

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.connections.request(method, path, **more)

    @asynccontextmanager
    async def _stream(self, path: str, **more: Any) -> AsyncIterator[httpx.Response]:
        with self.connections.stream("GET", path, **more) as answer:
            assert isinstance(answer.stream, httpx.SyncByteStream)
            answer.stream = _Bytes(answer.stream)
            yield answer

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


class _Bytes(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The bytes of an answer, for the methods of both kinds of clients."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._stream:
            yield chunk

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        self._stream.close()


def _result(waiting: Awaitable[R]) -> R:
    """The result of a coroutine that waits for nothing."""
    try:
        waiting.__await__().send(None)
    except StopIteration as end:
        return cast("R", end.value)
    raise RuntimeError("a request of the blocking client waited for an event loop")


def _returns(
    method: Callable[Concatenate[AsyncClient, P], Awaitable[R]],
) -> Callable[Concatenate[Client, P], R]:
    @wraps(method)
    def call(self: Client, /, *args: P.args, **given: P.kwargs) -> R:
        return _result(method(self._client, *args, **given))

    return call


def _yields(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[R]],
) -> Callable[Concatenate[Client, P], Iterator[R]]:
    @wraps(method)
    def call(self: Client, /, *args: P.args, **given: P.kwargs) -> Iterator[R]:
        items = cast("AsyncGenerator[R, None]", method(self._client, *args, **given))
        try:
            while True:
                try:
                    item = _result(anext(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            _result(items.aclose())

    return call


class Client:
    """Reads, writes and follows the entities of one server; close it, or use ``with``.

    Parameters and errors are those of :class:`~everstate.client.AsyncClient`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        provenance: Provenance | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._client = _Blocking(url, token=token, provenance=provenance, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.connections.close()

    get = _returns(AsyncClient.get)
    get_many = _returns(AsyncClient.get_many)
    list = _yields(AsyncClient.list)
    deleted = _yields(AsyncClient.deleted)
    written = _yields(AsyncClient.written)
    history = _yields(AsyncClient.history)
    diff = _returns(AsyncClient.diff)
    explain = _returns(AsyncClient.explain)
    provenance = _returns(AsyncClient.provenance)
    put = _returns(AsyncClient.put)
    patch = _returns(AsyncClient.patch)
    delete = _returns(AsyncClient.delete)
    subscribe = _yields(AsyncClient.subscribe)
    view_rows = _yields(AsyncClient.view_rows)
    view_page = _returns(AsyncClient.view_page)
    view_row = _returns(AsyncClient.view_row)
    follow_view = _yields(AsyncClient.follow_view)
    feed = _yields(AsyncClient.feed)
