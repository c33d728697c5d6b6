"""Computed fields in what is read: states have them, but no model takes them as input. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from everstate.changes.json_numbers import decode, encode
from everstate.changes.unknown import models_of, takes_unknown

M = TypeVar("M", bound=BaseModel)


def without_computed(model: type[BaseModel], given: Any, cause: ValidationError) -> Any:
    """The input without the computed fields that pydantic refused, as JSON text if it was text.

    Returns ``given`` itself when there are none; raises ValueError for text that is no JSON.
    """
    unknown = takes_unknown(model)
    if not unknown.computed:
        return given
    errors = cause.errors(include_url=False, include_context=False, include_input=False)
    places = [error["loc"] for error in errors if unknown.is_computed(error)]
    if not places:
        return given
    is_text = isinstance(given, (bytes, str))
    tree = decode(given) if is_text else _copied(given)
    for *parents, name in places:
        inner = tree
        for part in parents:
            # A part that is not there names the member of a union.
            if isinstance(inner, dict) and part in inner:
                inner = inner[part]
            elif isinstance(inner, (list, tuple)) and isinstance(part, int):
                inner = inner[part]
        if isinstance(inner, dict):
            inner.pop(name, None)
    return encode(tree) if is_text else tree


def forget_computed(model: type[BaseModel], made: M) -> M:
    """The entity without values of computed fields that it kept as unknown ones.

    They would be in its JSON twice, the old value and the new one.
    """
    if _may_keep_computed(model):
        _forget(made)
    return made


@lru_cache(maxsize=1024)
def _may_keep_computed(model: type[BaseModel]) -> bool:
    return any(
        each.model_config.get("extra") == "allow" and each.model_computed_fields
        for each in models_of(model)
    )


def _forget(value: Any) -> None:
    if isinstance(value, BaseModel):
        kept = value.__pydantic_extra__ or {}
        for name, info in value.__class__.model_computed_fields.items():
            for written in kept.keys() & {name, info.alias or name}:
                del kept[written]
                value.__pydantic_fields_set__.discard(written)
        value = value.__dict__
    if isinstance(value, Mapping):
        for part in value.values():
            _forget(part)
    elif isinstance(value, (list, tuple, AbstractSet)):
        for part in value:
            _forget(part)


def _copied(value: Any) -> Any:
    """A copy in which fields can be dropped."""
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(part) for part in value]
    return value
