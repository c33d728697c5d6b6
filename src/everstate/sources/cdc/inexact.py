"""Columns whose values Debezium changes on their way, so that no field may have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from everstate.changes import EntityType
from everstate.declarations.captures import Capture
from everstate.errors import CaptureFailed
from everstate.sources.cdc.database import (
    CapturedDatabase,
    Finding,
    InexactColumn,
    RunQuery,
    quoted,
    quoted_name,
)
from everstate.sources.cdc.mapping import mapping_of
from everstate.sources.cdc.mariadb_checks import SIGN, MariaChecks, columns_of, modes_missing
from everstate.sources.cdc.postgres_tables import COLUMNS
from everstate.sources.cdc.postgres_types import ColumnType

_IN_UTC: Final = "Debezium writes a timetz in UTC, and loses its own offset"
_POSTGRES: Final = {
    "timetz": _IN_UTC,
    "timetz[]": _IN_UTC,
    "time[]": "Debezium cuts the times of an array to milliseconds, and 24:00 to 00:00",
    "name": "Debezium leaves values of the type name out of changes",
    "varbit": "Debezium loses the length of the bits",
}
_FIRST: Final = {
    "date[]": "DATE '0001-01-01'",
    "timestamptz[]": "TIMESTAMPTZ '0001-01-01 00:00:00+00'",
}
"""Type → the first value of its elements that Debezium writes as it is."""
_FIRST_DAY: Final = re.compile(
    r"CHECK \(\('0001-01-01(?: 00:00:00\+00)?'::(?:date|timestamp with time zone) <= ALL \(.+\)\)\)"
)
_ODD_DAYS: Final = (
    "a row has a day before the year 1, or one of the ten days that the calendar left out in"
    " October 1582, which Debezium's snapshots write as another day"
)
_HAS_ODD_DAYS: Final = (
    "coalesce(bool_or(isfinite({0}) AND ({0} < DATE '0001-01-01'"
    " OR {0} BETWEEN DATE '1582-10-05' AND DATE '1582-10-14')), false) AS {0}"
)
_NO_CALENDAR: Final = (
    "a row has a date with month 0 or day 0, which Debezium writes as null or as 1970-01-01, or a"
    " time of the year 0, which it writes as one of the year 1"
)
_NO_YEAR: Final = "Debezium writes the year 0000 as 2000 in snapshots and as 1900 in changes"
_HAS_NO_YEAR: Final = f"a row has the year 0000, and {_NO_YEAR}"
_NO_DAY: Final = "max(0 IN (year({0}), month({0}), day({0})))"
_ODD: Final = {
    **dict.fromkeys(("date", "datetime", "timestamp"), _NO_DAY),
    "year": "max({0} < 1901)",
}
"""Type of a column → SQL that says whether it has such values."""

_Texts = tuple[str, str, str]
"""How Debezium writes other values than a column has, what a user can do about it, and a statement
that keeps such values out, or ""."""

_BEFORE_CHRIST: Final = (
    "Debezium writes a value before the year 1 in a {kind} as one after it, and no CHECK of the"
    " table keeps such values out",
    "Or leave it out: drop=({column},).",
    "ALTER TABLE {name} ADD CHECK ({check});",
)
_YEARS: Final = (
    f"{_NO_YEAR}, and no CHECK of the table keeps it out",
    "Or declare that there is no such year: types={{{column}: int}} of its Table.",
    "ALTER TABLE {name} ADD CHECK ({check});",
)
_ROUNDED: Final = (
    "Debezium's snapshots round a float to six digits, and its changes do not",
    "Make it a double, which is exact; or declare types={{{column}: float}} of its Table, which"
    " takes six digits.",
    "",
)
_MAY_COME: Final = (
    "the server's sql_mode takes dates with month 0 or day 0, which Debezium would write as null or"
    " as the column's default",
    "Put it into the configuration file too; open sessions keep their sql_mode. Or declare that no"
    " such date is written: types={{{column}: 'days'}} of its Table, 'us' for a datetime or"
    " timestamp.",
    "SET GLOBAL sql_mode = concat(@@GLOBAL.sql_mode,"
    " ',NO_ZERO_DATE,NO_ZERO_IN_DATE,STRICT_TRANS_TABLES');",
)
"""Of another column, and where the default is the present time, such a date arrives as 1970-01-01,
which is refused when it arrives."""


def inexact_in_postgres(run: RunQuery, tables: Iterable[str]) -> Iterator[InexactColumn]:
    """The columns of these tables that Debezium does not carry as they are.

    Cost: a pass over each table with days.
    """
    days: dict[str, list[str]] = {}
    for row in run(COLUMNS, list(tables)):
        table, column, kind = row["table"], row["name"], ColumnType(**row["kind"])
        form = None if kind.untold else kind.form
        if form in _POSTGRES:
            yield _left_out(table, column, _POSTGRES[form])
        elif form in _FIRST and not any(map(_FIRST_DAY.fullmatch, row["checks"])):
            check = f"{_FIRST[form]} <= ALL ({quoted_name(column)})"
            facts = {"kind": kind.text, "name": quoted(table), "check": check}
            yield _settled(table, column, _BEFORE_CHRIST, **facts)
        elif form == "date":
            days.setdefault(table, []).append(column)
    for table, columns in days.items():
        sides = [_HAS_ODD_DAYS.format(quoted_name(column)) for column in columns]
        (has,) = run(f"SELECT {', '.join(sides)} FROM {quoted(table)}")
        yield from (_left_out(table, column, _ODD_DAYS) for column in columns if has[column])


def _settled(table: str, column: str, texts: _Texts, **facts: str) -> InexactColumn:
    """A column that a declared type of it makes right."""
    reason, advice, sql = (text.format(column=repr(column), **facts) for text in texts)
    return InexactColumn(table, column, reason, advice, (sql,) if sql else (), settled_by_type=True)


def _left_out(table: str, column: str, reason: str) -> InexactColumn:
    advice = f"Correct the column, or leave it out: its Table with drop=({column!r},)."
    return InexactColumn(table, column, reason, advice)


def inexact_in_mariadb(
    run: RunQuery, tables: Iterable[str], checks: str = MariaChecks.kept_out
) -> Iterator[InexactColumn]:
    """Columns with dates that no calendar has (`0000-00-00`, `2026-00-15`), or that may get them.

    Also columns of floats and of years. ``checks``: a query of a table's CHECKs. Cost: at most two
    passes over each table with such columns.
    """
    (server,) = run("SELECT @@GLOBAL.sql_mode AS mode")
    takes_them = bool(modes_missing(str(server["mode"])))
    for table in tables:
        listed = {str(each["name"]): each for each in columns_of(run, table)}
        floats = [name for name, each in listed.items() if each["type"] == "float"]
        yield from (_settled(table, name, _ROUNDED) for name in floats)
        odd = {
            name: _ODD[each["type"]].format(quoted_name(name, SIGN))
            for name, each in listed.items()
            if each["type"] in _ODD
        }
        if not odd:
            continue
        (row,) = run(f"SELECT {', '.join(odd.values())} FROM {quoted(table, SIGN)}")
        for name, has in zip(odd, row.values(), strict=True):
            column, check = listed[name], f"{quoted_name(name, SIGN)} >= 1901"
            has_constant = column["has_default"] and not column["default_is_now"]
            is_year, has_other = column["type"] == "year", column["may_be_null"] or has_constant
            if has:
                yield _left_out(table, name, _HAS_NO_YEAR if is_year else _NO_CALENDAR)
            elif is_year and {check, f"({check})"}.isdisjoint(
                each["text"] for each in run(checks, *table.split(".", 1))
            ):
                yield _settled(table, name, _YEARS, name=quoted(table, SIGN), check=check)
            elif not is_year and takes_them and has_other:
                yield _settled(table, name, _MAY_COME)


def inexact_in_outbox(run: RunQuery, table: str) -> list[InexactColumn]:
    """Columns of an outbox whose nulls Debezium's router replaces by their default."""
    reason = "a null in it would be read as its default"
    advice = "Remove its default, or make it NOT NULL."
    return [
        InexactColumn(table, column["name"], reason, advice)
        for column in columns_of(run, table)
        if column["may_be_null"] and column["has_default"]
    ]


def check_values(
    capture: Capture, entities: Mapping[str, EntityType], database: CapturedDatabase
) -> list[Finding]:
    """Look for columns whose values the connector would change; a pass over tables with dates."""
    try:
        inexact, findings = database.inexact_columns(), list[Finding]()
    except CaptureFailed as error:
        return [Finding("values of columns", "fail", error.message)]
    for each in inexact:
        reason = each.reason
        if capture.outbox is None or each.table != capture.outbox.table:
            mapping = mapping_of(capture, each.table, entities)
            field = None if mapping is None else mapping.field_of(each.column)
            types = map(str.lower, mapping.table.types if mapping else ())
            if field is None or (each.settled_by_type and each.column.lower() in types):
                continue
            reason += f", so field {field} would have other values than the table"
        name = f"values of {each.table}.{each.column}"
        findings.append(Finding(name, "fail", reason, each.sql, each.advice))
    return findings
