"""Values as people write them in conditions, keys and cursors: exact, or refused."""

from __future__ import annotations

import base64
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import httpx
import pytest

from everstate.changes.quoting import conditions_in, joined
from everstate.changes.written import written_value
from everstate.client import Client, RequestFailed
from everstate.errors import ContradictoryQuery, InvalidQuery
from everstate.serving.predicates import Term, condition, order_term
from everstate.serving.view_columns import ViewColumn, column_of
from everstate.serving.view_rows import _parsed


@pytest.mark.parametrize(
    ("cast", "text", "value"),
    [
        ("bigint", "-9223372036854775808", -(2**63)),
        ("whole", "1" * 40, int("1" * 40)),
        ("float8", "0.1", 0.1),
        ("float8", "1E+22", 1e22),
        ("float8", "9007199254740992.000", 9007199254740992.0),
        ("float8", "0.1000000000000000055511151231257827021181583404541015625", 0.1),
        ("float8", "-inf", float("-inf")),
        ("numeric", "0.10000000000000000001", Decimal("0.10000000000000000001")),
        ("numeric", "1e400", Decimal("1e400")),
        ("boolean", "True", True),
        ("date", "2013-02-08", date(2013, 2, 8)),
        ("timestamp", "2013-02-08T12:00:00.12000000", datetime(2013, 2, 8, 12, 0, 0, 120_000)),  # noqa: DTZ001
        ("timestamptz", "2013-02-08T12:00+02:00", datetime(2013, 2, 8, 10, tzinfo=UTC)),
        (
            "uuid",
            "0199C8A2-7C11-7D3E-9A55-0D8F2F6B1C77",
            UUID(int=0x0199C8A27C117D3E9A550D8F2F6B1C77),
        ),
        ("text", " a ", " a "),
    ],
)
def test_a_value_that_its_type_can_hold_is_read_exactly(cast: str, text: str, value: Any) -> None:
    found = written_value(cast, text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("cast", "text", "said"),
    [
        ("float8", "9007199254740993", "a float can hold; the next one is 9007199254740992.0"),
        ("float8", "0.10000000000000000001", "a float can hold"),
        ("float8", "1e400", "a float can hold"),
        ("float8", "1e-400", "a float can hold"),
        ("float8", "1_0", "digits"),
        ("numeric", "NaN", "digits"),
        ("numeric", "sNaN", "digits"),
        ("numeric", "Infinity", "digits"),
        ("numeric", "1_0", "digits"),
        ("numeric", "１０", "digits"),
        ("numeric", "1e200000", "131,072 digits"),
        ("numeric", "1e-20000", "16,383"),
        ("numeric", "1e99999999999999999999", "exponent"),
        ("bigint", "9223372036854775808", "64 bits"),
        ("bigint", "1_0", "digits"),
        ("bigint", "１０", "digits"),
        ("bigint", " 10 ", "digits"),
        ("boolean", "yes", "true or false"),
        ("boolean", "1", "true or false"),
        ("date", "1360281600", "2013-02-08"),
        ("date", "20130208", "2013-02-08"),
        ("date", "2013-02-08T10:00", "2013-02-08"),
        ("date", "2013-02-30", "calendar"),
        ("timestamp", "2013-02-08T12:00+02:00", "without an offset"),
        ("timestamp", "2013-02-08T12:00Z", "without an offset"),
        ("timestamp", "2013-02-08T12:00:00.1234569", "microsecond"),
        ("timestamptz", "2013-02-08T12:00:00.1234569Z", "microsecond"),
        ("timestamptz", " 2013-02-08T12:00Z", "blanks"),
        ("timestamptz", "2013-02-08T12:00", "no UTC offset"),
        ("uuid", "1_" * 16, "hexadecimal"),
        ("text", "\ud800", "UTF-8"),
        ("text", "a\0", "NUL"),
    ],
)
def test_a_value_that_would_be_changed_is_refused(cast: str, text: str, said: str) -> None:
    with pytest.raises((ValueError, InvalidQuery), match=said):
        written_value(cast, text)


