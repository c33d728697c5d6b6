"""The handler group of an entity type: two pure functions and the commands that they decide."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.accepting import NotAccepted, accept
from everstate.errors import InvalidCommand, InvalidEntityType, UnknownEntity

Decide = Callable[[Any, Any], Any]
"""``decide(state, command)`` → a fact, facts, ``None`` (nothing follows), or ``Rejected``."""

Evolve = Callable[[Any, Any], Any]
"""``evolve(state, fact)`` → the state after it; ``None``: the entity is deleted."""


@dataclass(frozen=True)
class CommandGroup:
    """The handler group of an entity type: ``decide``, ``evolve`` and its commands.

    ``state`` is the entity's model, or ``None`` when it does not exist (yet, or any more). Both
    functions must be pure: no clock, no randomness, no I/O; time and ids come with the command.
    """

    entity_type: EntityType
    decide: Decide
    evolve: Evolve
    commands: Sequence[type[BaseModel]]
    by_name: Mapping[str, type[BaseModel]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, type[BaseModel]] = {}
        for model in self.commands:
            if not (isinstance(model, type) and issubclass(model, BaseModel)):
                raise InvalidEntityType(
                    f"{self.entity_type.name}: command {model!r} is no pydantic model"
                )
            if by_name.setdefault(model.__name__, model) is not model:
                raise InvalidEntityType(
                    f"{self.entity_type.name}: two commands are named {model.__name__!r}"
                )
        if not by_name:
            raise InvalidEntityType(f"{self.entity_type.name}: no commands are given")
        object.__setattr__(self, "by_name", by_name)

    @property
    def name(self) -> str:
        """Name of the entity type."""
        return self.entity_type.name

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the entity's schema and of the code of both functions.

        A local state with another fingerprint is rebuilt from the log.
        """
        parts = [
            json.dumps(self.entity_type.model.model_json_schema(), sort_keys=True),
            str(self.entity_type.schema_version),
            *(code_of(function) for function in (self.decide, self.evolve)),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def read(self, name: str, text: bytes | str) -> BaseModel:
        """The command that a client wrote as JSON; raises InvalidCommand naming the field."""
        try:
            return accept(self.by_name[name], text)
        except NotAccepted as cause:
            ((where, reason),) = cause.problems("data")
            raise InvalidCommand(f"{name}: {where}: {reason}") from cause

    def check(self, command: BaseModel) -> str:
        """Name of a command; raises InvalidCommand when this entity type does not have it."""
        name = command.__class__.__name__
        if self.by_name.get(name) is not command.__class__:
            known = ", ".join(self.by_name)
            raise InvalidCommand(f"{self.name} takes no command {name!r} (it takes {known}).")
        return name


def group_of(groups: Mapping[str, CommandGroup], entity: str) -> CommandGroup:
    """Handler group of an entity type; raises UnknownEntity when it has no commands."""
    if entity not in groups:
        raise UnknownEntity(entity, tuple(groups))
    return groups[entity]


def facts_of(decided: Any) -> Iterable[Any]:
    """The result of ``decide`` as facts, in their order."""
    if decided is None:
        return ()
    if isinstance(decided, list | tuple):
        return decided
    if isinstance(decided, Iterable) and not isinstance(decided, BaseModel):
        return tuple(decided)
    return (decided,)


def code_of(function: Callable[..., Any]) -> str:
    """Text that changes when a function's own code changes."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return repr(function) if code is None else f"{code.co_code!r}{code.co_consts!r}"
