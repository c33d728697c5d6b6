"""Which values a state may hold, and how the elements of sets are sorted. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, RootModel, TypeAdapter

from everstate.changes.depth import TOO_DEEP, is_too_deep
from everstate.changes.fields import tree_of
from everstate.changes.moments import ODD_OFFSET, holds_offset, is_kept, with_minutes

T = TypeVar("T")

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_AS_ZEROS = bytes.maketrans(b"0123456789", b"0000000000")
_INT64_DIGITS = b"0" * len(str(_INT64_MAX))

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def may_hold_unstorable(encoded: bytes) -> bool:
    """Whether JSON text may come from a number that :func:`storable` refuses.

    A float that is not finite becomes ``null`` by default; a decimal, or a float of a model that is
    configured so, becomes a word such as ``NaN``. This check costs a tenth of a walk through the
    values.
    """
    return (
        b"null" in encoded
        or b"NaN" in encoded
        or b"Infinity" in encoded
        or _INT64_DIGITS in encoded.translate(_AS_ZEROS)
    )


def parts_of(value: Any) -> Iterable[Any]:
    """The values that a value consists of, computed ones too; nothing for one without parts."""
    if isinstance(value, BaseModel):
        computed = (getattr(value, name) for name in value.__class__.model_computed_fields)
        unknown = value.__pydantic_extra__ or {}
        return (*value.__dict__.values(), *unknown.values(), *computed)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value)]
    return ()


def times_in(value: Any) -> Iterator[datetime]:
    """Every time in a value of an entity's field, at any depth."""
    if isinstance(value, datetime):
        yield value
    for part in parts_of(value):
        yield from times_in(part)


def has_kept_times(value: Any) -> bool:
    """Whether every time in a value is one that can be stored, or has no offset."""
    return all(map(is_kept, times_in(value)))


def all_with_minutes(value: T) -> T:
    """A value with :func:`with_minutes` of all its times: a copy of it, if that changes one.

    Raises ValueError for a time that a model computes, and TypeError for a value without a copy.
    """
    odd = [moment for moment in times_in(value) if with_minutes(moment) is not moment]
    if not odd:
        return value
    exact = deepcopy(value, {id(moment): with_minutes(moment) for moment in odd})
    for moment in times_in(exact):
        if with_minutes(moment) is not moment:
            raise ValueError(f"{moment}: {ODD_OFFSET}")
    return exact


def _has_set(value: Any) -> bool:
    return isinstance(value, AbstractSet) or any(map(_has_set, parts_of(value)))


def storable(value: Any) -> bool:
    """Whether a typed column can hold every number of a value."""
    kind = value.__class__
    if kind is int:
        return bool(_INT64_MIN <= value <= _INT64_MAX)
    if kind is Decimal:
        return bool(value.is_finite())
    if isinstance(value, (float, str)):
        return isinstance(value, str) or math.isfinite(value)
    return all(map(storable, parts_of(value)))


UNSTORABLE: Final = "NaN, infinity and integers beyond 64 bits are refused"


def model_json(value: Any, *, warns: bool = True) -> bytes:
    """JSON of a command or of a fact, a model or a dataclass; equal ones have the same everywhere.

    ``warns``: pydantic warns of a value that is of another type than its field. Raises ValueError
    for numbers that JSON would lose, and for values that are nested too deeply, and pydantic's
    errors for a value of another kind.
    """
    kind = value.__class__
    is_model = isinstance(value, BaseModel)
    serializer = kind.__pydantic_serializer__ if is_model else _adapter(kind).serializer
    encoded: bytes = serializer.to_json(value, warnings=warns)
    if is_too_deep(encoded):
        raise ValueError(TOO_DEEP)
    if may_hold_unstorable(encoded) and not storable(value):
        raise ValueError(UNSTORABLE)
    if holds_offset(encoded):
        exact = all_with_minutes(value)
        if exact is not value:
            return model_json(exact, warns=warns)
    return in_order(value, encoded)


_adapter: Final = lru_cache(maxsize=1024)(TypeAdapter)


def in_order(entity: Any, encoded: bytes) -> bytes:
    """The JSON of an entity, a command or a fact with the elements of its sets sorted.

    The order of a set differs between processes (Python's hash seed), and the same entity must
    have the same JSON everywhere: an equal state is no change.
    """
    return _encode(_ordered(entity, _decode(encoded))) if _has_set(entity) else encoded


@lru_cache(maxsize=1024)
def _names(model: type[BaseModel]) -> dict[str, str]:
    """The fields of a model by their names in states."""
    return {each.written: each.name for each in tree_of(model).columns}


def _ordered(value: Any, encoded: Any) -> Any:
    """Decoded JSON of a value with the elements of its sets sorted."""
    if isinstance(value, RootModel):
        return _ordered(value.root, encoded)
    if isinstance(encoded, dict):
        # Commands and facts are written by the names of their fields.
        names = _names(value.__class__) if isinstance(value, BaseModel) else {}
        parts: Iterable[Any] = (getattr(value, names.get(name) or name, None) for name in encoded)
        if isinstance(value, Mapping):
            parts = value.values()
        pairs = zip(parts, encoded.items(), strict=True)
        return {name: _ordered(part, written) for part, (name, written) in pairs}
    if isinstance(encoded, list) and isinstance(value, (list, tuple, deque, AbstractSet)):
        made = [_ordered(*each) for each in zip(value, encoded, strict=True)]
        if not isinstance(value, AbstractSet):
            return made
        same = all(isinstance(part, str) for part in made)
        same = same or all(isinstance(part, int | float) for part in made)
        return sorted(made, key=None if same else _encode)
    return encoded
