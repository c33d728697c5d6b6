"""An answer is sent only if its route has checked who asks, and reads are recorded.

A route that forgets to ask the desk is a mistake that no caller must be able to use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import orjson
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstate.api.guards import refuse
from everstate.api.problems import problem
from everstate.errors import EverstateError
from everstate.http.asgi import Admission, admission_of

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


AUDIT: Final = logging.getLogger("everstate.audit")
_MODE: Final = 0o600


def noted_in(place: Literal["log"] | Path | None) -> NoteRead | None:
    """The recorder of reads at ``api.audit_reads``; ``None``: reads are not recorded."""
    if place is None:
        return None

    def note(scope: Scope, admission: Admission, status: int) -> None:
        # Only reads, and what was refused: the log has the writes, with who wrote.
        is_write = admission.checked and all(right == "write" for _, right in admission.checked)
        if admission.is_open or is_write:
            return
        line = orjson.dumps(_record(scope, admission, status))
        if isinstance(place, Path):
            _append(place, line + b"\n")
        else:
            AUDIT.info("%s", line.decode())

    return note


def _record(scope: Scope, admission: Admission, status: int) -> dict[str, Any]:
    route, given = scope.get("route"), scope.get("path_params", {})
    entities = sorted({entity for entity, _ in admission.checked})
    return {
        "at": datetime.now(UTC).isoformat(),
        "caller": None if admission.caller is None else admission.caller.name,
        "method": scope.get("method", "WebSocket"),
        "route": getattr(route, "path_format", None) or getattr(route, "path", scope["path"]),
        "entities": entities,
        "key": given.get("key"),
        "status": status,
    }


def _append(file: Path, line: bytes) -> None:
    """Add a line, also when other processes write to the same file; raises OSError."""
    opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)
    try:
        written = os.write(opened, line)
    finally:
        os.close(opened)
    if written != len(line):
        raise OSError(f"{file} is full")
