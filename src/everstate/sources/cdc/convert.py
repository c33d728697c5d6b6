"""Converts values of columns to values of fields: times from numbers, decimals from bytes, JSON."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import MAX_PREC, Context, Decimal
from typing import Any, Final, Literal

import msgspec

from everstate.changes.fields import FieldTree, FieldType
from everstate.declarations.captures import Convert
from everstate.sources.cdc.rows import Unreadable, exact_number

Converter = Callable[[Any], Any]
FieldUnit = Literal["days", "times"]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_ZERO: Final = date(1970, 1, 1)
_INSTEAD: Final = "types={…} of its table can say what the field has instead"
_OUTSIDE: Final = "is infinity, or a time outside of the years 1 to 9999"
_GREGORIAN_US: Final = -12_219_292_800_000_000
"""15 October 1582 in microseconds since 1970. Before it Debezium writes the times in an array by
the Julian calendar, and single times by the Gregorian one, as PostgreSQL has both."""
_OTHER_CALENDAR: Final = (
    "is a time before 15 October 1582, which Debezium writes by another calendar in an array"
)
_DAY: Final = timedelta(days=1)
_NO_DAY: Final = "has a time of day, which a date cannot hold"
_FINER: Final = "has parts of a microsecond, which no field can hold"
_EPOCHS: Final = (0, "1970-01-01T00:00:00Z")
_ZERO: Final = (
    "{value} is 1970-01-01, or a date with month 0 or day 0, for which Debezium writes it;"
    " types={{…}} of its table, with 'days' or 'us' for the column, says that it has no such date"
)
_INFINITIES: Final = ("infinity", "-infinity")
"""How Debezium writes an infinite `timestamptz`; in other columns it writes too large a number."""
_SIGNS: Final = frozenset("+-")
"""How the text of a time begins whose year is before 1 or after 9999."""
NUMERIC: Final = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
_JAVA_NAME: Final = (
    "{field}: {value!r} is a text, or what Debezium writes for {means} of a numeric column;"
    " types={{…}} of its table says which: 'text' or 'numeric'"
)
_INNER: Final = re.compile(r"\[+(L[\w.$]+;|[A-Z])@[0-9a-f]+$")
_NESTED: Final = "a nested array, which Debezium cannot read"
_decode_json: Final = msgspec.json.Decoder(float_hook=Decimal).decode
"""Numbers with a fraction keep all their digits until the model has its say."""
_decode_document: Final = msgspec.json.Decoder(float_hook=exact_number).decode
_encode_json: Final = msgspec.json.Encoder(decimal_format="number").encode
_EXACT: Final = Context(prec=MAX_PREC)
"""Decimal arithmetic that rounds nothing; the default context rounds to 28 digits."""
_UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
_TIMES: Final[frozenset[FieldType | None]] = frozenset({"date", "timestamp"})
_CONTAINERS: Final[frozenset[FieldType | None]] = frozenset({"struct", "map", "list"})


def converter(kind: Convert | str, field: FieldTree) -> Converter:
    """Function for one column's values; null stays null. ``field``: what the column becomes."""
    if not isinstance(kind, str):
        return lambda value: None if value is None else kind(value)
    if kind == "days":
        return _days
    if kind in _UNITS or kind == "ns":
        types = field.types
        is_day = "date" in types and "timestamp" not in types
        return _time(kind, naive=_is_naive(field), day=is_day)
    if kind.startswith("decimal:"):
        return _decimal(int(kind.removeprefix("decimal:")))
    return _document if kind == "json" and _is_text(field) else _PLAIN[kind]


def reads_as(declared: Convert | None, field: FieldTree | None) -> FieldUnit | None:
    """Whether a field reads a column's numbers as times or as days; ``None``: as neither.

    ``declared``: the column's conversion, which decides where there is one.
    """
    if declared is not None:
        return "days" if declared == "days" else "times" if declared in (*_UNITS, "ns") else None
    if field is None or not field.types & _TIMES:
        return None if field is None else reads_as(None, _element(field))
    return "times" if "timestamp" in field.types else "days"


def inferred(field: FieldTree, times: str) -> Converter | None:
    """Converter that the field's type needs, where a raw number or text would be misread."""
    types = field.types
    if "timestamp" in types:
        return _time(times, naive=_is_naive(field), day=False)
    if "date" in types:
        return _days
    if (element := _element(field)) is not None:
        return _json_of(inferred(element, times), "timestamp" in element.types)
    return _json if types & _CONTAINERS else None


def _element(field: FieldTree) -> FieldTree | None:
    """What the elements of a list are; ``None``: the field is no list."""
    return next((each.element for each in field.choices if each.type == "list"), None)


def _json_of(convert: Converter | None, are_times: bool) -> Converter:
    """Converter of JSON, and of arrays, whose elements are converted each on its own."""
    if convert is None:
        return _json

    def elements(value: Any) -> Any:
        value = _json(value)
        if value.__class__ is not list:
            return value
        if are_times:
            for each in value:
                if each.__class__ is int and each < _GREGORIAN_US:
                    raise _refusal(each, _OTHER_CALENDAR)
        return [convert(each) for each in value]

    return elements


