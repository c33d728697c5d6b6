"""An answer is sent only if its route has checked who asks, and reads are recorded.

A route that forgets to ask the desk is a mistake that no caller must be able to use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstate.api.guards import refuse
from everstate.api.problems import problem
from everstate.errors import EverstateError
from everstate.http.admission import Admission, admission_of

logger = logging.getLogger("everstate.api")

NoteRead = Callable[[Scope, Admission, int], None]
"""Records a request that is about to be answered, with the status; raises OSError."""

_BEGINS: Final = (
    "http.response.start",
    "websocket.accept",
    "websocket.http.response.start",
)
_OTHER_METHOD: Final = 405
"""The framework answers it for a route that has not begun."""
_SWITCHED: Final = 101


class OnlyAdmitted:
    """Sends no answer of a route that did not check its caller; ASGI middleware."""

    def __init__(self, app: ASGIApp, note: NoteRead | None = None) -> None:
        self._app, self._note = app, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; its answer is checked before its first byte is sent."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        admission, is_refused = admission_of(HTTPConnection(scope)), False

        async def checked(message: Message) -> None:
            nonlocal is_refused
            if is_refused:
                return
            if message["type"] in _BEGINS:
                refusal = self._refusal(scope, admission, message.get("status", _SWITCHED))
                if refusal is not None:
                    is_refused = True
                    await refuse(refusal, scope, receive, send)
                    return
            await send(message)

        await self._app(scope, receive, checked)

    def _refusal(self, scope: Scope, admission: Admission, status: int) -> Response | None:
        """What is answered instead; ``None``: the answer may be sent."""
        if "endpoint" not in scope:
            return None
        if not admission.is_decided and status < 500 and status != _OTHER_METHOD:
            path = scope["path"]
            logger.error("%s has not checked its caller; its answer was not sent", path)
            return problem(500, "Internal Server Error", EverstateError.fallback_message)
        if self._note is not None:
            try:
                self._note(scope, admission, status)
            except OSError as error:
                logger.error("a read cannot be recorded, and is refused: %s", error)
                said = "this server records each read, and cannot record this one now."
                return problem(503, "Unavailable", said, headers={"Retry-After": "1"})
        return None
