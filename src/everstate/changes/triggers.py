"""Attribute triggers: which changes of an entity fire, by how its fields change. Pure.

``when("status").changes(to="cancelled")`` is a condition on one change. It filters a view, a
derived topic or a subscription, and may be combined: ``a & b``, ``a | b``, ``~a``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from everstate.errors import InvalidTrigger

if TYPE_CHECKING:
    import pyarrow as pa

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
        """Check that the field exists, and that its type can have these values."""
        kind = field_type(entity_type, self.path)
        for value in (*(self.before or ()), *(self.after or ())):
            _check_value(entity_type, self.path, kind, value)

    def fires(self, entity_type: EntityType, original: State | None, current: State | None) -> bool:
        """Whether the field differs; a missing state counts as null."""
        kind = field_type(entity_type, self.path)
        old, new = (_comparable(kind, _found(state, self.path)) for state in (original, current))
        if old == new:
            return False
        return (self.before is None or old in _keys(self.before)) and (
            self.after is None or new in _keys(self.after)
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


def _keys(values: Sequence[Value]) -> set[tuple[type, Value]]:
    return {(type(value), value) for value in values}


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
        or (isinstance(value, int) and not isinstance(value, bool) and types.is_integer(kind))
        or (isinstance(value, str) and types.is_string(kind))
    )
    if not fits:
        raise InvalidTrigger(
            f"{entity_type.name}.{'.'.join(path)} is {kind}; it cannot be asked for {value!r}.",
            advice="Values of text, whole number and boolean fields can be named; changes() "
            "without values goes with every field.",
        )


def _comparable(kind: pa.DataType, value: Any) -> Any:
    """A value in a form in which equal values compare equal, as they do in the typed columns."""
    from pyarrow import types

    if value is None:
        return (type(None), None)
    try:
        if types.is_decimal(kind):
            return Decimal(str(value))
        if types.is_floating(kind):
            return float(value)
        if types.is_timestamp(kind):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo is None else moment.astimezone(UTC)
        if types.is_date(kind):
            return date.fromisoformat(value)
    except (ValueError, TypeError, ArithmeticError):
        pass
    return (type(value), value) if isinstance(value, (str, int)) else repr(value)


__all__ = ["Trigger", "When", "field_type", "trigger_of", "when"]
