"""The value of a text that people write in conditions, keys and cursors: exact, or refused. Pure.

Python's own readers round numbers, cut parts of a microsecond, and take `1_0`, `１０` and ` 10 `
for 10. Times are written as in RFC 3339, or as a local time with the name of its zone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from everstate.changes.moments import OUT_OF_RANGE, is_finer, is_kept
from everstate.errors import InvalidQuery

_BITS: Final = 2**63
_WHOLE_DIGITS: Final = 131_072
_PLACES: Final = 16_383
"""PostgreSQL's numeric has so many digits before its point, and so many behind it."""


def written_value(cast: str, text: str) -> Any:
    """The value of a text in the PostgreSQL type that it is compared as.

    Raises ValueError or InvalidQuery, which say what can be written. Blanks are part of a text.
    `whole` is a whole number of any size.
    """
    _, form, read, advice = FORMS[cast]
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


def _moment(found: re.Match[str]) -> datetime:
    return parse_moment(found[0])


def parse_moment(text: str) -> datetime:
    """Time with its offset, from `2013-02-08T18:00-05:00` or `2013-02-08 18:00 America/New_York`.

    Raises InvalidQuery for a time without an offset, because its meaning would depend on the
    machine, for a local time that a zone has twice or never, because the clocks were changed, and
    for parts of a microsecond.
    """
    moment = _parse_moment(text)
    if not is_kept(moment):
        raise InvalidQuery(f"time {text!r}: {OUT_OF_RANGE}.")
    return moment


def _parse_moment(text: str) -> datetime:
    stamp, _, zone = text.strip().rpartition(" ")
    if zone[:1].isalpha() and stamp:
        moment = _parse(stamp, text)
        if moment.tzinfo is not None:
            raise InvalidQuery(f"time {text!r} has an offset and a zone; write one of them.")
        try:
            local = moment.replace(tzinfo=ZoneInfo(zone))
        except (ZoneInfoNotFoundError, ValueError, OSError) as cause:
            # OSError: the name of a folder of zones, or one that is too long for a file.
            raise InvalidQuery(f"time {text!r}: there is no time zone {zone!r}.") from cause
        _check_is_one(local, text)
        return local
    moment = _parse(text.strip(), text)
    if moment.tzinfo is None:
        raise InvalidQuery(
            f"time {text!r} has no UTC offset.",
            advice=f"Write {moment.isoformat()}Z for UTC, or add an offset such as -05:00.",
        )
    return moment


def _check_is_one(local: datetime, text: str) -> None:
    """Raise InvalidQuery for a local time that its zone has twice, or that it leaves out."""
    one, other = (local.replace(fold=fold) for fold in (0, 1))
    if one.utcoffset() == other.utcoffset() or not is_kept(local):
        return
    clock = one.astimezone(UTC).astimezone(local.tzinfo)
    comes = "twice" if clock.replace(tzinfo=None) == one.replace(tzinfo=None) else "never"
    raise InvalidQuery(
        f"time {text!r}: the clocks there are changed then, so that this local time comes {comes}.",
        advice=f"Write {one.isoformat()} or {other.isoformat()}.",
    )


def _parse(stamp: str, text: str) -> datetime:
    if is_finer(stamp):
        raise InvalidQuery(f"time {text!r} has parts of a microsecond, which would be cut.")
    try:
        return datetime.fromisoformat(stamp)
    except ValueError as cause:
        raise InvalidQuery(
            f"time {text!r} cannot be read.", advice="Write it as 2013-02-08T18:00:00-05:00."
        ) from cause


_Form: TypeAlias = tuple[str, re.Pattern[str], Callable[[re.Match[str]], Any], str]
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,1000}")
_NUMBER: Final = r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_DATE: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_LOCAL: Final = re.compile(
    rf"{_DATE}(?:[T ][0-9]{{2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:\.[0-9]+)?)?)?"
    r"(?P<offset>Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
_FLOAT: Final = re.compile(rf"{_NUMBER}|(?ai:nan|[+-]?inf(?:inity)?)")
_BOOLEAN: Final = re.compile("(?ai:(true)|false)")
_STRIPPED: Final = re.compile(r"(?s:(?!\s).*(?<!\s))")
FORMS: Final[Mapping[str, _Form]] = {
    "whole": ("a whole number", _WHOLE, lambda found: int(found[0]), "Write digits."),
    "bigint": ("a whole number", _WHOLE, _bigint, "Write digits."),
    "float8": ("a float", _FLOAT, _float, "Write digits."),
    "numeric": ("a decimal number", re.compile(_NUMBER), _numeric, "Write digits."),
    "boolean": ("true or false", _BOOLEAN, lambda found: bool(found[1]), "Write true or false."),
    "date": ("a date (2013-02-08)", re.compile(_DATE), _date, "Write it as 2013-02-08."),
    "timestamp": ("a local time", _LOCAL, _local_time, "Write it as 2013-02-08T18:00:00."),
    "timestamptz": ("a time with its offset", _STRIPPED, _moment, "Write no blanks around a time."),
    "uuid": ("a UUID", _UUID, lambda found: UUID(found[0]), "Write 32 hexadecimal digits."),
    "text": ("text", re.compile(r"[^\0]*"), _text, "Write no NUL characters."),
}
"""Type in words, how a text of it is written, how it is read, and what can be written instead."""
