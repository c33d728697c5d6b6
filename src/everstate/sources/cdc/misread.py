"""Detects a table of MariaDB whose rows the connector reads by the columns of another table.

The binlog has the values of a row without the names of its columns. The connector knows the columns
of the captured tables by the statements in the binlog. But the statement that renames a table which
it does not know (`ALTER TABLE … RENAME TO`) gives it no columns, and some others change columns in
ways that Debezium does not follow. Then values arrive in wrong fields, or as another text, and
nothing in the raw log says so. So everstate compares the columns that the table has with those in
the connector's own history of definitions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from everstate.sources.cdc.fingerprint import SeenChanges
from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.shapes.debezium import KnownColumn, decode_schema_change, table_in

_AFTER_S: Final = 5.0
"""The connector is past a statement when it has read what began this many seconds later."""
_TIMES: Final = frozenset({"date", "datetime", "time", "timestamp", "year"})
_UTF8: Final = frozenset({"utf8", "utf8mb3", "utf8mb4"})


class ReadColumn(NamedTuple):
    """A column, as far as it decides what becomes of a value in the binlog."""

    name: str
    facts: tuple[str, ...] = ()
    """`date`, `datetime`, `time`, `timestamp` or `year`; the members of an enum or a set in their
    quotation marks; `unsigned`."""
    charset: str | None = None
    """Of a text; None: unknown, or it is no text."""


class ColumnCheck:
    """Compares the columns of one capture's tables; keeps which of them need not be read again."""

    def __init__(self) -> None:
        self._equal: dict[str, float] = {}
        """Table → time of its last statement, of those whose columns were found equal since."""
        self.changed: SeenChanges = {}
        """Of :func:`fingerprint.watch_tables`."""

    def misread(
        self,
        database: MariaDatabase,
        tables: Collection[str],
        offset: Mapping[str, Any],
        history: Iterable[bytes],
    ) -> tuple[str, str] | None:
        """The first table that the connector reads wrong, and how; ``None``: there is none.

        ``tables``: those that it reads; ``offset``: its position, which was read before;
        ``history``: values of its topic of definitions, read only if a table changed since the
        last call. A table whose last statement it may not have read yet is compared later.
        """
        read_s = offset.get("ts_sec")
        if read_s is None or offset.get("snapshot"):
            return None
        times = database.changed_s(tables)
        due = {
            table: [real_column(row) for row in database.columns(table)]
            for table, at in times.items()
            if at != self._equal.get(table) and at + _AFTER_S < read_s
        }
        known, now = known_columns(history) if due else {}, database.changed_s(due)
        for table, columns in due.items():
            if table not in known or now.get(table) != times[table]:
                continue
            differs = difference(known[table], columns)
            if differs is not None:
                return table, differs
            self._equal[table] = times[table]
        return None


def known_columns(history: Iterable[bytes]) -> dict[str, list[ReadColumn]]:
    """Table (``db.table``) → its columns in the newest definition that the connector stored."""
    found = {}
    for value in history:
        for change in decode_schema_change(value).table_changes or ():
            if change.table is not None:
                columns = sorted(change.table.columns, key=lambda column: column.position)
                found[".".join(table_in(change.id))] = [_known(column) for column in columns]
    return found


def difference(known: Sequence[ReadColumn], columns: Sequence[ReadColumn]) -> str | None:
    """How the columns differ by which rows are read from those of the table; ``None``: nothing."""
    if len(known) != len(columns):
        return f"{len(known)} columns, and the table has {len(columns)}"
    for number, (read, real) in enumerate(zip(known, columns, strict=True), 1):
        if read.name.lower() != real.name.lower():
            return f"column {number} is {read.name}, and {real.name} in the table"
        if None in (read.charset, real.charset):
            read, real = read._replace(charset=None), real._replace(charset=None)
        if read._replace(name=real.name) != real:
            return f"column {real.name} is {_told(read)}, and {_told(real)} in the table"
    return None


def read_column(
    name: str, kind: str, *, members: Sequence[str] = (), charset: str | None = None
) -> ReadColumn:
    """A column of a type such as ``int(10) unsigned`` or ``enum('a','b')``, in any case."""
    words = set(re.findall(r"[a-z0-9]+", kind.partition("'")[0].lower()))
    sign = ["unsigned"] if {"unsigned", "zerofill"} & words else []
    # One encodes all that the other does.
    text = "utf8" if charset in _UTF8 else charset
    return ReadColumn(name, (*(_TIMES & words), *members, *sign), text)


def real_column(row: Mapping[str, Any]) -> ReadColumn:
    """A column of a table, as :meth:`MariaDatabase.columns` gives it."""
    kind = row["whole_type"]
    return read_column(row["name"], kind, members=members_of(kind), charset=row["charset"])


def members_of(kind: str) -> list[str]:
    """Members of ``enum('a','b')`` or ``set('a','b')`` in their quotation marks."""
    return re.findall(r"'(?:[^']|'')*'", kind)


def _known(column: KnownColumn) -> ReadColumn:
    members, charset = column.enum_values or (), column.charset_name
    return read_column(column.name, column.type_name, members=members, charset=charset)


def _told(column: ReadColumn) -> str:
    return " ".join([*column.facts, *filter(None, [column.charset])]) or "another type"
