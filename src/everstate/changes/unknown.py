"""Names in input that are no fields to be given: unknown ones, and those of computed fields. Pure.

A name that is no field of the model is usually a typing error, and dropping its value would lose
data silently. It is refused, unless one of the entity type's models sets pydantic's `extra` itself.
A computed field is in states, so readers may send it back; it is dropped, and computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import is_
from typing import Any, Final

from pydantic import BaseModel

from everstate.changes.fields import FieldTree, objects_of, tree_of
from everstate.changes.json_numbers import decode, encode

EXTRA: Final = "extra_forbidden"
"""Type of pydantic's error for a field that the model does not have."""


@lru_cache(maxsize=1024)
def refuses_unknown(model: type[BaseModel]) -> bool:
    """Whether unknown fields are refused: they are, unless one of the models sets `extra` itself.

    `model_config = ConfigDict(extra="ignore")` drops them, as pydantic does by itself.
    """
    return all(each.model_config.get("extra") is None for each in objects_of(model))


@lru_cache(maxsize=1024)
def keeps_computed(model: type[BaseModel]) -> bool:
    """Whether a model would keep computed fields as unknown ones.

    They would be in its JSON twice, the old value and the new one.
    """
    return any(tree.keeps_unknown and tree.computed for tree in objects_of(model).values())


def without_computed(model: type[BaseModel], given: Any) -> Any:
    """The input without computed fields, as JSON text if it was text.

    It is ``given`` itself when it has none, and when it is no JSON.
    """
    if not any(tree.computed for tree in objects_of(model).values()):
        return given
    if not isinstance(given, (bytes, str)):
        return _without(tree_of(model), given)
    try:
        read = decode(given)
    except ValueError:
        return given
    kept = _without(tree_of(model), read)
    return given if kept is read else encode(kept)


def _without(tree: FieldTree, value: Any) -> Any:
    """The value without computed fields; a changed part is copied."""
    element = next((each.element for each in tree.choices if each.element is not None), None)
    if isinstance(value, Mapping):
        fields = [field for each in tree.choices for field in each.fields]
        inside = {name: field.tree for field in fields for name in field.names}
        computed = {field for each in tree.choices for field in each.computed}
        dropped = {name for field in computed for name in field.names} - inside.keys()
        kept = {}
        for name, part in value.items():
            if name not in dropped:
                inner = inside.get(name, element)
                kept[name] = part if inner is None else _without(inner, part)
        is_same = len(kept) == len(value) and all(kept[name] is value[name] for name in kept)
        return value if is_same else kept
    if element is not None and isinstance(value, (list, tuple)):
        made = [_without(element, part) for part in value]
        return value if all(map(is_, made, value)) else made
    return value
