"""Where a model has numbers and times, so that a rule is applied there and nowhere else. Pure."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AliasChoices,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    NaiveDatetime,
    PlainValidator,
    RootModel,
    WrapValidator,
)

PlaceKind: TypeAlias = Literal["decimal", "integer", "float", "date", "time"]
ValuePath: TypeAlias = tuple[str | int, ...]
_KINDS: Final[tuple[tuple[type, PlaceKind], ...]] = (
    (Decimal, "decimal"),
    (int, "integer"),
    (float, "float"),
    (datetime, "time"),
    (date, "date"),
)
_OWN_RULES: Final = (BeforeValidator, PlainValidator, WrapValidator)


@dataclass(slots=True, eq=False)
class ValuePlace:
    """The numbers and times that a value of some annotation may have, at any depth."""

    kind: PlaceKind | None = None
    has_own_rules: bool = False
    """Whether the model itself converts what is given here."""
    members: dict[str, ValuePlace] = field(default_factory=dict)
    """Of an object, by every name that the input may use."""
    element: ValuePlace | None = None
    """Of the elements of a list or a set, or the values of a mapping."""
    keeps_unknown: bool = False
    """Whether fields that the model does not have are kept."""
    names: frozenset[str] = frozenset()
    """Of an object that keeps unknown fields: the names of those that it has."""
    plain: type | None = None
    """The type of values that no rule changes."""

    def __post_init__(self) -> None:
        self.plain = next((plain for plain, kind in _KINDS if kind == self.kind), None)


_ANYTHING: Final = ValuePlace(keeps_unknown=True)
"""Any JSON, as commands may have it; the rule is asked for the whole value."""

Rule: TypeAlias = Callable[[ValuePlace, Any, ValuePath], Any]
"""Returns what a value of a place is replaced by."""


@lru_cache(maxsize=1024)
def has_many_texts(model: type[BaseModel]) -> bool:
    """Whether equal values of a model may have different texts: decimals and times."""
    found = places_of(model)
    return found is not None and _has(found, set(), ("decimal", "time"))


@lru_cache(maxsize=1024)
def places_of(model: type[BaseModel]) -> ValuePlace | None:
    """The places of a model; ``None``: it has none."""
    found = _model_place(model, {})
    return found if _has(found, set()) else None


def apply(place: ValuePlace, value: Any, rule: Rule, at: ValuePath = ()) -> Any:
    """The value with the rule applied at each place of it; a changed part is copied.

    The rule is not asked for values of the very type that the place has.
    """
    if place is _ANYTHING:
        return rule(place, value, at)
    if isinstance(value, Mapping):
        changed = {}
        inside = place.members
        if place.element is not None:
            inside = dict.fromkeys(value, place.element)
        for name, part in inside.items():
            given = value.get(name)
            if given is None or given.__class__ is part.plain:
                continue
            after = apply(part, given, rule, (*at, name))
            if after is not given:
                changed[name] = after
        if place.keeps_unknown:
            for name in value.keys() - place.names:
                rule(place, value[name], (*at, name))
        return {**value, **changed} if changed else value
    if isinstance(value, (list, tuple)):
        element = place.element
        if element is None:
            return value
        made = [
            each
            if each is None or each.__class__ is element.plain
            else apply(element, each, rule, (*at, n))
            for n, each in enumerate(value)
        ]
        is_same = all(one is other for one, other in zip(made, value, strict=True))
        return value if is_same else made
    return value if place.kind is None else rule(place, value, at)


def _has(
    place: ValuePlace | None, seen: set[int], kinds: Sequence[PlaceKind] | None = None
) -> bool:
    """Whether a place has one of these kinds, at any depth; ``None``: it has any rule at all."""
    if place is None or id(place) in seen:
        return False
    seen.add(id(place))
    if place.keeps_unknown if kinds is None else place.kind in kinds:
        return True
    if kinds is None and place.kind is not None:
        return True
    return any(_has(part, seen, kinds) for part in (*place.members.values(), place.element))


def _model_place(model: type[BaseModel], known: dict[type, ValuePlace]) -> ValuePlace:
    if model in known:
        return known[model]
    place = known[model] = ValuePlace()
    if issubclass(model, RootModel):
        root = _place(model.model_fields["root"].annotation, known) or place
        place.kind, place.members, place.element = root.kind, root.members, root.element
        return place
    decorators = model.__pydantic_decorators__
    converted = {
        name
        for each in decorators.field_validators.values()
        if each.info.mode != "after"
        for name in each.info.fields
    }
    is_converted = any(each.info.mode != "after" for each in decorators.model_validators.values())
    names = set()
    for name, info in model.model_fields.items():
        annotation: Any = info.annotation
        found = _place(
            Annotated[annotation, *info.metadata] if info.metadata else annotation, known
        )
        given = {name, info.alias or name, *_aliases(info.validation_alias)}
        names |= given
        if found is None:
            continue
        if found.kind is not None and (is_converted or not converted.isdisjoint({name, "*"})):
            found = ValuePlace(found.kind, has_own_rules=True)
        place.members.update(dict.fromkeys(given, found))
    if model.model_config.get("extra") == "allow":
        place.keeps_unknown, place.names = True, frozenset(names)
    return place


def _aliases(alias: Any) -> list[str]:
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [alias] if isinstance(alias, str) else []


def _place(annotation: Any, known: dict[type, ValuePlace]) -> ValuePlace | None:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found = _place(parts[0], known)
        if found is not None and any(isinstance(each, _OWN_RULES) for each in parts[1:]):
            return ValuePlace(found.kind, True, found.members, found.element)
        return found
    if origin in (Union, types.UnionType):
        return _union([part for part in parts if part is not types.NoneType], known)
    if annotation in (Any, object, dict, list):
        return _ANYTHING
    if annotation in (AwareDatetime, NaiveDatetime):
        return ValuePlace("time")
    if isinstance(annotation, type) and origin is None:
        if issubclass(annotation, BaseModel):
            return _model_place(annotation, known)
        if issubclass(annotation, (bool, Enum)):
            return None
        return next(
            (ValuePlace(kind) for plain, kind in _KINDS if issubclass(annotation, plain)), None
        )
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(parts) == 2:
        inside = _place(parts[1], known)
    elif isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
        inside = _union([part for part in parts if part is not Ellipsis], known)
    else:
        return None
    return None if inside is None else ValuePlace(element=inside)


def _union(annotations: Sequence[Any], known: dict[type, ValuePlace]) -> ValuePlace | None:
    """The place of a value that has one of several types."""
    found = [place for each in annotations if (place := _place(each, known)) is not None]
    if len(annotations) == 1 or not found:
        return found[0] if found else None
    kinds = {place.kind for place in found if place.kind is not None}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None and kinds == {"date", "time"}:
        kind = "time"
    elif kind is None and kinds == {"integer", "decimal"}:
        kind = "decimal"
    members = {name: part for place in found[::-1] for name, part in place.members.items()}
    elements = [place.element for place in found if place.element is not None]
    return ValuePlace(
        None if str in annotations else kind,
        members=members,
        element=elements[0] if elements and not members else None,
    )
