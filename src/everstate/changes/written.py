"""The value of a text that people write in conditions, keys and cursors: exact, or refused. Pure.

Python's own readers round numbers, cut parts of a microsecond, and take `1_0`, `１０` and ` 10 `
for 10.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias
from uuid import UUID

from everstate.changes.moments import is_finer

_BITS: Final = 2**63
_WHOLE_DIGITS: Final = 131_072
_PLACES: Final = 16_383
"""PostgreSQL's numeric has so many digits before its point, and so many behind it."""


def written_value(cast: str, text: str) -> Any:
    """The value of a text in the PostgreSQL type that it is compared as.

    Raises ValueError, which says what can be written. Blanks are part of a text. `whole` is a
    whole number of any size; times with an offset are read by
    :func:`everstate.serving.moments.parse_moment`.
    """
    form, read, advice = _FORMS[cast]
    found = form.fullmatch(text)
    if found is None:
        raise ValueError(advice)
    return read(found)


def _bigint(found: re.Match[str]) -> int:
    number = int(found[0])
    if not -_BITS <= number < _BITS:
        raise ValueError("Write a number of at most 64 bits.")
    return number


def _numeric(found: re.Match[str]) -> Decimal:
    try:
        number = Decimal(found[0])
    except InvalidOperation as cause:
        raise ValueError("Write a smaller exponent.") from cause
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    if number.adjusted() >= _WHOLE_DIGITS or exponent < -_PLACES:
        raise ValueError(
            f"Write at most {_WHOLE_DIGITS:,} digits before the point, and {_PLACES:,} behind it."
        )
    return number


def _float(found: re.Match[str]) -> float:
    value = float(found[0])
    if found["number"] and _numeric(found) not in (Decimal(repr(value)), Decimal(value)):
        raise ValueError(f"Write a number that a float can hold; the next one is {value!r}.")
    return value


def _date(found: re.Match[str]) -> date:
    try:
        return date.fromisoformat(found[0])
    except ValueError as cause:
        raise ValueError("Write a day that the calendar has.") from cause


def _local_time(found: re.Match[str]) -> datetime:
    if found["offset"] is not None:
        raise ValueError("Write it without an offset: the times here have none.")
    if is_finer(found[0]):
        raise ValueError("Write no parts of a microsecond.")
    try:
        return datetime.fromisoformat(found[0])
    except ValueError as cause:
        raise ValueError("Write a time that the calendar and the clock have.") from cause


def _text(found: re.Match[str]) -> str:
    try:
        found[0].encode()
    except UnicodeEncodeError as cause:
        raise ValueError("Write no half of a surrogate pair: UTF-8 has none.") from cause
    return found[0]


_Form: TypeAlias = tuple[re.Pattern[str], Callable[[re.Match[str]], Any], str]
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,1000}")
_NUMBER: Final = r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_DATE: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME: Final = (
    rf"{_DATE}(?:[T ][0-9]{{2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:\.[0-9]+)?)?)?"
    r"(?P<offset>Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
_BOOLEAN: Final = re.compile("(?ai:(true)|false)")
_FORMS: Final[Mapping[str, _Form]] = {
    "whole": (_WHOLE, lambda found: int(found[0]), "Write digits."),
    "bigint": (_WHOLE, _bigint, "Write digits."),
    "float8": (re.compile(rf"{_NUMBER}|(?ai:nan|[+-]?inf(?:inity)?)"), _float, "Write digits."),
    "numeric": (re.compile(_NUMBER), _numeric, "Write digits."),
    "boolean": (_BOOLEAN, lambda found: bool(found[1]), "Write true or false."),
    "date": (re.compile(_DATE), _date, "Write it as 2013-02-08."),
    "timestamp": (re.compile(_TIME), _local_time, "Write it as 2013-02-08T18:00:00."),
    "uuid": (_UUID, lambda found: UUID(found[0]), "Write 32 hexadecimal digits."),
    "text": (re.compile(r"[^\0]*"), _text, "Write no NUL characters."),
}
"""How a text of a type is written, how it is read, and what can be written instead."""
