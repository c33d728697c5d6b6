"""Parses times as people write them: RFC 3339, or a local time with the name of its zone."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from everstate.changes.moments import OUT_OF_RANGE, is_finer, is_kept
from everstate.errors import InvalidQuery


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
