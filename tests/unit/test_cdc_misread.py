"""A table that the connector reads by the columns of another one is noticed; others are not."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.misread import (
    ColumnCheck,
    ReadColumn,
    difference,
    known_columns,
    members_of,
    read_column,
)

TABLE = "shop.items"
ID, A, B = (ReadColumn(name) for name in ("id", "a", "b"))


def statement(*columns: Any, table: str = '"shop"."items"') -> bytes:
    """A record of the connector's history, as Debezium 3.5 writes it (shortened)."""
    listed = [
        {
            "name": column if isinstance(column, str) else column[0],
            "typeName": "INT" if isinstance(column, str) else column[1],
            "charsetName": None,
            "position": at,
            "enumValues": [] if isinstance(column, str) else column[2:],
        }
        for at, column in enumerate(columns, 1)
    ]
    changes = [{"type": "ALTER", "id": table, "table": {"columns": listed}, "comment": None}]
    return json.dumps({"source": {"server": "x"}, "ddl": "…", "tableChanges": changes}).encode()


class Tables(MariaDatabase):
    """The captured database."""

    def __init__(self, *columns: ReadColumn, at: float = 100.0) -> None:
        self.now, self.at, self.reads = list(columns), at, 0

    def changed_s(self, tables: Collection[str]) -> dict[str, float]:
        return {TABLE: self.at} if TABLE in tables else {}

    def columns(self, table: str) -> list[dict[str, Any]]:
        assert table == TABLE
        self.reads += 1
        return [{"name": one.name, "whole_type": "int", "charset": None} for one in self.now]


def test_a_table_whose_columns_stand_in_another_order_is_told_once_the_connector_is_past() -> None:
    check, tables, history = ColumnCheck(), Tables(ID, B, A), [statement("id", "a", "b")]
    for early in ({}, {"ts_sec": 105}, {"ts_sec": 200, "snapshot": True}):
        assert check.misread(tables, [TABLE], early, history) is None
    said = (TABLE, "column 2 is a, and b in the table")
    assert check.misread(tables, [TABLE], {"ts_sec": 106}, history) == said
    # It is told again until something is done about it.
    assert check.misread(tables, [TABLE], {"ts_sec": 107}, history) == said


def test_a_table_is_read_again_only_after_another_statement() -> None:
    check, tables, history = ColumnCheck(), Tables(ID, A), [statement("id", "a")]

    def read_once() -> Iterator[bytes]:
        yield from history

    assert check.misread(tables, [TABLE], {"ts_sec": 106}, read_once()) is None
    assert check.misread(tables, [TABLE], {"ts_sec": 900}, iter(())) is None
    assert tables.reads == 1
    tables.now, tables.at = [ID, A, B], 1000.0
    history.append(statement("id", "a", "b"))
    assert check.misread(tables, [TABLE], {"ts_sec": 1006}, history) is None
    assert tables.reads == 2


def test_a_statement_that_comes_while_columns_are_compared_is_compared_later() -> None:
    class Changing(Tables):
        def columns(self, table: str) -> list[dict[str, Any]]:
            found = super().columns(table)
            self.at = 300.0
            return found

    tables = Changing(ID, A)
    assert ColumnCheck().misread(tables, [TABLE], {"ts_sec": 106}, [statement("id", "b")]) is None


def test_a_table_without_a_definition_or_that_is_gone_is_left_to_other_checks() -> None:
    check = ColumnCheck()
    other = [statement("x", table='"shop"."other"'), b'{"ddl": "SET x", "tableChanges": []}']
    assert check.misread(Tables(ID), [TABLE, "shop.gone"], {"ts_sec": 106}, other) is None


def test_the_newest_definition_counts_in_the_order_of_its_positions() -> None:
    history = [statement("id"), statement("id", "a", table='"cat"."shop"."it""ems"')]
    assert known_columns([*history, statement("id", ("a", "ENUM", "'x'"))]) == {
        TABLE: [ID, ReadColumn("a", ("'x'",))],
        'shop.it"ems': [ID, A],
    }


@pytest.mark.parametrize(
    ("known", "real"),
    [
        (("TINYINT", None), ("tinyint(1)", None)),
        (("BOOLEAN", None), ("tinyint(1)", None)),
        (("DEC UNSIGNED", None), ("decimal(10,0) unsigned", None)),
        (("INT ZEROFILL", None), ("int(10) unsigned zerofill", None)),
        (("YEAR", None), ("year(4)", None)),
        (("TIMESTAMP", None), ("timestamp(6)", None)),
        (("NATIONAL VARCHAR", "utf8mb4"), ("varchar(10)", "utf8mb3")),
        (("JSON", None), ("longtext", "utf8mb4")),
    ],
)
def test_two_names_of_one_type_are_no_difference(known: Any, real: Any) -> None:
    one, other = (read_column("a", kind, charset=charset) for kind, charset in (known, real))
    assert difference([one], [other]) is None


@pytest.mark.parametrize(
    ("known", "real", "said"),
    [
        ("INT", "int(10) unsigned", "another type, and unsigned"),
        ("DATETIME", "timestamp", "datetime, and timestamp"),
        ("ENUM('a','b')", "enum('b','a')", "'a' 'b', and 'b' 'a'"),
        ("SET('a')", "set('a','it''s unsigned')", "'a', and 'a' 'it''s unsigned'"),
    ],
)
def test_types_by_which_another_value_is_read_are_a_difference(
    known: str, real: str, said: str
) -> None:
    one, other = (read_column("a", kind, members=members_of(kind)) for kind in (known, real))
    assert difference([one], [other]) == f"column a is {said} in the table"


def test_an_other_character_set_and_another_number_of_columns_are_differences() -> None:
    one, other = (read_column("a", "text", charset=name) for name in ("utf8mb4", "latin1"))
    assert difference([one], [other]) == "column a is utf8, and latin1 in the table"
    assert difference([ID], [ID, A]) == "1 columns, and the table has 2"
