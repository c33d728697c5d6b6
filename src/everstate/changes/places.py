"""Where a model has numbers and times, so that a rule is applied there and nowhere else. Pure."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
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
from pydantic.fields import FieldInfo

from everstate.changes.annotations import meant

PlaceKind: TypeAlias = Literal["decimal", "integer", "float", "date", "time", "text"]
"""`text`: a text that a model makes of a number too."""
ValuePath: TypeAlias = tuple[str | int, ...]
_KINDS: Final[tuple[tuple[type, PlaceKind], ...]] = (
    (Decimal, "decimal"),
    (int, "integer"),
    (float, "float"),
    (datetime, "time"),
    (date, "date"),
)
_PLAIN: Final = (*_KINDS, (str, "text"))
_OWN_RULES: Final = (BeforeValidator, PlainValidator, WrapValidator)


@dataclass(slots=True, eq=False)
class ValuePlace:
    """The numbers and times that a value of some annotation may have, at any depth."""

    kind: PlaceKind | None = None
    has_own_rules: bool = False
    """Whether the model itself converts what is given here."""
    takes_others: bool = False
    """Whether a value may also be of a type without a place, such as a boolean."""
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
        self.plain = next((plain for plain, kind in _PLAIN if kind == self.kind), None)


_TEXTS: Final = (str, bytes, bytearray)
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
def makes_texts(model: type[BaseModel]) -> bool:
    """Whether a model makes texts of numbers (pydantic's `coerce_numbers_to_str`)."""
    found = places_of(model)
    return found is not None and _has(found, set(), ("text",))


@lru_cache(maxsize=1024)
def places_of(model: type[BaseModel]) -> ValuePlace | None:
    """The places of a model; ``None``: it has none."""
    found = _model_place(model, {})
    return found if _has(found, set()) else None


def apply(place: ValuePlace, value: Any, rule: Rule, at: ValuePath = ()) -> Any:
    """The value with the rule applied at each place of it; a changed part is copied.

    The rule is not asked for values of the very type that the place has. It is asked for an
    iterator, which can be read only once, and not for what that gives.
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
    if place.element is not None and isinstance(value, Iterable) and not isinstance(value, _TEXTS):
        if isinstance(value, Iterator):
            return rule(place, value, at)
        # No JSON: a set, a view of a mapping, or a queue.
        apply(place, list(value), rule, at)
        return value
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
        info = model.model_fields["root"]
        root = _place(info.annotation, known, makes_texts=_makes_texts(model, info)) or place
        if root is _ANYTHING:
            known[model] = root
            return root
        place.kind, place.members, place.element = root.kind, root.members, root.element
        place.has_own_rules, place.takes_others = root.has_own_rules, root.takes_others
        place.keeps_unknown, place.names, place.plain = root.keeps_unknown, root.names, root.plain
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
            Annotated[annotation, *info.metadata] if info.metadata else annotation,
            known,
            makes_texts=_makes_texts(model, info),
        )
        given = {name, info.alias or name, *_aliases(info.validation_alias)}
        names |= given
        if found is None:
            continue
        if found.kind is not None and (is_converted or not converted.isdisjoint({name, "*"})):
            found = replace(found, has_own_rules=True)
        place.members.update(dict.fromkeys(given, found))
    if model.model_config.get("extra") == "allow":
        place.keeps_unknown, place.names = True, frozenset(names)
    return place


def _makes_texts(model: type[BaseModel], info: FieldInfo) -> bool:
    """Whether a text field of a model takes numbers; a strict model takes none."""
    config = model.model_config
    if config.get("strict"):
        return False
    own = (getattr(each, "coerce_numbers_to_str", None) for each in info.metadata)
    return any(own) or bool(config.get("coerce_numbers_to_str"))


def _aliases(alias: Any) -> list[str]:
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [alias] if isinstance(alias, str) else []


def _place(
    annotation: Any, known: dict[type, ValuePlace], *, makes_texts: bool
) -> ValuePlace | None:
    annotation = meant(annotation)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found = _place(parts[0], known, makes_texts=makes_texts)
        if found is not None and any(isinstance(each, _OWN_RULES) for each in parts[1:]):
            return replace(found, has_own_rules=True, keeps_unknown=False)
        return found
    if origin in (Union, types.UnionType):
        members = [part for part in parts if part is not types.NoneType]
        return _union(members, known, makes_texts=makes_texts)
    if annotation in (Any, object, dict, list):
        return _ANYTHING
    if annotation in (AwareDatetime, NaiveDatetime):
        return ValuePlace("time")
    if isinstance(annotation, type) and origin is None:
        if issubclass(annotation, BaseModel):
            return _model_place(annotation, known)
        if issubclass(annotation, (bool, Enum)):
            return None
        if annotation is str:
            return ValuePlace("text") if makes_texts else None
        return next(
            (ValuePlace(kind) for plain, kind in _KINDS if issubclass(annotation, plain)), None
        )
    if isinstance(origin, type) and issubclass(origin, Mapping) and len(parts) == 2:
        inside = _place(parts[1], known, makes_texts=makes_texts)
    elif isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
        members = [part for part in parts if part is not Ellipsis]
        inside = _union(members, known, makes_texts=makes_texts)
    else:
        return None
    return None if inside is None else ValuePlace(element=inside)


def _union(
    annotations: Sequence[Any], known: dict[type, ValuePlace], *, makes_texts: bool
) -> ValuePlace | None:
    """The place of a value that has one of several types."""
    places = [_place(each, known, makes_texts=makes_texts) for each in annotations]
    found = [place for place in places if place is not None]
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
        takes_others=len(found) < len(annotations),
        members=members,
        element=elements[0] if elements and not members else None,
    )
