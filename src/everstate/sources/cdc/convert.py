"""Converts values of columns to values of fields: times from numbers, decimals from bytes, JSON."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from pydantic import AwareDatetime, BaseModel, NaiveDatetime

from everstate.declarations.captures import Convert
from everstate.sources.cdc.rows import Unreadable

Converter = Callable[[Any], Any]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_ZERO: Final = date(1970, 1, 1)
_OUTSIDE: Final = (
    "{value} is infinity, or a time outside of the years 1 to 9999; types={{…}} of its table can"
    " say what the field has instead"
)
_INFINITIES: Final = ("infinity", "-infinity")
"""How Debezium writes an infinite `timestamptz`; in other columns it writes too large a number."""
_NUMERIC: Final = {
    "NAN": "NaN",
    "POSITIVE_INFINITY": "Infinity",
    "NEGATIVE_INFINITY": "-Infinity",
}
_UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}


def converter(kind: Convert | str, annotation: Any) -> Converter:
    """Function for one column's values; null stays null. ``annotation`` is the field's."""
    if not isinstance(kind, str):
        return lambda value: None if value is None else kind(value)
    naive = NaiveDatetime in _parts(annotation)
    if kind == "days":
        return _days
    if kind in _UNITS or kind == "ns":
        return _time(kind, naive=naive, day=_is_date(annotation))
    if kind.startswith("decimal:"):
        return _decimal(int(kind.removeprefix("decimal:")))
    return _PLAIN[kind]


def inferred(annotation: Any, times: str) -> Converter | None:
    """Converter that the field's type needs, where a raw number or text would be misread."""
    parts = _parts(annotation)
    if parts & {datetime, AwareDatetime, NaiveDatetime}:
        return _time(times, naive=NaiveDatetime in parts, day=False)
    if date in parts:
        return _days
    if any(_is_container(part) for part in parts):
        return _json
    return None


def _parts(annotation: Any) -> set[Any]:
    """The annotation and all that it is made of by unions and Annotated."""
    found, rest = set(), [annotation]
    while rest:
        one = rest.pop()
        origin = get_origin(one)
        try:
            found.add(one)
        except TypeError:
            continue  # metadata of Annotated that cannot be hashed
        if origin is Annotated:
            rest.append(get_args(one)[0])
        elif origin is not None and not _is_container(one):
            rest.extend(get_args(one))
    return found


def _is_container(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, (BaseModel, dict, list, tuple, set))


def _is_date(annotation: Any) -> bool:
    parts = _parts(annotation)
    return date in parts and datetime not in parts


def _days(value: Any) -> Any:
    if value.__class__ is not int:
        return value
    try:
        return _DAY_ZERO + timedelta(days=value)
    except OverflowError as cause:
        raise Unreadable(_OUTSIDE.format(value=value)) from cause


def _time(unit: str, *, naive: bool, day: bool) -> Converter:
    def convert(value: Any) -> Any:
        if value.__class__ is not int:
            if value in _INFINITIES:
                raise Unreadable(_OUTSIDE.format(value=value))
            return value
        micros = value // 1_000 if unit == "ns" else value * _UNITS[unit]
        try:
            at = _EPOCH + timedelta(microseconds=micros)
        except OverflowError as cause:
            raise Unreadable(_OUTSIDE.format(value=value)) from cause
        if day:
            return at.date()
        return at.replace(tzinfo=None) if naive else at

    return convert


def _decimal(scale: int) -> Converter:
    def convert(value: Any) -> Any:
        if value.__class__ is not str:
            return value
        unscaled = int.from_bytes(base64.b64decode(value), "big", signed=True)
        return Decimal(unscaled).scaleb(-scale)

    return convert


def _json(value: Any) -> Any:
    if value.__class__ is not str:
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as cause:
        raise Unreadable(f"text that should be JSON: {cause}") from cause


def _bool(value: Any) -> Any:
    return bool(int(value)) if value.__class__ in (int, str) else value


def _text(value: Any) -> Any:
    return None if value is None else str(value)


def _numeric(value: Any) -> Any:
    return _NUMERIC.get(value, value) if value.__class__ is str else value


_PLAIN: Final[Mapping[str, Converter]] = {
    "json": _json,
    "bool": _bool,
    "text": _text,
    "numeric": _numeric,
}
