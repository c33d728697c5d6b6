"""Which times can be stored: those with an offset and in the years 1 to 9999 in UTC.

Spark, PostgreSQL and Python all support these. An offset can move a time out of this range:
`0001-01-01T00:00:00+12:00` is in the year 0 in UTC, which Python cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pydantic import BaseModel

from everstate.errors import InvalidChange

FIRST: Final = "0001-01-01 00:00:00"
LAST: Final = "9999-12-31 23:59:59.999999"
"""The first and the last time that can be stored, in UTC."""
OUT_OF_RANGE: Final = "the time is not of the years 1 to 9999 in UTC"


def moment_fault(moment: datetime) -> str | None:
    """Why a time cannot be stored; ``None``: it can."""
    if moment.tzinfo is None:
        return "the time has no UTC offset"
    return None if is_kept(moment) else OUT_OF_RANGE


def check_moment(
    entity: str,
    key: str,
    moment: datetime,
    ahead_hours: float | None = None,
    now: datetime | None = None,
) -> None:
    """Raise InvalidChange when a change cannot have happened then.

    ``ahead_hours`` is how far ahead of ``now`` it may be (`log.occurred_ahead_hours`); ``None``: no
    limit. ``now`` ``None``: the clock's time.
    """
    fault = moment_fault(moment)
    if fault is None and ahead_hours is not None:
        if moment - (now or datetime.now(UTC)) > timedelta(hours=ahead_hours):
            fault = ahead_fault(ahead_hours)
    if fault is not None:
        raise InvalidChange(entity, key, "occurredAt", fault)


def ahead_fault(ahead_hours: float) -> str:
    """Why a time that is further ahead is refused."""
    return f"the time is more than {ahead_hours:g} hours ahead (log.occurred_ahead_hours)"


def is_kept(moment: datetime) -> bool:
    """Whether a time is in the years 1 to 9999 in UTC; true for every time without an offset."""
    if 1 < moment.year < 9999 or moment.tzinfo is None:
        return True
    try:
        moment.astimezone(UTC)
    except OverflowError:
        return False
    return True


def times_in(value: Any) -> Iterator[datetime]:
    """Every time in a value of an entity's field, at any depth."""
    if isinstance(value, datetime):
        yield value
    elif isinstance(value, BaseModel):
        for part in value.__dict__.values():
            yield from times_in(part)
        for name in value.__class__.model_computed_fields:
            yield from times_in(getattr(value, name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from times_in(part)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from times_in(part)
