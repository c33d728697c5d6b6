"""The facts that a handler returns: as JSON, and one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, TypeAdapter

from everstate.changes.depth import TOO_DEEP, is_too_deep
from everstate.changes.values import UNSTORABLE, model_json, storable

_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def fact_json(fact: Any) -> bytes:
    """JSON of a fact: a pydantic model or a dataclass.

    Raises pydantic's errors when its class is neither, and ValueError for numbers that JSON would
    lose and for values that are nested too deeply.
    """
    kind = fact.__class__
    if isinstance(fact, BaseModel):
        return model_json(fact)
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    if not storable(fact):
        raise ValueError(UNSTORABLE)
    encoded = _ADAPTERS[kind].dump_json(fact)
    if is_too_deep(encoded):
        raise ValueError(TOO_DEEP)
    return encoded


def facts_of(decided: Any) -> Iterable[Any]:
    """The result of ``decide`` as facts, in their order."""
    if decided is None:
        return ()
    if isinstance(decided, list | tuple):
        return decided
    if isinstance(decided, Iterable) and not isinstance(decided, BaseModel):
        return tuple(decided)
    return (decided,)
