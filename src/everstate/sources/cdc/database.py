"""The interface of a captured database that a capture uses, the same for every kind."""

from __future__ import annotations

import base64
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, ClassVar, Final, Literal, Protocol

from uuid_utils.compat import uuid7

from everstate.declarations.captures import Capture
from everstate.errors import CaptureFailed, EverstateError, InvalidCapture, Unavailable
from everstate.findings import Finding as Finding
from everstate.findings import FindingOutcome as FindingOutcome
from everstate.sources.cdc.connectors import Address, OwnTables, SourceColumn, TableShape
from everstate.sources.cdc.halted import collection_name
from everstate.sources.cdc.names import CaptureNames

MARK: Final = "mark"
"""Id of the row with our mark in the table of signals (``replaced``). The connector ignores its
updates, and the signal that its insertion is writes a line into the connector's log."""
EMPTY: Final = " empty"
"""The end of a file's name in a :class:`TableState`, if it certainly has no row."""
PARTITION: Final = "."
"""In the id of a part of a table that is not the table itself."""
REBUILT: Final = "table "
"""Before the id of a table that gets another one when it is only built anew."""
ONE_ENTITY: Final = "Rows with the same values of the declared key_columns become one entity."
"""The advice about key columns that no unique key of the table is within."""
PrintedRows = Iterator[Sequence[str | bytes | None]]
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


RunQuery = Callable[..., list[dict[str, Any]]]
"""Runs one statement with its arguments; out: its rows."""


class DatabaseChecks(Protocol):
    """The doctor's checks of one kind of database, with the SQL that repairs it."""

    def everything(self) -> list[Finding]:
        """What is found of each setting, right and object that the connector needs."""

    def tables(self) -> Iterable[Finding]:
        """What is found of the captured tables: can each be captured correctly, and written."""


