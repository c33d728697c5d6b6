"""A whole state from a caller that does not see all of it: what it cannot see is kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from everstate.changes.fields import FieldTree, tree_of
from everstate.errors import InvalidBody
from everstate.http.masks import Mask, Path
from everstate.sources.crud.patches import member_of


def with_hidden(mask: Mask, model: type[BaseModel], given: Any, stored: Any) -> Any:
    """The given state with the hidden fields that it lacks, as they are stored.

    Raises InvalidBody where no place tells which value belongs to which: in the objects of a list,
    and where an object that has hidden fields is left out or replaced by another value. A caller
    that sees nothing of a state replaces all of it.
    """
    for path in mask.paths:
        if path:
            given = _filled(mask.entity, path, (), tree_of(model), given, stored)
    return given


def _filled(
    entity: str, path: Path, at: Path, tree: FieldTree | None, given: Any, stored: Any
) -> Any:
    if not path or not _has(stored, path):
        return given
    name, *inner = path
    if not (isinstance(given, dict) and isinstance(stored, dict)):
        if _has(given, path, all):
            return given
        reason = "has fields that this caller does not see; change the others with PATCH"
        raise InvalidBody(entity, ((".".join(at), reason),))
    given = {member_of(tree, each).name: value for each, value in given.items()}
    if not inner:
        return given if name in given else {**given, name: stored[name]}
    inside = member_of(tree, name).tree
    filled = _filled(entity, tuple(inner), (*at, name), inside, given.get(name), stored[name])
    return {**given, name: filled}


def _has(value: Any, path: Path, of_list: Callable[[Iterable[bool]], bool] = any) -> bool:
    """Whether a value has a field, at any place of a list, or with ``all`` in each object of it."""
    if not path:
        return True
    if isinstance(value, list):
        return bool(value) and of_list(_has(each, path, of_list) for each in value)
    is_there = isinstance(value, dict) and path[0] in value
    return is_there and _has(value[path[0]], path[1:], of_list)
