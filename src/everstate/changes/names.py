"""Whether fields are read by their names in Python beside those in JSON. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import BaseModel

from everstate.changes.fields import FieldTree, objects_of


@lru_cache(maxsize=1024)
def by_name(model: type[BaseModel]) -> Literal[True] | None:
    """Whether fields are read by their names too, where their aliases are absent.

    Earlier releases wrote the names of some fields that have an alias. ``None``: as the model says;
    a field's name may be the alias of another one.
    """
    aliased = [each for each in objects_of(model).values() if _owners(each)]
    return True if aliased and not any(map(_has_two_meanings, aliased)) else None


@lru_cache(maxsize=1024)
def command_fault(model: type[BaseModel]) -> str | None:
    """Why a command would be read otherwise than it was written; ``None``: it is read as written.

    Commands are written with the names of their fields, or with aliases where a model says so.
    """
    objects = objects_of(model)
    by_names = [each for each in objects if not each.model_config.get("serialize_by_alias")]
    if any(_owners(objects[each]) for each in by_names):
        for each, tree in objects.items():
            if name := _has_two_meanings(tree):
                return f"{each.__name__}.{name}: its name is the alias of another field"
    for each in objects.keys() - set(by_names):
        for field in objects[each].unread:
            return (
                f"{each.__name__}.{field.name} is written as {field.written!r}, which is not read"
            )
    return None


def _has_two_meanings(tree: FieldTree) -> str | None:
    """The first field whose name is the alias of another one."""
    owners = _owners(tree)
    names = (each.name for each in tree.fields)
    return next((name for name in names if owners.get(name, {name}) != {name}), None)


def _owners(tree: FieldTree) -> dict[str, set[str]]:
    """The fields that are read from each alias, or from a part of its value."""
    owners = dict[str, set[str]]()
    for each in tree.fields:
        for alias in each.aliases:
            owners.setdefault(alias, set()).add(each.name)
    return owners
