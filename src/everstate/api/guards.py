"""What stands before the routes: how long a request may take to come, and whom it is meant for."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Final
from urllib.parse import urlsplit

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from everstate.api.problems import problem
from everstate.telemetry import Sparingly

LOGGER = logging.getLogger("everstate.api")

_ARRIVED: Final = frozenset({h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR})
_slow: Final = Sparingly(LOGGER, logging.INFO)


def timed_protocol(receive_s: float) -> type[H11Protocol]:
    """HTTP/1.1 whose connections are closed when a request takes longer than that to come.

    The server's own time-out begins with the end of an answer, and every byte ends it: half a
    header, or a body that comes byte by byte, would keep a connection for ever.
    """

    class TimedProtocol(H11Protocol):
        """Measures from the connection's start, then from the first byte of each request."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state in _ARRIVED:
                self._forget()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(receive_s, self._give_up)

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            client = self.client[0] if self.client else "a client"
            _slow.log("closed a connection of %s: its request did not come in time", client)
            self.transport.close()

    return TimedProtocol


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

        await self._app({**scope, "method": "GET"}, receive, without_body)


class OnlyLocalNames:
    """Refuses requests that were meant for another host. ASGI middleware for the local mode.

    Without tokens a browser on this machine is trusted as any program is. A page of somebody else
    can have its own name lead to 127.0.0.1 (DNS rebinding) and then ask as if it were ours; only
    the Host header tells.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 421."""
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"host"]
            if not all(is_loopback(_host_name(value.decode("latin-1"))) for value in given):
                detail = "without tokens this server answers to localhost and 127.0.0.1 only."
                refusal = problem(421, "Misdirected Request", detail)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(value: str) -> str:
    """The Host header without its port; what cannot be read is nobody's name."""
    try:
        return urlsplit(f"//{value}").hostname or ""
    except ValueError:
        return ""
