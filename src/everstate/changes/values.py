"""Which values a state may hold, and how the elements of sets are sorted. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, get_args, get_origin

import msgspec
from pydantic import AwareDatetime, BaseModel, NaiveDatetime, RootModel

from everstate.changes.annotations import meant
from everstate.changes.depth import TOO_DEEP, is_too_deep
from everstate.changes.moments import all_with_minutes, holds_offset
from everstate.changes.names import written_name

NUMBERS: Final = (int, float, Decimal)
TIMES: Final = (datetime, AwareDatetime, NaiveDatetime)
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_AS_ZEROS = bytes.maketrans(b"0123456789", b"0000000000")
_INT64_DIGITS = b"0" * len(str(_INT64_MAX))

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def holds(plain: Collection[Any], annotation: Any, seen: set[type]) -> bool:
    """Whether a value of this annotation may hold one of these plain types at any depth."""
    annotation = meant(annotation)
    if annotation in plain:
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return False
        seen.add(annotation)
        if annotation.model_config.get("extra") == "allow":
            return True
        parts = [info.annotation for info in annotation.model_fields.values()]
        parts += [info.return_type for info in annotation.model_computed_fields.values()]
        return any(holds(plain, part, seen) for part in parts)
    return any(holds(plain, part, seen) for part in get_args(annotation))


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


def storable(value: Any) -> bool:
    """Whether a typed column can hold every number of a value."""
    kind = value.__class__
    if kind is int:
        return bool(_INT64_MIN <= value <= _INT64_MAX)
    if kind is str:
        return True
    if kind is Decimal:
        return bool(value.is_finite())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, BaseModel):
        computed = (getattr(value, name) for name in kind.model_computed_fields)
        parts = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        return all(storable(part) for part in (*parts.values(), *computed))
    if is_dataclass(value):
        return all(storable(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return all(storable(part) for part in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(storable(part) for part in value)
    return True


UNSTORABLE: Final = "NaN, infinity and integers beyond 64 bits are refused"


def model_json(value: BaseModel, *, warns: bool = True) -> bytes:
    """JSON of a command or of a fact; equal ones have the same JSON in every process.

    ``warns``: pydantic warns of a value that is of another type than its field. Raises ValueError
    for numbers that JSON would lose, and for values that are nested too deeply.
    """
    encoded: bytes = value.__class__.__pydantic_serializer__.to_json(value, warnings=warns)
    if is_too_deep(encoded):
        raise ValueError(TOO_DEEP)
    if may_hold_unstorable(encoded) and not storable(value):
        raise ValueError(UNSTORABLE)
    if holds_offset(encoded):
        exact = all_with_minutes(value)
        if exact is not value:
            return model_json(exact, warns=warns)
    return in_order(value, encoded)


def holds_sets(annotation: Any, seen: set[type]) -> bool:
    """Whether a value of this annotation may hold a set at any depth."""
    annotation = meant(annotation)
    origin = get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, AbstractSet):
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return False
        seen.add(annotation)
        if annotation.model_config.get("extra") == "allow":
            return True
        parts = [info.annotation for info in annotation.model_fields.values()]
        parts += [info.return_type for info in annotation.model_computed_fields.values()]
        return any(holds_sets(part, seen) for part in parts)
    return any(holds_sets(part, seen) for part in get_args(annotation))


def in_order(entity: BaseModel, encoded: bytes) -> bytes:
    """The JSON of an entity with the elements of its sets sorted.

    The order of a set differs between processes (Python's hash seed), and the same entity must
    have the same JSON everywhere: an equal state is no change.
    """
    return _encode(_ordered(entity, _decode(encoded))) if _has_set(entity) else encoded


def _has_set(value: Any) -> bool:
    if isinstance(value, BaseModel):
        computed = (getattr(value, name) for name in value.__class__.model_computed_fields)
        parts = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        return any(_has_set(part) for part in (*parts.values(), *computed))
    if isinstance(value, Mapping):
        return any(_has_set(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_set(part) for part in value)
    return isinstance(value, AbstractSet)


def _ordered(value: Any, encoded: Any) -> Any:
    """Decoded JSON of a value with the elements of its sets sorted."""
    if isinstance(value, RootModel):
        return _ordered(value.root, encoded)
    if isinstance(value, BaseModel) and isinstance(encoded, dict):
        return _fields_ordered(value, encoded)
    if isinstance(value, Mapping) and isinstance(encoded, dict):
        pairs = zip(value.values(), encoded.items(), strict=True)
        return {name: _ordered(part, written) for part, (name, written) in pairs}
    if isinstance(value, (list, tuple)) and isinstance(encoded, list):
        return [_ordered(*each) for each in zip(value, encoded, strict=True)]
    if isinstance(value, AbstractSet) and isinstance(encoded, list):
        parts = [_ordered(*each) for each in zip(value, encoded, strict=True)]
        same = all(isinstance(part, str) for part in parts)
        same = same or all(isinstance(part, int | float) for part in parts)
        return sorted(parts, key=None if same else _encode)
    return encoded


def _fields_ordered(value: BaseModel, encoded: dict[str, Any]) -> dict[str, Any]:
    kind = value.__class__
    known, computed = kind.model_fields, kind.model_computed_fields
    ordered = dict(encoded)
    for name in (*value.__dict__, *(value.__pydantic_extra__ or {}), *computed):
        info, written = known.get(name), name
        if info is not None:
            written = written_name(name, info)
        elif name in computed:
            written = computed[name].alias or name
        if written not in encoded:
            written = name  # commands and facts are written by their names
        if written in encoded:
            ordered[written] = _ordered(getattr(value, name), encoded[written])
    return ordered