def test_a_condition_that_is_refused_names_itself_and_the_reason() -> None:
    columns = [ViewColumn("x", "double precision"), ViewColumn("l", "timestamp without time zone")]
    find = partial(column_of, "readings", columns)
    with pytest.raises(InvalidQuery) as refused:
        condition("x=9007199254740993", find)
    assert "x=9007199254740993" in refused.value.message
    assert "9007199254740992.0" in (refused.value.advice or "")
    with pytest.raises(InvalidQuery, match="l is a local time"):
        condition("l=2013-02-08T12:00+02:00", find)


def test_a_column_is_ordered_by_its_own_type_so_that_an_index_with_a_scale_serves() -> None:
    columns = [ViewColumn("price", "numeric"), ViewColumn("count", "integer")]
    find = partial(column_of, "sales", columns)
    orders = [order_term(name, find).order for name in ("-price", "count")]
    assert orders == ['"price" DESC NULLS LAST', '"count"::bigint ASC NULLS LAST']
    large, _ = condition("price=1.5", find).compose()
    assert large == '"price" = %s::numeric'


TERMS = [
    Term(name, name, cast)
    for name, cast in (("at", "timestamptz"), ("name", "text"), ("n", "bigint"))
]
SOUND = [3, ["at", "name", "n"], ["2013-02-08T10:00:00+00:00", "a", None]]


def cursor(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def read_cursor(content: Any) -> list[Any]:
    return _parsed(cursor(content), 3, ["at", "name", "n"], TERMS)


def test_a_cursor_has_the_values_of_a_row() -> None:
    assert read_cursor(SOUND) == [datetime(2013, 2, 8, 10, tzinfo=UTC), "a", None]
    with pytest.raises(ContradictoryQuery, match="of version 2"):
        read_cursor([2, *SOUND[1:]])
    with pytest.raises(ContradictoryQuery, match="another order"):
        read_cursor([3, ["at"], SOUND[2]])


@pytest.mark.parametrize(
    "content",
    [
        [3, SOUND[1], [5, "a", None]],
        [3, SOUND[1], ["2013-02-08T10:00", "a", None]],
        [3, SOUND[1], [None, "\ud800", None]],
        [3, SOUND[1], [None, "a", "1_0"]],
        [3, SOUND[1], [None, "a", ["1"]]],
        [3, SOUND[1], [None, "a"]],
        [3, SOUND[1], 5],
        ["\ud800", *SOUND[1:]],
        [float("inf"), *SOUND[1:]],
        {},
    ],
)
def test_a_cursor_that_no_page_gave_is_refused(content: Any) -> None:
    with pytest.raises(ContradictoryQuery, match="not of an earlier page"):
        read_cursor(content)


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("", []),
        (";;", []),
        ("a=1;b>2", ["a=1", "b>2"]),
        ('title="a;b"', ['title="a;b"']),
        ('title = "a;b" ;size>3', ['title = "a;b" ', "size>3"]),
        (r'title="a\";b";n=1', [r'title="a\";b"', "n=1"]),
        ('title=5";size>3;name=6"', ['title=5"', "size>3", 'name=6"']),
        ('title="a;size>3', ['title="a', "size>3"]),
        ('title="a"b;size>3', ['title="a"b', "size>3"]),
    ],
)
def test_conditions_are_split_outside_a_value_in_quotes(text: str, conditions: list[str]) -> None:
    assert conditions_in(text) == conditions


@pytest.mark.parametrize(
    ("condition_given", "written"),
    [
        ("title=a;b", 'title="a;b"'),
        ("title=x;size>3", 'title="x;size>3"'),
        ("title==;x", 'title="=;x"'),
        ('title="a', r'title="\"a"'),
        ('title="a;b"', 'title="a;b"'),
        ("title=a\t;\n", r'title="a\t;\n"'),
        ("size>3", "size>3"),
    ],
)
def test_a_client_quotes_a_value_that_would_be_split(condition_given: str, written: str) -> None:
    text = joined([condition_given, 'note=b"'])
    assert conditions_in(text) == [written, 'note=b"']
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["where"])
        return httpx.Response(404)

    client = Client("http://shop.test")
    client._client.connections = httpx.Client(
        base_url="http://shop.test", transport=httpx.MockTransport(answer)
    )
    for rows in (client.view_rows, client.follow_view):
        with pytest.raises(RequestFailed):
            next(iter(rows("v", where=[condition_given, 'note=b"'])))
    assert asked == [text, text]
