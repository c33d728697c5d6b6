"""The value that a typed column has for a JSON value, without Spark. Pure.

Spark reads states into typed columns (:mod:`everstate.pipeline.spark.states`). A trigger that is
judged here must fire for the same changes, so each value is read as Spark reads it: a value that
does not fit its type, or that it cannot hold exactly, is null, one that does not fit in a list
makes the whole list null, and members that the model does not have are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

_BITS: Final = 2**63
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DATE: Final = re.compile(r"\+?([0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2}))?)?")
_TIME: Final = re.compile(
    r"\+?([0-9]{4,6})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T]([0-9]{1,2})(?::([0-9]{1,2})"
    r"(?::([0-9]{1,2})(?:\.([0-9]*))?\s*(\S.*)?)?)?)?)?)?"
)
_OFFSET: Final = re.compile(r"(?:UTC|GMT|UT)?([+-])([0-9]{1,2})(?::?([0-9]{2})(?::?([0-9]{2}))?)?")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_BLANKS: Final = "".join(map(chr, (*range(33), 127)))
"""What Spark leaves out around a time."""
_OFFSET_MAX: Final = timedelta(hours=18)
_WORDS: Final = {True: "true", False: "false", None: "null"}


class _Misfit(ValueError):
    """A value does not fit its type."""


def typed_value(kind: pa.DataType, value: Any) -> Any:
    """The value in a column of this type; ``None``: null, or the value does not fit.

    Equal columns have equal values. An object is a tuple of its members, in the order of the type;
    a map is a tuple of pairs, in the order of the text.
    """
    from pyarrow import types

    if types.is_struct(kind) and isinstance(value, Mapping):
        return tuple(typed_value(field.type, value.get(field.name)) for field in kind)
    try:
        return _fitting(kind, value)
    except (ValueError, ArithmeticError):
        return None


def fits(kind: pa.DataType, value: Any) -> bool:
    """Whether a column of this type can hold a JSON value exactly, at any depth."""
    try:
        _fitting(kind, value)
    except (ValueError, ArithmeticError):
        return False
    return True


def _fitting(kind: pa.DataType, value: Any) -> Any:
    """The value in a column; raises ValueError or ArithmeticError when a part does not fit."""
    from pyarrow import types

    if value is None:
        return None
    is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    if types.is_struct(kind) and isinstance(value, Mapping):
        return tuple(_fitting(field.type, value.get(field.name)) for field in kind)
    if types.is_map(kind) and isinstance(value, Mapping):
        return tuple((name, _fitting(kind.item_type, each)) for name, each in value.items())
    if types.is_list(kind) and isinstance(value, list):
        return tuple(_fitting(kind.value_type, each) for each in value)
    if types.is_string(kind):
        return value if isinstance(value, str) else _text(value)
    if types.is_boolean(kind) and isinstance(value, bool):
        return value
    if types.is_integer(kind) and isinstance(value, int) and is_number:
        if -_BITS <= value < _BITS:
            return value
    if types.is_floating(kind) and is_number:
        number = float(value)
        if number - number == 0:
            return number
    if types.is_decimal(kind) and (is_number or isinstance(value, str)):
        return _decimal(kind, str(value))
    if types.is_date(kind) and isinstance(value, str):
        return _date(value)
    if types.is_timestamp(kind):
        return _moment(value, is_zoned=kind.tz is not None)
    raise _Misfit


def _decimal(kind: pa.DataType, text: str) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise _Misfit
    places = Decimal(1).scaleb(-kind.scale)
    # A number with more digits than the type has is an InvalidOperation.
    exact = Context(prec=kind.precision, traps=[InvalidOperation, Inexact])
    return Decimal(text).quantize(places, context=exact)


def _date(text: str) -> date:
    found = _DATE.fullmatch(text.strip(_BLANKS))
    if found is None:
        raise _Misfit
    return date(*(int(part or 1) for part in found.groups()))


def _moment(value: Any, *, is_zoned: bool) -> datetime:
    if is_zoned and isinstance(value, int) and not isinstance(value, bool):
        return _EPOCH + timedelta(seconds=value)
    found = _TIME.fullmatch(value.strip(_BLANKS)) if isinstance(value, str) else None
    if found is None:
        raise _Misfit
    *clock, fraction, zone = found.groups()
    if (zone is not None and not is_zoned) or (fraction or "")[6:].strip("0"):
        raise _Misfit
    # A month and a day begin with 1, the other parts with 0.
    year, month, day, hour, minute, second = (int(p or n < 3) for n, p in enumerate(clock))
    micros = int((fraction or "")[:6].ljust(6, "0"))
    moment = datetime(
        year, month, day, hour, minute, second, micros, _zone(zone) if is_zoned else None
    )
    return moment.astimezone(UTC) if is_zoned else moment


def _zone(text: str | None) -> timezone:
    """The offset of a time; UTC for none. Names of regions are not read."""
    if text is None or text in ("Z", "UTC", "GMT", "UT"):
        return UTC
    found = _OFFSET.fullmatch(text)
    if found is None:
        raise _Misfit
    hours, minutes, seconds = (int(part or 0) for part in found.groups()[1:])
    offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if minutes > 59 or seconds > 59 or offset > _OFFSET_MAX:
        raise _Misfit
    return timezone(-offset if found[1] == "-" else offset)


def _text(value: Any) -> str:
    """The JSON text of a value that is no text, as Spark writes it."""
    if isinstance(value, Mapping):
        return (
            "{" + ",".join(f"{_quoted(name)}:{_text(each)}" for name, each in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, (float, Decimal)):
        return _number_text(float(value))
    return str(value) if type(value) is int else _WORDS[value]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _number_text(number: float) -> str:
    """A float as Java writes it."""
    if number - number != 0:
        return "Infinity" if number > 0 else "-Infinity"
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        return repr(number)
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    first, *others = map(str, digits)
    mantissa = f"{'-' if sign else ''}{first}.{''.join(others) or '0'}"
    return f"{mantissa}E{exponent + len(others)}"
