"""Attribute triggers: which changes of an entity fire, by how its fields change. Pure.

``when("status").changes(to="cancelled")`` is a condition on one change. It filters a view, a
derived topic or a subscription, and may be combined: ``a & b``, ``a | b``, ``~a``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
)

from everstate.changes.annotations import meant
from everstate.changes.names import written_name
from everstate.changes.typed import typed_value
from everstate.errors import InvalidTrigger

if TYPE_CHECKING:
    import pyarrow as pa
    from pydantic import BaseModel

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
        kind = field_type(entity_type, self.path)
        if _has_map(kind):
            raise InvalidTrigger(
                f"{entity_type.name}.{'.'.join(self.path)} has a dict, and Spark cannot tell "
                "whether two of them are equal.",
                advice="Name another field. A nested model instead of the dict can be compared.",
            )
        allowed = _named_values(entity_type.model, self.path)
        for value in (*(self.before or ()), *(self.after or ())):
            _check_value(entity_type, self.path, kind, value)
        for value in self.after or ():
            # Old states may have a value that the model has no more.
            if value is not None and allowed is not None and value not in allowed:
                raise InvalidTrigger(
                    f"{entity_type.name}.{'.'.join(self.path)} never is {value!r}.",
                    advice=f"Its values are {', '.join(map(repr, allowed))}.",
                )

    def fires(self, entity_type: EntityType, original: State | None, current: State | None) -> bool:
        """Whether the field's typed column differs; a missing state counts as null."""
        kind = field_type(entity_type, self.path)
        old, new = (typed_value(kind, _found(state, self.path)) for state in (original, current))
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


def field_type(entity_type: EntityType, path: Sequence[str]) -> pa.DataType:
    """Arrow type of a field by its path; raises InvalidTrigger when there is none."""
    import pyarrow

    kind: pa.DataType = pyarrow.struct(list(entity_type.arrow_schema))
    for part in path:
        names = [field.name for field in kind] if pyarrow.types.is_struct(kind) else []
        if part not in names:
            raise InvalidTrigger(
                f"{entity_type.name} has no field {'.'.join(path)!r}.",
                advice=f"Its fields are {', '.join(names)}." if names else None,
            )
        kind = kind.field(part).type
    return kind


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


def _check_value(
    entity_type: EntityType, path: Sequence[str], kind: pa.DataType, value: Any
) -> None:
    from pyarrow import types

    fits = value is None or (
        (isinstance(value, bool) and types.is_boolean(kind))
        or (types.is_integer(kind) and typed_value(kind, value) is not None)
        or (isinstance(value, str) and types.is_string(kind))
    )
    if not fits:
        raise InvalidTrigger(
            f"{entity_type.name}.{'.'.join(path)} is {kind}; it cannot be asked for {value!r}.",
            advice="Values of text, whole number and boolean fields can be named; changes() "
            "without values goes with every field.",
        )


def _named_values(model: type[BaseModel], path: Sequence[str]) -> tuple[Value, ...] | None:
    """The values of a Literal or an enum; ``None``: the field is neither."""
    annotation: Any = model
    for part in path:
        found = {
            written_name(name, info): info.annotation
            for name, info in annotation.model_fields.items()
        }
        for name, computed in annotation.model_computed_fields.items():
            found[computed.alias or name] = computed.return_type
        annotation = _without_none(found[part])
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(member.value for member in annotation)
    return None


def _without_none(annotation: Any) -> Any:
    """The type of a field without `None` and without constraints."""
    annotation = meant(annotation)
    parts = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is Annotated or (
        get_origin(annotation) in (Union, UnionType) and len(parts) == 1
    ):
        return _without_none(parts[0])
    return annotation


def _has_map(kind: pa.DataType) -> bool:
    """Whether a type is a map, or has one in it."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(_has_map(field.type) for field in kind)
    return _has_map(kind.value_type) if types.is_list(kind) else bool(types.is_map(kind))


__all__ = ["Trigger", "When", "field_type", "trigger_of", "when"]
