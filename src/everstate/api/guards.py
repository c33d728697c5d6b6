"""Guards before the routes: a time limit for receiving requests, HEAD, and a Host check."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import h11
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from everstate.api.problems import problem
from everstate.loopback import host_name, is_loopback
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger("everstate.api")

IS_HEAD: Final = "everstate.is_head"
"""In a request's scope: it is a HEAD request, which must not wait for a body that never ends."""
_ARRIVED: Final = frozenset({h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR})
_PORTS: Final = {"http": 80, "https": 443}
_slow: Final = RateLimitedLogger(logger, logging.INFO)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes the connections of clients that do not send, or do not read.

    Receiving is measured from the connection's start, then from the first byte of each request: the
    server's own time-out starts at the end of a response, and any byte ends it. It has no time-out
    for sending: a client that does not read its answer would keep connection, task and buffer for
    ever, also when the server has closed the connection, which waits until everything is sent.
    """

    receive_s: float
    send_s: float
    connections_max: int

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_websocket = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to measure, or refuse one connection too many."""
        if len(self.connections) >= self.connections_max:
            _slow.log("refused a connection: api.connections_max is %d", self.connections_max)
            transport.abort()
        super().connection_made(transport)
        self._watch()
        self.loop.call_later(self.send_s, self._look_closing, transport)

    def pause_writing(self) -> None:
        """Start to measure how long the client does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.send_s, self._drop_unread, self.transport)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._forget_unread()

    def data_received(self, data: bytes) -> None:
        """Measure until the request is complete."""
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Close after a request with two lengths (RFC 9112, 6.1): a proxy may have read the other.

        What the client sent behind its end would be read as a request of its own.
        """
        super().handle_events()
        names = {name for name, _ in self.headers or ()}
        if self.cycle is not None and names >= {b"content-length", b"transfer-encoding"}:
            self.cycle.default_headers = [
                *self.server_state.default_headers,
                (b"connection", b"close"),
            ]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to measure."""
        self._forget()
        self._forget_unread()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Stop to measure a connection that becomes a WebSocket."""
        # From here on the connection is another protocol's, which has time-outs of its own.
        self._is_websocket = True
        super().handle_websocket_upgrade(event)

    def _watch(self) -> None:
        if self._is_websocket or self.conn.their_state in _ARRIVED:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.receive_s, self._give_up)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        client = self.client[0] if self.client else "a client"
        _slow.log("closed a connection of %s: its request did not come in time", client)
        self.transport.abort()

    def _look_closing(self, transport: asyncio.Transport) -> None:
        """End a connection that was closed and whose client does not read the rest."""
        if not transport.is_closing():
            self.loop.call_later(self.send_s, self._look_closing, transport)
        elif transport.get_write_buffer_size():
            self.loop.call_later(self.send_s, self._drop_unread, transport)

    def _drop_unread(self, transport: asyncio.Transport) -> None:
        if transport.get_write_buffer_size():
            _slow.log("closed a connection: its client did not read the answer in time")
            transport.abort()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def timed_protocol(
    receive_s: float, send_s: float = 60, connections_max: int = 1_000
) -> type[TimedProtocol]:
    """The protocol with these limits."""
    limits = {"receive_s": receive_s, "send_s": send_s, "connections_max": connections_max}
    return type("LimitedProtocol", (TimedProtocol,), limits)


class FewInvalid(logging.Filter):
    """Lets a few of uvicorn's lines about requests that are not HTTP pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        if not str(record.msg).startswith("Invalid HTTP request"):
            return True
        _slow.log("a request was not HTTP")
        return False


class HeadAsGet:
    """Answers HEAD as GET, without the body. ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET", IS_HEAD: True}, receive, without_body)


class OnlyLocalNames:
    """Refuses requests for another host name. ASGI middleware for the local mode.

    Without tokens a browser on this machine is trusted like any program. A foreign web page can
    make its own host name resolve to 127.0.0.1 (DNS rebinding) and then send requests to this API;
    only the Host header reveals that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 421."""
        if scope["type"] in ("http", "websocket"):
            given = [value for name, value in scope["headers"] if name == b"host"]
            if not all(is_loopback(host_name(value.decode("latin-1"))) for value in given):
                detail = "without tokens this server answers to localhost and 127.0.0.1 only."
                refusal = problem(421, "Misdirected Request", detail)
                await refuse(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)


class OnlyOwnPages:
    """Refuses WebSockets that a web page of another origin opens. ASGI middleware.

    A browser lets any page open a WebSocket to any server, with the cookies and from the network
    place of its user, and lets it read what comes (cross-site WebSocket hijacking); the rule that
    keeps pages from reading answers of other origins holds for HTTP only. Browsers name the page's
    origin, and no page can change that. Other programs send no Origin, and are not meant.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection on, or answer 403."""
        if scope["type"] == "websocket":
            headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
            origins = [value for name, value in headers if name == b"origin"]
            hosts = [value for name, value in headers if name == b"host"]
            if not all(is_own_origin(origin, hosts) for origin in origins):
                detail = "a page of another origin cannot open a WebSocket of this server."
                await refuse(problem(403, "Forbidden", detail), scope, receive, send)
                return
        await self._app(scope, receive, send)


async def refuse(refusal: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or the request for a WebSocket, which is not opened."""
    await refusal(scope, receive, send)
    if scope["type"] == "websocket":
        # uvicorn logs an error for a WebSocket that is neither open nor closed when its call ends,
        # and closes a refused one a moment after the answer.
        await asyncio.sleep(0)


def is_own_origin(origin: str, hosts: Sequence[str]) -> bool:
    """Whether a page's origin (`https://shop.example`) is the host that a request is for.

    The scheme is not compared: behind a proxy with TLS, the server itself is asked by HTTP.
    """
    try:
        page = urlsplit(origin)
        usual = _PORTS[page.scheme]
        asked = [urlsplit(f"//{host}") for host in hosts]
        named = {(each.hostname, each.port or usual) for each in asked}
        return bool(page.hostname) and named == {(page.hostname, page.port or usual)}
    except (KeyError, ValueError):
        return False