class CapturedDatabase(ABC):
    """A connection to a captured database with the rights of its connector; close it.

    Every public method raises Unavailable when the server does not answer, and CaptureFailed with
    the server's reason when it refuses.
    """

    product: ClassVar[str]
    sign: ClassVar[str] = '"'
    """The sign around names in its SQL."""
    replacing: ClassVar[str]
    """The end of an INSERT of an id and its data that takes the place of an earlier one."""
    _connection: Any

    def __init__(
        self, capture: Capture, names: CaptureNames, address: Address, own: OwnTables
    ) -> None:
        self._capture, self._names = capture, names
        self.address, self.own = address, own

    @staticmethod
    @abstractmethod
    def address_of(dsn: str) -> tuple[Address, str]:
        """Address and password in a ``dsn``; raises InvalidConfig."""

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @abstractmethod
    def prepare(self) -> list[SetupStep]:
        """Make what the connector needs and may make; idempotent."""

    def release(self) -> list[SetupStep]:
        """Undo only what makes writes to captured tables fail; out: also what is kept."""
        return []

    def begin_anew(self) -> list[SetupStep]:
        """Drop what has the connector's position in the database; the connector must be stopped."""
        return []

    @abstractmethod
    def remove(self) -> list[SetupStep]:
        """Drop what :meth:`prepare` and the connector made; the connector must be gone."""

    def check(self) -> list[Finding]:
        """Check every setting, right and object that the connector needs, and its slot."""
        with self._translated("checking"):
            return self._checks().everything()

    def check_tables(self) -> list[Finding]:
        """Check only the captured tables: can each be captured correctly, and stay writable."""
        with self._translated("checking the tables"):
            return list(self._checks().tables())

    @abstractmethod
    def _checks(self) -> DatabaseChecks:
        """The checks of this kind of database."""

    @abstractmethod
    def shapes(self, settings: Mapping[str, str]) -> Mapping[str, TableShape]:
        """Columns and key of each captured table that exists.

        ``settings``: those of its connector, or those that the declaration gives it.
        """

    @abstractmethod
    def columns(self, table: str) -> list[dict[str, Any]]:
        """The columns of a table in their order; none of one that does not exist.

        Of each its ``name``, its ``type`` in SQL, its ``key_place`` in the primary key, which is
        None outside of it, and what else this kind of database says of a column.
        """

    @abstractmethod
    def printed_rows(self, table: str, columns: Sequence[SourceColumn]) -> PrintedRows:
        """All rows of a table at one moment, each value as the server prints it (``printed``).

        One query without locks, whose rows are not all in memory at once.
        """

    @abstractmethod
    def log_place(self) -> Any:
        """A place in its log behind all that a query saw which has ended; for has_passed."""

    @abstractmethod
    def has_passed(self, offset: Mapping[str, Any], place: Any) -> bool:
        """Whether a connector with this position (:meth:`standing`) sent all before that place."""

    @abstractmethod
    def table_states(self) -> tuple[int, Mapping[str, TableState]]:
        """The moment, for :meth:`has_older_row`, and what each captured table is made of.

        No table is given while a statement that changes one runs.
        """

    @abstractmethod
    def has_older_row(self, part: str, seen: int) -> bool:
        """Whether a part of a table certainly has a row that was there at that moment."""

    @abstractmethod
    def inexact_columns(self) -> list[InexactColumn]:
        """Columns whose values Debezium would change; a pass over tables with such columns."""

    @abstractmethod
    def check_condition(self, table: str, condition: str) -> None:
        """Raise CaptureFailed with the database's reason when it refuses an SQL condition."""

    @abstractmethod
    def identity(self) -> str:
        """An id that no other database server has, and that a restart does not change."""

    @abstractmethod
    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        """Why its log cannot contain what was read of it: it ends before that; None: it can.

        ``place``: of the last row (``shapes/places``); ``offset``: as in :meth:`standing`.
        """

    def log_end(self) -> str | None:
        """Where its log ends; None: the connector sees all of it, so nobody else looks at it."""
        return None

    @abstractmethod
    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        """State of the connector; ``offset`` is its source position as Kafka Connect stores it."""

    def read_mark(self) -> str | None:
        """The text that :meth:`write_mark` wrote last; None: there is none, or no table for it."""
        table = self.own.signals
        with self._translated("reading our mark"):
            if not self._exists(table):
                return None
            found = self._rows(f"SELECT data FROM {self._quoted(table)} WHERE id = %s", MARK)
        return str(found[0]["data"]) if found else None

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        """Write a text into the table of signals; out: whether it was written.

        It is not written when the text that is there is no longer ``instead_of``; with None, it is
        written in any case. Snapshots and signals do not change it, and a backup contains it.
        """
        table = self._quoted(self.own.signals)
        with self._translated("writing our mark"):
            if instead_of is None:
                put = f"INSERT INTO {table} (id, type, data) VALUES (%s, 'log', %s)"
                return self._execute(f"{put} {self.replacing}", MARK, text) > 0
            change = f"UPDATE {table} SET data = %s WHERE id = %s AND data = %s"
            return self._execute(change, text, MARK, instead_of) == 1

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Insert a signal into the table whose changes the connector reads; the row is deleted."""
        table = self._quoted(self.own.signals)
        insert = f"INSERT INTO {table} (id, type, data) VALUES (%s, %s, %s)"
        with self._translated("signalling"), self._transaction():
            self._execute(insert, signal_id, kind, data)
            self._execute(f"DELETE FROM {table} WHERE id LIKE 'everstate-%'")

    def condition(self, table: str, key: Key, *, is_raw: bool = False) -> str:
        """SQL condition, in brackets, that holds for the row with this key.

        The key is the declared one, or else the primary key. ``is_raw``: values are as the raw
        topics have them, such as a date in days. Raises InvalidCapture when the key does not fit
        the table. Cost: one or two round trips.
        """
        parts = []
        with self._translated("reading the key"):
            columns = self._key(table, self.columns(table))
            kinds = {str(column["name"]): str(column["type"]) for column in columns}
            values = key_values(self._capture.name, table, list(kinds), key)
            for (name, kind), value in zip(kinds.items(), values, strict=True):
                try:
                    literal = self._literal(value, kind, is_raw)
                except (TypeError, ValueError) as cause:
                    reason = f"{table}: {name} is of type {kind}, not {value!r}"
                    raise InvalidCapture(self._capture.name, reason) from cause
                parts.append(f"{quoted_name(name, self.sign)} = {literal}")
        return f"({' AND '.join(parts)})"

    def _key(self, table: str, columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the columns that are the declared key, or else the primary key, in its order."""
        declared = self._capture.tables.get(table)
        if declared is not None and declared.key_columns:
            named = {column["name"]: column for column in columns}
            return [named[name] for name in declared.key_columns if name in named]
        keyed = [column for column in columns if column["key_place"] is not None]
        return sorted(keyed, key=itemgetter("key_place"))

    @abstractmethod
    def _literal(self, value: Any, kind: str, is_raw: bool) -> str:
        """A value of a column of this type, in SQL; raises ValueError."""

    def _made(self, what: str, making: str, *, is_there: bool) -> SetupStep:
        """Make one object, unless it is there."""
        if not is_there:
            self._execute(making)
        return SetupStep(what, "there" if is_there else "made")

    def _exists(self, table: str) -> bool:
        return bool(self.columns(table))

    def _quoted(self, table: str) -> str:
        return quoted(table, self.sign)

    @abstractmethod
    def _execute(self, query: str, *arguments: object) -> int:
        """Run a statement; out: how many rows it changed."""

    @abstractmethod
    def _rows(self, query: str, *arguments: object) -> list[dict[str, Any]]:
        """Run a statement; out: its rows."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[Any]:
        """One transaction of the database."""

    @abstractmethod
    def _translated(self, doing: str) -> AbstractContextManager[None]:
        """Translate the driver's errors into ours; see :meth:`_failed`."""

    def _failed(self, doing: str, reason: str, *, is_away: bool) -> EverstateError:
        """The error for what the driver says."""
        name, at = self._capture.name, self.address
        server = f"{name}: {doing}: {self.product} at {at.host}:{at.port}/{at.database}"
        if is_away:
            return Unavailable(f"{server}: {reason}.")
        advice = f"`everstate cdc doctor {name}` shows what is missing."
        return CaptureFailed(f"{server} refuses: {reason}.", advice=advice)


