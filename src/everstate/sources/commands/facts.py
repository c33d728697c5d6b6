"""The facts that a handler returns, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel


def facts_of(decided: Any) -> Iterable[Any]:
    """The result of ``decide`` as facts, in their order."""
    if decided is None:
        return ()
    if isinstance(decided, list | tuple):
        return decided
    if isinstance(decided, Iterable) and not isinstance(decided, BaseModel):
        return tuple(decided)
    return (decided,)
