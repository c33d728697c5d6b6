"""What a capture asks of a captured database, whichever kind it is."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol

from everstate.errors import InvalidCapture
from everstate.sources.cdc.connectors import Address, OwnTables, Peculiarities

Outcome = Literal["ok", "warn", "fail"]
Key = Mapping[str, Any] | Sequence[str]
"""Values of a row's key, by column or in the key's order."""

_BINARY: Final = frozenset({"bytea", "binary", "varbinary", "blob"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the doctor looked at."""

    name: str
    outcome: Outcome
    found: str
    sql: tuple[str, ...] = ()
    """Statements that mend it, to be run by somebody who may; empty: nothing to mend in SQL."""
    advice: str | None = None
    """What else to do, such as a restart of the server."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a connector stands as the database sees it."""

    connected: bool
    """A session reads the database's log now; a connector that is RUNNING may have none."""
    behind_bytes: int | None
    """Log written after what the connector has confirmed; None: cannot be told."""
    held_bytes: int | None
    """Log that the database keeps because of the connector's slot; None: it has no slots."""
    note: str | None = None
    idle: bool = False
    """Nothing of the captured tables is in the log after the connector's place, for sure."""
    is_lost: bool = False
    """The database has no more what follows the connector's place; ``note`` says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was made, or was there already."""

    what: str
    done: Literal["made", "there", "changed", "removed", "kept"]
    note: str | None = None
    """What the user has to do about it."""


class CapturedDatabase(Protocol):
    """A connection to a captured database with the rights of its connector; close it.

    Every method raises Unavailable when the server does not answer, and CaptureFailed with the
    server's reason when it refuses.
    """

    address: Address
    own: OwnTables

    def prepare(self) -> list[Step]:
        """Make what the connector needs and may make; idempotent."""

    def release(self) -> list[Step]:
        """Undo what would keep the source from being written, and nothing else."""

    def remove(self) -> list[Step]:
        """Drop what :meth:`prepare` and the connector made; the connector must be gone."""

    def check(self) -> list[Finding]:
        """Look at every setting and right that the connector needs."""

    def check_tables(self) -> list[Finding]:
        """Look at the captured tables alone: whether each can be captured right and be written."""

    def peculiarities(self) -> Peculiarities:
        """What the connector must be told of the captured tables."""

    def check_condition(self, table: str, condition: str) -> None:
        """Raise CaptureFailed with the database's reason when it refuses an SQL condition."""

    def standing(self, offset: Mapping[str, Any]) -> Standing:
        """How far the connector is; ``offset`` is what Connect has stored of it."""

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Put a signal through the table whose changes the connector reads; no row stays in it."""

    def condition(self, table: str, keys: Sequence[Key], *, is_raw: bool = False) -> str:
        """SQL condition that holds for the rows with those keys, each in brackets.

        The key is the declared one, or else the primary key.

        ``is_raw``: values are as the raw topics have them, such as a date in days. Raises
        InvalidCapture when a key does not fit the table.
        """

    def close(self) -> None:
        """Close the connection."""


def key_values(capture: str, table: str, columns: Sequence[str], key: Key) -> list[Any]:
    """Values of the key's columns in their order; raises InvalidCapture when they do not fit."""
    given = key if isinstance(key, Mapping) else dict(zip(columns, key, strict=False))
    count = len(key)
    if not columns:
        raise InvalidCapture(capture, f"{table} has no such key, or there is no such table")
    if count != len(columns) or set(given) != set(columns):
        raise InvalidCapture(
            capture,
            f"the key of {table} is {', '.join(columns)}",
            advice=f"Give {' '.join(f'--key {column}=VALUE' for column in columns)}.",
        )
    return [given[column] for column in columns]


def from_raw(value: Any, kind: str) -> Any:
    """A key's value as the raw topics have it → what a literal of that SQL type is made of.

    Numbers of days and of microseconds become ISO text, base64 becomes bytes, anything else text.
    Raises ValueError for a value that is none of that type.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if kind == "date":
            return _after_epoch(days=value).date().isoformat()
        if kind == "datetime" or (kind.startswith("timestamp") and "with time zone" not in kind):
            return _after_epoch(microseconds=value).isoformat(" ")
        if kind == "time" or kind.startswith(("time(", "time without")):
            return _after_epoch(microseconds=value).time().isoformat()
    if kind in _BINARY:
        return base64.b64decode(str(value), validate=True)
    if isinstance(value, dict | list | float):
        reason = f"{value!r} cannot be told in SQL as {kind}"
        raise ValueError(reason)
    return str(value)


def _after_epoch(*, days: int = 0, microseconds: int = 0) -> datetime:
    try:
        found = _EPOCH + timedelta(days=days, microseconds=microseconds)
    except OverflowError as cause:
        reason = f"{days or microseconds} after 1970 cannot be told"
        raise ValueError(reason) from cause
    return found.replace(tzinfo=None)
