"""Records reads: who read what and when, as lines of JSON; never a token, and never a value."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import orjson
from starlette.types import Scope

from everstate.http.admission import Admission

AUDIT: Final = logging.getLogger("everstate.audit")
_MODE: Final = 0o600


def noted_in(place: Literal["log"] | Path | None) -> Callable[[Scope, Admission, int], None] | None:
    """The recorder of reads at ``api.audit_reads``; ``None``: reads are not recorded."""
    if place is None:
        return None

    def note(scope: Scope, admission: Admission, status: int) -> None:
        if not _is_noted(admission):
            return
        line = orjson.dumps(_record(scope, admission, status))
        if isinstance(place, Path):
            _append(place, line + b"\n")
        else:
            AUDIT.info("%s", line.decode())

    return note


def _is_noted(admission: Admission) -> bool:
    """Whether a request is a read, or was refused: the log has the writes, with who wrote."""
    if admission.is_open:
        return False
    return not admission.checked or any(right != "write" for _, right in admission.checked)


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