def never_epoch(convert: Converter, field: FieldTree) -> Converter:
    """Converter that refuses the epoch in a field of days or times, and else is the given one.

    Debezium writes the epoch for a date of MariaDB or MySQL that no calendar has, if its column is
    NOT NULL; the epoch itself looks the same as it.
    """
    if not field.types & _TIMES:
        return convert

    def converted(value: Any) -> Any:
        if value in _EPOCHS and value is not False:
            raise Unreadable(_ZERO.format(value=value))
        return convert(value)

    return converted


def may_have_java_names(message: bytes) -> bool:
    """Whether a message may have NaN or infinity of a `numeric` column; a quick look."""
    return b"NAN" in message or b"_INFINITY" in message


def refuse_java_name(name: str, value: Any, field: FieldTree) -> None:
    """Raise Unreadable for a text that may be NaN or infinity of a `numeric` column."""
    if value.__class__ is str and value in NUMERIC and _is_text(field):
        means = NUMERIC[value]
        raise Unreadable(_JAVA_NAME.format(field=name, value=value, means=means))


def unnested(convert: Converter) -> Converter:
    """``convert``, but it refuses an array that was nested in PostgreSQL.

    Debezium writes null, or a name of Java's, in place of each inner array.
    """

    def checked(value: Any) -> Any:
        if value.__class__ is list and value:
            if all(each is None for each in value):
                raise _refusal(value, f"may have been {_NESTED}")
            if any(each.__class__ is str and _INNER.match(each) for each in value):
                raise _refusal("it", f"is {_NESTED}")
        return convert(value)

    return checked


def of_decimal(field: FieldTree) -> Converter | None:
    """Converter from decimals, for a form whose numbers with a fraction are read as decimals."""
    if not _is_text(field) or field.types & {"decimal", "float"}:
        return None
    return lambda value: str(value) if value.__class__ is Decimal else value


def _is_text(field: FieldTree) -> bool:
    """Whether a field takes any text, as an enum or a UUID does not."""
    return any(each.annotation is str for each in field.choices)


def _is_naive(field: FieldTree) -> bool:
    return any(not each.is_zoned for each in field.choices)


def _refusal(value: object, why: str) -> Unreadable:
    """Why a value cannot be converted, and what can be done about it."""
    return Unreadable(f"{value} {why}; {_INSTEAD}")


def _days(value: Any) -> Any:
    if value.__class__ is not int:
        return value
    try:
        return _DAY_ZERO + timedelta(days=value)
    except OverflowError as cause:
        raise _refusal(value, _OUTSIDE) from cause


def _time(unit: str, *, naive: bool, day: bool) -> Converter:
    def convert(value: Any) -> Any:
        if value.__class__ is datetime:
            return fitting(value)
        if value.__class__ is not int:
            if value in _INFINITIES or (value.__class__ is str and value[:1] in _SIGNS):
                raise _refusal(value, _OUTSIDE)
            return value
        micros, finer = divmod(value, 1_000) if unit == "ns" else (value * _UNITS[unit], 0)
        if finer:
            raise _refusal(value, _FINER)
        try:
            return fitting(_EPOCH + timedelta(microseconds=micros))
        except OverflowError as cause:
            raise _refusal(value, _OUTSIDE) from cause

    def fitting(at: datetime) -> date | datetime:
        """The time as the field has it."""
        if day:
            if (at - _EPOCH) % _DAY:
                raise _refusal(at.isoformat(), _NO_DAY)
            return at.date()
        return at.replace(tzinfo=None) if naive else at

    return convert


def _decimal(scale: int) -> Converter:
    def convert(value: Any) -> Any:
        if value.__class__ is not str:
            return value
        unscaled = int.from_bytes(base64.b64decode(value), "big", signed=True)
        return Decimal(unscaled).scaleb(-scale, _EXACT)

    return convert


def _json(value: Any) -> Any:
    if value.__class__ is not str:
        return value
    try:
        return _decode_json(value)
    except msgspec.DecodeError as cause:
        raise Unreadable(f"text that should be JSON: {cause}") from cause


def _document(value: Any) -> Any:
    """JSON in one form: MySQL's connector writes it otherwise for a change than for a snapshot."""
    if value.__class__ is not str:
        return value
    return _encode_json(_in_one_form(_decode_document(value))).decode()


def _in_one_form(value: Any) -> Any:
    """The value, with each number that is whole as an integer, or else as the shortest one.

    Of a floating-point number the connector writes all digits: 1.5e16 as 15000000000000000.
    """
    if isinstance(value, dict):
        return {name: _in_one_form(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_in_one_form(each) for each in value]
    if value.__class__ not in (int, float, Decimal):
        return value
    if -(2**63) <= value < 2**64 and value == int(value):
        return int(value)
    number = float(str(value))
    return number if number == value else Decimal(value)


_PLAIN: Final[Mapping[str, Converter]] = {
    "json": _json,
    "bool": lambda value: bool(int(value)) if value.__class__ in (int, str) else value,
    "text": lambda value: None if value is None else str(value),
    "numeric": lambda value: NUMERIC.get(value, value) if value.__class__ is str else value,
}