def quoted(table: str, sign: str = '"') -> str:
    """``schema.table`` as SQL; with PostgreSQL's sign also text that `regclass` reads."""
    return ".".join(quoted_name(part, sign) for part in table.split(".", 1))


def quoted_name(name: str, sign: str = '"') -> str:
    """A name as SQL; it may have dots."""
    return sign + name.replace(sign, sign * 2) + sign


def verdict(
    name: str, found: str, is_well: bool, *statements: str, advice: str | None = None
) -> Finding:
    """A finding: all is well, or a failure with the statements and the advice that repair it."""
    if is_well:
        return Finding(name, "ok", found)
    return Finding(name, "fail", found, statements, advice)


def no_table(table: str) -> Finding:
    """The failure of a captured table that does not exist."""
    advice = "Correct the declaration, or make the table."
    return Finding(f"table {table}", "fail", "there is none of that name", advice=advice)


def signal_snapshot(
    database: CapturedDatabase, tables: Sequence[str], condition: str | None = None
) -> str:
    """Request an incremental snapshot of tables, or of the rows of one; returns the signal's id.

    The signal stays in the database's log until the connector reads it.
    """
    signal_id, names = f"everstate-{uuid7()}", list(map(collection_name, tables))
    data: dict[str, Any] = {"data-collections": names, "type": "INCREMENTAL"}
    if condition:
        # The name is a regular expression here. The connector puts AND before the filter where it
        # reads by chunks.
        name = names[0] if re.fullmatch(r"[\w.]+", names[0]) else rf"\Q{names[0]}\E"
        data["additional-conditions"] = [{"data-collection": name, "filter": f"({condition})"}]
    database.signal(signal_id, "execute-snapshot", json.dumps(data))
    return signal_id


def key_values(capture: str, table: str, columns: Sequence[str], key: Key) -> list[Any]:
    """Values of the key's columns in their order; raises InvalidCapture when they do not fit.

    The value of a key of one column may have the column's name before it: ``id=7``.
    """
    given = key if isinstance(key, Mapping) else dict(zip(columns, key, strict=False))
    if not columns:
        raise InvalidCapture(capture, f"{table} has no such key, or there is no such table")
    if len(key) != len(columns) or set(given) != set(columns):
        advice = f"Give {' '.join(f'--key {column}=VALUE' for column in columns)}."
        reason = f"the key of {table} is {', '.join(columns)}"
        raise InvalidCapture(capture, reason, advice=advice)
    values = [given[column] for column in columns]
    if len(values) == 1 and isinstance(values[0], str) and not isinstance(key, Mapping):
        return [values[0].removeprefix(f"{columns[0]}=")]
    return values


def from_raw(value: Any, kind: str) -> Any:
    """A key's value as the raw topics have it → what a literal of that SQL type is made of.

    Numbers of days and of microseconds become ISO text, base64 becomes bytes, anything else text.
    Raises ValueError for a value that is none of that type.
    """
    if type(value) is int:
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
