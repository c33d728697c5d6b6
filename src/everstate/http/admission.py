"""Who was let in to a request, and for what: recorded by the desk, and read by the guards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from starlette.requests import HTTPConnection

from everstate.api_config import Right
from everstate.http.callers import Caller

ADMISSION: Final = "everstate.admission"
"""In a request's scope: its :class:`Admission`."""


@dataclass(slots=True)
class Admission:
    """What was checked before a request is answered."""

    caller: Caller | None = None
    """Who asks, when that is known."""
    checked: list[tuple[str, Right]] = field(default_factory=list)
    """Entity types and the rights that the caller was found to have on them."""
    is_decided: bool = False
    """Whether a route has asked the desk; if that refused, the answer is the refusal."""
    is_open: bool = False
    """Whether the route is for everyone."""


def admission_of(connection: HTTPConnection) -> Admission:
    """What is known of a request so far."""
    found = connection.scope.setdefault(ADMISSION, Admission())
    assert isinstance(found, Admission)
    return found
