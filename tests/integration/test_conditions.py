"""A condition means one thing: exactly the values that were written, in SQL and in a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

import psycopg
import pytest
from psycopg import Connection
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime

from everstate.api.view_following import RowFilter, ViewWish
from everstate.changes import EntityType
from everstate.serving.predicates import condition, field_of, order_term
from everstate.serving.view_columns import column_of, columns_of
from everstate.serving.view_watch import SeenRow


class Reading(BaseModel):
    reading_id: str
    n: int | None = None
    x: float | None = None
    d: Annotated[Decimal, Field(max_digits=30, decimal_places=2)] | None = None
    b: bool | None = None
    day: date | None = None
    t: AwareDatetime | None = None
    l: NaiveDatetime | None = None  # noqa: E741
    s: str | None = None


FIELD = partial(field_of, EntityType("reading", Reading, "reading_id"))
STATES: dict[str, str] = {
    "none": "{}",
    "even": '{"n": 5, "x": 9007199254740992, "d": "12.50", "b": true, "s": "5"}',
    "odd": '{"n": 6, "x": 9007199254740993, "d": 12.5, "b": false, "s": "6"}',
    "tenth": '{"x": 0.1, "d": "12.505"}',
    "nearly a tenth": '{"x": 0.10000000000000000001, "d": 12.505}',
    "tiny": '{"x": 1e-400}',
    "huge": '{"n": 100000000000000000000, "x": 1e400, "d": "1e40"}',
    "words": '{"n": "5", "x": "0.1", "d": "NaN", "b": "true", "day": "today", "t": "now"}',
    "a day": '{"day": "2013-02-08", "t": "2013-02-08T10:00:00Z", "l": "2013-02-08T10:00:00"}',
    "a time": '{"day": "2013-02-08T10:00", "t": "2013-02-08T10:00:00.1234560Z"}',
    "finer": '{"t": "2013-02-08T10:00:00.1234564Z", "l": "2013-02-08T10:00:00.0000004"}',
}


@pytest.fixture
def connection(database: str) -> Iterator[Connection[Any]]:
    with psycopg.connect(database, autocommit=True, options="-c timezone=UTC") as made:
        made.execute("CREATE TABLE reading (key text PRIMARY KEY, state jsonb)")
        for key, state in STATES.items():
            made.execute("INSERT INTO reading VALUES (%s, %s)", (key, state))
        yield made


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        ("x=9007199254740992", {"even"}),
        ("x=9007199254740993", {"odd"}),
        ("x=0.1", {"tenth"}),
        ("x=0.10000000000000000001", {"nearly a tenth"}),
        ("x<0.1", {"tiny"}),
        ("x<=0", set()),
        ("x>=1e400", {"huge"}),
        ("x>1e400", set()),
        ("x>1e-400", set(STATES) & {"even", "odd", "tenth", "nearly a tenth", "huge"}),
        ("n=5", {"even"}),
        ("n>5", {"odd", "huge"}),
        ("n=100000000000000000000", {"huge"}),
        ("d=12.5", {"even", "odd"}),
        ("d=12.505", {"tenth", "nearly a tenth"}),
        ("d>1e39", {"huge"}),
        ("b=true", {"even"}),
        ("day=2013-02-08", {"a day"}),
        ("day>1970-01-01", {"a day"}),
        ("t=2013-02-08T12:00+02:00", {"a day"}),
        ("t=2013-02-08T10:00:00.123456Z", {"a time"}),
        ("t!=null", {"a day", "a time"}),
        ("l=2013-02-08T10:00", {"a day"}),
        ("s=5", {"even"}),
    ],
)
def test_fields_are_compared_by_what_was_written(
    connection: Connection[Any], where: str, keys: set[str]
) -> None:
    text, values = condition(where, FIELD).compose()
    query = f"SELECT key FROM reading WHERE {text}".encode()
    assert {key for (key,) in connection.execute(query, values)} == keys


def test_fields_are_ordered_by_what_was_written(connection: Connection[Any]) -> None:
    text = order_term("-x", FIELD).order
    query = "SELECT key FROM reading WHERE state -> 'x' IS NOT NULL ORDER BY {}"
    found = [key for (key,) in connection.execute(query.format(text))]
    assert found == ["huge", "odd", "even", "nearly a tenth", "tenth", "tiny", "words"]


COLUMNS = {
    "n": "bigint",
    "small": "integer",
    "x": "double precision",
    "r": "real",
    "d": "numeric(20,4)",
    "e": "numeric",
    "b": "boolean",
    "day": "date",
    "t": "timestamptz",
    "l": "timestamp",
    "u": "uuid",
    "s": "text",
}
WRITTEN: dict[str, tuple[str | None, ...]] = {
    "n": ("10", "-9223372036854775808", None),
    "small": ("10", "-1", None),
    "x": ("0.1", "NaN", "-Infinity", "-0", "9007199254740992", "1e-320", None),
    "r": ("0.5", "0.1", "NaN", None),
    "d": ("12.5", "-0.0001", None),
    "e": ("0.10000000000000000001", "1e40", None),
    "b": ("true", "false", None),
    "day": ("2013-02-08", "0001-01-01", None),
    "t": ("2024-11-03 05:45:00.123456+00", "2013-02-08 10:00+00", None),
    "l": ("2013-02-08 12:00", "2013-02-08 10:00:00.000001", None),
    "u": ("0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77", None),
    "s": ("null", "a;b", 'say "x"', " a ", "", "é", None),
}
"""By column: values of rows, as PostgreSQL reads them."""
ASKED = (
    *("n=10", "n=-9223372036854775808", "n=010", "n=null", "small=10", "small=99999999999"),
    *("x=0.1", "x=nan", "x=-inf", "x=0", "x=-0.0", "x=9007199254740992", "x=1e-320", "x=null"),
    *("x=0.2", "r=0.5", "r=0.1", "r=0.10000000149011612", "r=NaN", "d=12.50", "d=-1E-4", "d=7"),
    *("e=0.10000000000000000001", "e=0.1", "e=1E+40", "b=true", "b=FALSE", "b=null"),
    *("day=2013-02-08", "day=0001-01-01", "t=2024-11-03T01:45:00.123456-04:00"),
    *("t=2013-02-08T12:00+02:00", "t=2013-02-08 11:00 Europe/Vienna", "t=null"),
    *("l=2013-02-08T12:00", "l=2013-02-08 10:00:00.000001000", "l=2013-02-08T10:00"),
    *("u=0199C8A2-7C11-7D3E-9A55-0D8F2F6B1C77", "u=0199c8a27c117d3e9a550d8f2f6b1c77"),
    *('s="null"', "s=null", 's="a;b"', 's=say "x"', 's=" a "', "s=", "s=é", "s=nothing"),
)


def test_a_stream_filters_the_rows_that_sql_finds(connection: Connection[Any]) -> None:
    typed = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    connection.execute(f"CREATE TABLE readings__v1 (id text, {typed})".encode())
    connection.execute("CREATE VIEW readings AS SELECT * FROM readings__v1")
    for name, values in WRITTEN.items():
        for place, value in enumerate(values):
            insert = f"INSERT INTO readings__v1 (id, {name}) VALUES (%s, %s)"
            connection.execute(insert.encode(), (f"{name} {place}", value))
    columns = columns_of(connection, "public", "readings")["readings"]
    rows = connection.execute("SELECT * FROM readings", binary=True).fetchall()
    find = partial(column_of, "readings", columns)
    found: dict[str, set[str]] = {}
    for text in ASKED:
        said, values_asked = condition(text, find).compose()
        query = f"SELECT id FROM readings WHERE {said}".encode()
        found[text] = {one for (one,) in connection.execute(query, values_asked)}
        stream = RowFilter(ViewWish("readings", [text], None), columns)
        assert {row[0] for row in rows if stream.seen(SeenRow(row, b""))} == found[text], text
    nothing = {text for text, ids in found.items() if not ids}
    expected = {"small=99999999999", "x=0.2", "r=0.1", "d=7", "e=0.1", "s=nothing"}
    assert nothing == expected | {"l=2013-02-08T10:00"}
    assert json.dumps(sorted(found["x=nan"])) == '["x 1"]'
