"""Attribute triggers: which changes of an entity fire, by how its fields change. Pure.

``when("status").changes(to="cancelled")`` is a condition on one change. It filters a view, a
derived topic or a subscription, and may be combined: ``a & b``, ``a | b``, ``~a``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from everstate.changes.arrow import arrow_type
from everstate.changes.fields import FieldTree, tree_of
from everstate.changes.typed import typed_value
from everstate.errors import InvalidTrigger

if TYPE_CHECKING:
    from everstate.changes.entity import EntityType

State: TypeAlias = Mapping[str, Any]
"""A state of an entity, its field names and JSON values."""
Value: TypeAlias = str | int | bool | None

_ANY: Final = object()
"""The value before or after a change is not restricted."""


class Trigger(ABC):
    """A condition on one change; combine with ``&``, ``|`` and ``~``."""

    __slots__ = ()

    def __and__(self, other: Trigger) -> Trigger:
        return Combined("and", (self, other))

    def __or__(self, other: Trigger) -> Trigger:
        return Combined("or", (self, other))

    def __invert__(self) -> Trigger:
        return Combined("not", (self,))

    @property
    @abstractmethod
    def definition(self) -> dict[str, Any]:
        """The trigger in its stored form, which :func:`trigger_of` reads."""

    @abstractmethod
    def check(self, entity_type: EntityType) -> None:
        """Raise InvalidTrigger for a field or value that the entity type's model does not have."""

    @abstractmethod
    def fires(self, entity_type: EntityType, original: State | None, current: State | None) -> bool:
        """Whether a change fires; the states are decoded JSON, ``None`` when there is none."""


@dataclass(frozen=True, slots=True)
class Changed(Trigger):
    """Fires when a field's value changes; ``before`` and ``after`` restrict the values."""

    path: tuple[str, ...]
    before: tuple[Value, ...] | None = None
    """``None``: any value."""
    after: tuple[Value, ...] | None = None

    @property
    def definition(self) -> dict[str, Any]:
        """The field, and the values where they are restricted."""
        told: dict[str, Any] = {"field": ".".join(self.path)}
        if self.before is not None:
            told["from"] = list(self.before)
        if self.after is not None:
            told["to"] = list(self.after)
        return told

    def check(self, entity_type: EntityType) -> None:
        """Check that the field exists and can be compared, and can have these values."""
        tree = field_of(entity_type, self.path)
        if any(each.type == "map" for each in tree.walk(computed=True)):
            raise InvalidTrigger(
                f"{entity_type.name}.{'.'.join(self.path)} has a dict, and Spark cannot tell "
                "whether two of them are equal.",
                advice="Name another field. A nested model instead of the dict can be compared.",
            )
        for value in (*(self.before or ()), *(self.after or ())):
            _check_value(entity_type, self.path, tree, value)
        for value in self.after or ():
            # Old states may have a value that the model has no more.
            if value is not None and tree.values is not None and value not in tree.values:
                raise InvalidTrigger(
                    f"{entity_type.name}.{'.'.join(self.path)} never is {value!r}.",
                    advice=f"Its values are {', '.join(map(repr, tree.values))}.",
                )

    def fires(self, entity_type: EntityType, original: State | None, current: State | None) -> bool:
        """Whether the field's typed column differs; a missing state counts as null."""
        kind = arrow_type(field_of(entity_type, self.path))
        states = (entity_type.today(each, lambda _: None) for each in (original, current))
        old, new = (typed_value(kind, _found(state, self.path)) for state in states)
        if old == new:
            return False
        return (self.before is None or old in self.before) and (
            self.after is None or new in self.after
        )


@dataclass(frozen=True, slots=True)
class Combined(Trigger):
    """Triggers combined by `and`, `or` or `not`."""

    word: Literal["and", "or", "not"]
    parts: tuple[Trigger, ...]

    @property
    def definition(self) -> dict[str, Any]:
        """The word and its parts."""
        return {self.word: [part.definition for part in self.parts]}

    def check(self, entity_type: EntityType) -> None:
        """Check each part."""
        for part in self.parts:
            part.check(entity_type)

    def fires(self, entity_type: EntityType, original: State | None, current: State | None) -> bool:
        """Whether all parts fire (`and`), any part (`or`), or the only part does not (`not`)."""
        found = (part.fires(entity_type, original, current) for part in self.parts)
        if self.word == "not":
            return not next(found)
        return all(found) if self.word == "and" else any(found)


@dataclass(frozen=True, slots=True)
class When:
    """A field on which a trigger depends."""

    path: tuple[str, ...]

    def changes(self, *, to: Any = _ANY, from_: Any = _ANY) -> Trigger:
        """Fires when the field's value changes, also by a creation or a deletion.

        ``to`` and ``from_`` name the value after and before, or several of them in a list or
        tuple. An entity that does not exist has the value ``None``.
        """
        return Changed(self.path, _values(from_), _values(to))


def when(field: str) -> When:
    """Name the field of a trigger; ``address.city`` is a field of a nested model."""
    return When(tuple(field.split(".")))


def trigger_of(definition: Mapping[str, Any]) -> Trigger:
    """The trigger that has this definition; raises InvalidTrigger when it is not a definition."""
    for word in ("and", "or", "not"):
        if word in definition:
            return Combined(word, tuple(trigger_of(part) for part in definition[word]))
    if "field" not in definition:
        raise InvalidTrigger(f"{definition!r} is no trigger.")
    sides = (definition.get("from"), definition.get("to"))
    before, after = (None if side is None else tuple(side) for side in sides)
    return Changed(tuple(definition["field"].split(".")), before, after)


def field_of(entity_type: EntityType, path: Sequence[str]) -> FieldTree:
    """A field by its path; raises InvalidTrigger when there is none."""
    tree = tree_of(entity_type.model)
    for part in path:
        inside = {each.written: each.tree for each in tree.columns}
        if part not in inside:
            raise InvalidTrigger(
                f"{entity_type.name} has no field {'.'.join(path)!r}.",
                advice=f"Its fields are {', '.join(inside)}." if inside else None,
            )
        tree = inside[part]
    return tree


def _values(side: Any) -> tuple[Value, ...] | None:
    if side is _ANY:
        return None
    if isinstance(side, (set, frozenset)):
        side = sorted(side, key=repr)
    values = tuple(side) if isinstance(side, (list, tuple)) else (side,)
    return tuple(value.value if isinstance(value, Enum) else value for value in values)


def _found(state: State | None, path: Sequence[str]) -> Any:
    value: Any = state
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _check_value(entity_type: EntityType, path: Sequence[str], tree: FieldTree, value: Any) -> None:
    fits = value is None or (
        (isinstance(value, bool) and tree.type == "boolean")
        or (tree.type == "integer" and typed_value(arrow_type(tree), value) is not None)
        or (isinstance(value, str) and tree.type == "text")
    )
    if not fits:
        raise InvalidTrigger(
            f"{entity_type.name}.{'.'.join(path)} is {arrow_type(tree)}; it cannot be asked for "
            f"{value!r}.",
            advice="Values of text, whole number and boolean fields can be named; changes() "
            "without values goes with every field.",
        )
