"""Canonical texts of rows: equal values of different engines give equal text (C16).

:func:`row_text` defines the text of a row. :func:`fragments` and :func:`kept_fragments` give the
same text for whole columns, of Spark's rows and of a PostgreSQL COPY, at a tenth of the cost;
values that need more than a fast test go through :func:`canonical`, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from everstate.changes.json_numbers import JsonNumber, decode, sorted_text
from everstate.views.images import NEWEST, RAW, history_json, latest_json
from everstate.views.json_texts import json_texts

_Texts: TypeAlias = Callable[[pa.Array], pa.Array]
_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATETIME
_EXACT_MAX: Final = 2**53
_TO_ESCAPE: Final = r'["\\\x00-\x1f]'
# Numbers other than whole ones with at most 15 digits can be written in more than one way.
_ODD_NUMBER: Final = r"[0-9]\.|[0-9][eE]|[0-9]{16}"
_MOMENT: Final = 'YYYY-MM-DD"T"HH24:MI:SS.US'
_PLAIN_YEARS: Final = (-30_610_224_000_000_000, 253_402_300_800_000_000)
"""The years 1000 to 9999 in microseconds: not every engine writes other years with four digits."""


def row_text(values: Sequence[Any]) -> str:
    """One canonical JSON text of a row: equal values give equal text on both sides."""
    return _dumped([canonical(value) for value in values])


def canonical(value: Any) -> Any:
    """A value in the canonical form for values of all engines (C16).

    Numbers lose their scale and trailing zeros, and stay numbers; times go to UTC, UUIDs to text.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -_EXACT_MAX < value < _EXACT_MAX else JsonNumber(value)
    if isinstance(value, float):
        return _number(Decimal(repr(value)))
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, datetime):
        moment = value if value.tzinfo is None else value.astimezone(UTC)
        return moment.replace(tzinfo=None).isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, dict):
        return {str(key): canonical(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(part) for part in value]
    return str(value)


def fragments(name: str, values: pa.Array) -> pa.Array:
    """JSON texts of a column of Spark's rows; a null becomes the text `null`."""
    return _filled(_form_of(name, values.type).engine(values))


def kept_fragments(name: str, kind: pa.DataType, copied: pa.Array) -> pa.Array:
    """The same for a column copied with :func:`copied_as`; ``kind``: the type on Spark's side."""
    return _filled(_form_of(name, kind).copied(copied))


def copied_as(column: str, name: str, kind: pa.DataType) -> str:
    """The SQL expression that copies a column in the form that `kept_fragments` reads."""
    if name in _OF_MESSAGES or not pa.types.is_timestamp(kind):
        return f"{column}::text"
    moment = f"{column} AT TIME ZONE 'UTC'" if kind.tz is not None else column
    return f"to_char({moment}, '{_MOMENT}')"


def joined(columns: Sequence[pa.Array]) -> list[str]:
    """Texts of rows from the texts of their columns."""
    if not columns:
        return []
    inner = pc.binary_join_element_wise(*columns, ",") if len(columns) > 1 else columns[0]
    opened = pc.binary_join_element_wise("[", inner, "]", "")
    found: list[str] = opened.to_pylist()
    return found


def _number(value: Decimal) -> Any:
    if not value.is_finite():
        return str(value)
    if value == value.to_integral_value() and abs(value) < _EXACT_MAX:
        return int(value)
    text = format(value, "f")
    return JsonNumber(text.rstrip("0").rstrip(".") if "." in text else text)


def _dumped(value: Any) -> str:
    """JSON of a canonical value; a number is no text, so 1.5 and "1.5" differ."""
    return orjson.dumps(value, default=_digits, option=_OPTIONS).decode()


def _digits(number: JsonNumber) -> orjson.Fragment:
    return orjson.Fragment(format(number, "f"))


def _filled(texts: pa.Array) -> pa.Array:
    return pc.fill_null(texts, "null")


def _form_of(name: str, kind: pa.DataType) -> _Form:
    """How a column's values are written."""
    if name in _OF_MESSAGES:
        return _OF_MESSAGES[name]
    return next((form for test, form in _FORMS if test(kind)), _NESTED)


def _one_by_one(read: Callable[[Any], Any] = lambda value: value) -> _Texts:
    def texts(values: pa.Array) -> pa.Array:
        found = [None if v is None else _dumped(canonical(read(v))) for v in values.to_pylist()]
        return pa.array(found, pa.string())

    return texts


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _texts(values: pa.Array) -> pa.Array:
    values = values.cast(pa.string())
    odd = pc.fill_null(pc.match_substring_regex(values, _TO_ESCAPE), False)
    return _corrected(_quoted(values), values, odd, lambda text: text)


def _numbers(values: pa.Array) -> pa.Array:
    """Numbers without trailing zeros."""
    texts = values.cast(pa.string())
    pointed = pc.match_substring(texts, ".")
    short = pc.replace_substring_regex(texts, r"(\.[0-9]*?)0+$", r"\1")
    short = pc.replace_substring_regex(short, r"\.$", "")
    texts = pc.if_else(pc.fill_null(pointed, False), short, texts)
    odd = pc.match_substring_regex(texts, r"[^-0-9.]|^-0$")
    return _corrected(texts, values, pc.fill_null(odd, False), Decimal)


def _reals(values: pa.Array) -> pa.Array:
    """Numbers of 32 bits, by the shortest text that gives the same 32 bits."""
    return _one_by_one(Decimal)(values.cast(pa.float32()).cast(pa.string()))


def _moments(values: pa.Array) -> pa.Array:
    micros = values.cast(pa.timestamp("us", tz=values.type.tz)).cast(pa.int64())
    first, end = _PLAIN_YEARS
    plain = pc.and_(pc.greater_equal(micros, first), pc.less(micros, end))
    whole = micros.cast(pa.timestamp("us"))
    texts = _quoted(pc.strftime(whole, "%Y-%m-%dT%H:%M:%S"))
    return _corrected(texts, values, pc.invert(pc.fill_null(plain, True)), lambda moment: moment)


def _corrected(
    texts: pa.Array, values: pa.Array, odd: pa.Array, read: Callable[[Any], Any]
) -> pa.Array:
    """The texts, with those of the ``odd`` values replaced by their canonical text."""
    if not pc.any(odd).as_py():
        return texts
    corrected = _one_by_one(read)(values.filter(odd))
    return pc.replace_with_mask(texts, odd, corrected)


def _cut(extract: Callable[[bytes], bytes]) -> _Texts:
    """JSON texts of what a store keeps of messages."""

    def texts(messages: pa.Array) -> pa.Array:
        return _json_texts([None if m is None else extract(m) for m in messages.to_pylist()])

    return texts


def _kept_json(values: pa.Array) -> pa.Array:
    return _json_texts(values.to_pylist())


def _json_texts(texts: Sequence[bytes | str | None]) -> pa.Array:
    """JSON texts with sorted keys and canonical numbers."""
    found = [None if text is None else sorted_text(text) for text in texts]
    made = pa.array(found, pa.binary()).cast(pa.string())
    odd = pc.fill_null(pc.match_substring_regex(made, _ODD_NUMBER), False)
    return _corrected(made, made, odd, decode)


class _Form(NamedTuple):
    """How the values of one type become texts: those of Spark's rows, and those of a COPY."""

    engine: _Texts
    copied: _Texts


_OF_MESSAGES: Final = {
    NEWEST: _Form(_cut(latest_json), _kept_json),
    RAW: _Form(_cut(history_json), _kept_json),
}
_NUMBER: Final = _Form(_numbers, _numbers)
_TEXT: Final = _Form(_texts, _texts)
_NESTED: Final = _Form(lambda values: _one_by_one(decode)(json_texts(values)), _one_by_one(decode))
_FORMS: Final[tuple[tuple[Callable[[pa.DataType], bool], _Form], ...]] = (
    (pa.types.is_boolean, _Form(lambda values: values.cast(pa.string()), lambda values: values)),
    (pa.types.is_integer, _NUMBER),
    (pa.types.is_decimal, _NUMBER),
    (pa.types.is_timestamp, _Form(_moments, _quoted)),
    (pa.types.is_date, _Form(_one_by_one(), _quoted)),
    (pa.types.is_string, _TEXT),
    (pa.types.is_large_string, _TEXT),
    (pa.types.is_null, _TEXT),
    (pa.types.is_float64, _Form(_one_by_one(), _one_by_one(float))),
    (pa.types.is_floating, _Form(_reals, _reals)),
)
