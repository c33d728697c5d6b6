"""The names of a model's fields in JSON: those that are written, and those that are read. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AliasChoices, AliasPath, BaseModel

from everstate.changes.unknown import models_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def written_name(name: str, info: FieldInfo) -> str:
    """The name with which a state's JSON has a field."""
    return info.serialization_alias or info.alias or name


def unread_name(model: type[BaseModel], name: str) -> str | None:
    """The written name of a field that the model does not read; ``None``: it is read.

    A model that converts its whole input itself may read any name.
    """
    info = model.model_fields[name]
    if info.exclude or reads_any_name(model):
        return None
    written = written_name(name, info)
    return None if written in _read_names(model, name) else written


def reads_any_name(model: type[BaseModel]) -> bool:
    """Whether a model converts its whole input itself."""
    validators = model.__pydantic_decorators__.model_validators.values()
    return any(each.info.mode != "after" for each in validators)


def read_field(model: type[BaseModel], given: str) -> str | None:
    """The field that a model reads from a name in its input; ``None``: there is none."""
    return next((name for name in model.model_fields if given in _read_names(model, name)), None)


def _read_names(model: type[BaseModel], name: str) -> set[str]:
    """The names from which a model reads a field."""
    info, config = model.model_fields[name], model.model_config
    names = set[str]()
    if config.get("validate_by_alias") is not False:
        names |= {path[0] for path in _paths(info) if len(path) == 1}
    if not info.validation_alias or config.get("validate_by_name", config.get("populate_by_name")):
        names.add(name)
    return names


def known_names(model: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Each field and computed field, with every name of it in states: first the written one."""
    known = {
        name: (written_name(name, info), name, *(path[0] for path in _paths(info)))
        for name, info in model.model_fields.items()
    }
    computed = model.model_computed_fields
    return known | {name: (info.alias or name, name) for name, info in computed.items()}


@lru_cache(maxsize=1024)
def by_name(model: type[BaseModel]) -> Literal[True] | None:
    """Whether fields are read by their names too, where their aliases are absent.

    Earlier releases wrote the names of some fields that have an alias. ``None``: as the model says;
    a field's name may be the alias of another one.
    """
    aliased = [each for each in models_of(model) if _owners(each)]
    return True if aliased and not any(map(_has_two_meanings, aliased)) else None


@lru_cache(maxsize=1024)
def command_fault(model: type[BaseModel]) -> str | None:
    """Why a command would be read otherwise than it was written; ``None``: it is read as written.

    Commands are written with the names of their fields, or with aliases where a model says so.
    """
    by_names = [
        each for each in models_of(model) if not each.model_config.get("serialize_by_alias")
    ]
    if any(map(_owners, by_names)):
        for each in models_of(model):
            if name := _has_two_meanings(each):
                return f"{each.__name__}.{name}: its name is the alias of another field"
    for each in models_of(model).difference(by_names):
        for name in each.model_fields:
            if written := unread_name(each, name):
                return f"{each.__name__}.{name} is written as {written!r}, which is not read"
    return None


def _has_two_meanings(model: type[BaseModel]) -> str | None:
    """The first field whose name is the alias of another one."""
    owners = _owners(model)
    return next(
        (name for name in model.model_fields if owners.get(name, {name}) != {name}),
        None,
    )


def _owners(model: type[BaseModel]) -> dict[str, set[str]]:
    """The fields that are read from each alias, or from a part of its value."""
    owners = dict[str, set[str]]()
    for name, info in model.model_fields.items():
        for path in _paths(info):
            owners.setdefault(path[0], set()).add(name)
    return owners


def _paths(info: FieldInfo) -> list[tuple[Any, ...]]:
    """The places in the input that a field's aliases name."""
    alias: Any = info.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else []
    return [tuple(one.path) if isinstance(one, AliasPath) else (one,) for one in choices]
