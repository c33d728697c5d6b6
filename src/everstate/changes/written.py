"""The value of a text that people write in conditions, keys and cursors: exact, or refused. Pure.

Python's own readers round numbers, cut parts of a microsecond, and take `1_0`, `１０` and ` 10 `
for 10.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from uuid import UUID

from everstate.changes.moments import is_finer

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,1000}")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NO_NUMBER: Final = re.compile(r"nan|[+-]?inf(?:inity)?", re.IGNORECASE)
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME: Final = re.compile(
    rf"{_DATE.pattern}(?:[T ][0-9]{{2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:\.[0-9]+)?)?)?"
    r"(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
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
    return _READERS[cast](text)


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError("Write digits.")
    return int(text)


def _bigint(text: str) -> int:
    number = _whole(text)
    if not -_BITS <= number < _BITS:
        raise ValueError("Write a number of at most 64 bits.")
    return number


def _numeric(text: str) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise ValueError("Write digits.")
    try:
        number = Decimal(text)
    except InvalidOperation as cause:
        raise ValueError("Write a smaller exponent.") from cause
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    if number.adjusted() >= _WHOLE_DIGITS or exponent < -_PLACES:
        raise ValueError(
            f"Write at most {_WHOLE_DIGITS:,} digits before the point, and {_PLACES:,} behind it."
        )
    return number


def _float(text: str) -> float:
    if _NO_NUMBER.fullmatch(text):
        return float(text)
    number, found = _numeric(text), float(text)
    if number not in (Decimal(repr(found)), Decimal(found)):
        raise ValueError(f"Write a number that a float can hold; the next one is {found!r}.")
    return found


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("Write true or false.")
    return text.lower() == "true"


def _date(text: str) -> date:
    if not _DATE.fullmatch(text):
        raise ValueError("Write it as 2013-02-08.")
    try:
        return date.fromisoformat(text)
    except ValueError as cause:
        raise ValueError("Write a day that the calendar has.") from cause


def _local_time(text: str) -> datetime:
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError("Write it as 2013-02-08T18:00:00.")
    if found[1] is not None:
        raise ValueError("Write it without an offset: the times here have none.")
    if is_finer(text):
        raise ValueError("Write no parts of a microsecond.")
    try:
        return datetime.fromisoformat(text)
    except ValueError as cause:
        raise ValueError("Write a time that the calendar and the clock have.") from cause


def _uuid(text: str) -> UUID:
    if not _UUID.fullmatch(text):
        raise ValueError("Write 32 hexadecimal digits.")
    return UUID(text)


def _text(text: str) -> str:
    if "\x00" in text:
        raise ValueError("Write no NUL characters.")
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ValueError("Write no half of a surrogate pair: UTF-8 has none.") from cause
    return text


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "whole": _whole,
    "bigint": _bigint,
    "float8": _float,
    "numeric": _numeric,
    "boolean": _boolean,
    "date": _date,
    "timestamp": _local_time,
    "uuid": _uuid,
    "text": _text,
}
