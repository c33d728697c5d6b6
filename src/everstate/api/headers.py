"""Headers of every answer: what a browser must not do with it, and which caches may keep it."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstate.http.asgi import admission_of

NOTHING_ELSE: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
"""Content-Security-Policy of answers that are no pages: nothing is loaded, and nothing runs."""
_ALWAYS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": NOTHING_ELSE,
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HTTPS_ONLY: Final = "max-age=31536000"


def secure_headers(scheme: str) -> dict[str, str]:
    """Headers of an answer over `http` or `https`."""
    more = {"Strict-Transport-Security": _HTTPS_ONLY} if scheme in ("https", "wss") else {}
    return {**_ALWAYS, **more}


class SecureHeaders:
    """Adds the headers that an answer does not have; ASGI middleware.

    What only some callers may see is not kept by shared caches, and again asked for before it is
    used (`private, no-cache`), unless the route says otherwise.
    """

    def __init__(self, app: ASGIApp, *, is_local: bool) -> None:
        """``is_local``: callers need no tokens."""
        self._app, self._is_local = app, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        admission = admission_of(HTTPConnection(scope))

        async def with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                for name, value in secure_headers(scope["scheme"]).items():
                    headers.setdefault(name, value)
                if not self._is_local and admission.caller is not None:
                    headers.setdefault("Cache-Control", "private, no-cache")
                    headers.add_vary_header("Authorization")
                message = {**message, "headers": headers.raw}
            await send(message)

        await self._app(scope, receive, with_headers)
