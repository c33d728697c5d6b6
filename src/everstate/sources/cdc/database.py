"""The interface of a captured database that a capture uses, the same for every kind."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol

from uuid_utils.compat import uuid7

from everstate.errors import InvalidCapture
from everstate.findings import Finding as Finding
from everstate.findings import FindingOutcome as FindingOutcome
from everstate.sources.cdc.connectors import Address, OwnTables, Peculiarities, TableShape

MARK: Final = "mark"
"""Id of the row with our mark in the table of signals (``replaced``). The connector ignores its
updates, and the signal that its insertion is writes a line into the connector's log."""
EMPTY: Final = " empty"
"""The end of a file's name in a :class:`TableState`, if it certainly has no row."""
PARTITION: Final = "."
"""In the id of a part of a table that is not the table itself."""
REBUILT: Final = "table "
"""Before the id of a table that gets another one when it is only built anew."""
Key = Mapping[str, Any] | Sequence[str]
"""Values of a row's key, by column or in the key's order."""

_BINARY: Final = frozenset({"bytea", "binary", "varbinary", "blob"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class InexactColumn:
    """A column whose values the connector changes on their way, so that no field may have them."""

    table: str
    column: str
    reason: str
    """How the values change."""
    advice: str
    sql: tuple[str, ...] = ()
    """Statements that keep such values out of the column."""
    settled_by_type: bool = False
    """Whether a declared type of the column (`types` of its Table) makes the values right."""


@dataclass(frozen=True, slots=True)
class TableState:
    """What a captured table is made of now (``fingerprint``)."""

    columns: Mapping[str, str]
    """Column → number, type, and labels of an enum."""
    generated: Sequence[str]
    """Columns that the log lacks, as they are generated."""
    parts: Mapping[str, str]
    """Id of the table and of each of its partitions → file."""


@dataclass(frozen=True, slots=True)
class ConnectorStanding:
    """The state of a connector as the database sees it."""

    connected: bool
    """A session reads the database's log now; a connector that is RUNNING may have none."""
    behind_bytes: int | None
    """Bytes of log after the position that the connector has confirmed; None: unknown."""
    held_bytes: int | None
    """Bytes of log that the database keeps for the connector's slot; None: it has no slot."""
    note: str | None = None
    idle: bool = False
    """True only if the log after the connector's position has no change of a captured table."""
    is_lost: bool = False
    """The database no longer has the log after the connector's position; ``note`` says why."""


@dataclass(frozen=True, slots=True)
class SetupStep:
    """One object that was made, changed or removed, or already was as it should be."""

    what: str
    done: Literal["made", "there", "changed", "removed", "kept"]
    note: str | None = None
    """What the user has to do about it."""
    table: str | None = None
    """Captured table whose earlier changes were not captured, so that it has to be read again."""


class CapturedDatabase(Protocol):
    """A connection to a captured database with the rights of its connector; close it.

    Every method raises Unavailable when the server does not answer, and CaptureFailed with the
    server's reason when it refuses.
    """

    address: Address
    own: OwnTables

    def prepare(self) -> list[SetupStep]:
        """Make what the connector needs and may make; idempotent."""

    def release(self) -> list[SetupStep]:
        """Undo only what makes writes to captured tables fail; out: also what is kept."""

    def begin_anew(self) -> list[SetupStep]:
        """Drop what has the connector's position in the database; the connector must be stopped."""

    def remove(self) -> list[SetupStep]:
        """Drop what :meth:`prepare` and the connector made; the connector must be gone."""

    def check(self) -> list[Finding]:
        """Check every setting, right and object that the connector needs, but its slot."""

    def check_slot(self) -> list[Finding]:
        """Check the slot, where this kind of database has one."""

    def check_tables(self) -> list[Finding]:
        """Check only the captured tables: can each be captured correctly, and stay writable."""

    def peculiarities(self) -> Peculiarities:
        """Properties of the captured tables that the connector's settings must contain."""

    def shapes(self, settings: Mapping[str, str]) -> Mapping[str, TableShape]:
        """Columns and key of each captured table that exists.

        ``settings``: those of its connector, or those that the declaration gives it.
        """

    def table_states(self) -> tuple[int, Mapping[str, TableState]]:
        """The moment, for :meth:`has_older_row`, and what each captured table is made of.

        No table is given while a statement that changes one runs.
        """

    def has_older_row(self, part: str, seen: int) -> bool:
        """Whether a part of a table certainly has a row that was there at that moment."""

    def inexact_columns(self) -> list[InexactColumn]:
        """Columns whose values Debezium would change."""

    def check_condition(self, table: str, condition: str) -> None:
        """Raise CaptureFailed with the database's reason when it refuses an SQL condition."""

    def identity(self) -> str:
        """An id that no other database server has, and that a restart does not change."""

    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        """Why its log cannot contain what was read of it: it ends before that; None: it can.

        ``place``: of the last row (``shapes/places``); ``offset``: as in :meth:`standing`.
        """

    def log_end(self) -> str | None:
        """Where its log ends; None: the connector sees all of it, so nobody else looks at it."""

    def read_mark(self) -> str | None:
        """The text that :meth:`write_mark` wrote last; None: there is none, or no table for it."""

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        """Write a text into the table of signals; out: whether it was written.

        It is not written when the text that is there is no longer ``instead_of``; with None, it is
        written in any case. Snapshots and signals do not change it, and a backup contains it.
        """

    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        """State of the connector; ``offset`` is its source position as Kafka Connect stores it."""

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Insert a signal into the table whose changes the connector reads; the row is deleted."""

    def condition(self, table: str, keys: Sequence[Key], *, is_raw: bool = False) -> str:
        """SQL condition that holds for the rows with those keys, each in brackets.

        The key is the declared one, or else the primary key.

        ``is_raw``: values are as the raw topics have them, such as a date in days. Raises
        InvalidCapture when a key does not fit the table.
        """

    def close(self) -> None:
        """Close the connection."""


def signal_snapshot(
    database: CapturedDatabase, tables: Sequence[str], condition: str | None = None
) -> str:
    """Request an incremental snapshot of tables, or of the rows of one; returns the signal's id.

    The signal stays in the database's log until the connector reads it.
    """
    signal_id, names = f"everstate-{uuid7()}", list(map(_collection, tables))
    data: dict[str, Any] = {"data-collections": names, "type": "INCREMENTAL"}
    if condition:
        # The name is a regular expression here.
        name = names[0] if re.fullmatch(r"[\w.]+", names[0]) else rf"\Q{names[0]}\E"
        # The connector puts AND before it where it reads by chunks.
        filtered = {"data-collection": name, "filter": f"({condition})"}
        data["additional-conditions"] = [filtered]
    database.signal(signal_id, "execute-snapshot", json.dumps(data))
    return signal_id


def _collection(table: str) -> str:
    """The name of a table in a signal; Debezium skips one with a blank outside quotation marks."""
    parts = (part.replace('"', '""') for part in table.split(".", 1))
    return ".".join(part if re.fullmatch(r"[\w$]+", part) else f'"{part}"' for part in parts)


def key_values(capture: str, table: str, columns: Sequence[str], key: Key) -> list[Any]:
    """Values of the key's columns in their order; raises InvalidCapture when they do not fit.

    The value of a key of one column may have the column's name before it: ``id=7``.
    """
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
    values = [given[column] for column in columns]
    if len(values) == 1 and isinstance(values[0], str) and not isinstance(key, Mapping):
        return [values[0].removeprefix(f"{columns[0]}=")]
    return values


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
        reason = f"{value!r} cannot be written in SQL as {kind}"
        raise ValueError(reason)
    return str(value)


def _after_epoch(*, days: int = 0, microseconds: int = 0) -> datetime:
    try:
        found = _EPOCH + timedelta(days=days, microseconds=microseconds)
    except OverflowError as cause:
        reason = f"{days or microseconds} after 1970 cannot be written in SQL"
        raise ValueError(reason) from cause
    return found.replace(tzinfo=None)
