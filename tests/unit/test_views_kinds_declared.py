"""How each kind is declared: what it becomes, what is refused and what the refusal advises."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel, Field, NaiveDatetime

from everstate.app import App
from everstate.errors import InvalidView, ViewFailed
from everstate.views.durations import microseconds
from everstate.views.kinds import ViewPlan
from everstate.views.kinds.python import _meaning
from everstate.views.kinds.row import RowPlan
from everstate.views.policies import ignore
from everstate.views.tables import PythonTable
from everstate.views.whole_keys import (
    FunctionFailed,
    InBatch,
    by_whole_keys,
    called,
    input_schema,
    typed_states,
)
from kind_app import app as kinds
from kind_cases import Shop
from view_fuzz import Sale

HOUR = 3_600_000_000


class Door(BaseModel):
    """A field with the name of a column that timelines have, and a local time."""

    code: str
    reason: str | None = None
    opened: NaiveDatetime | None = None


def app() -> App:
    made = App("declared")
    made.entity("sale", key="sale_id")(Sale)
    made.entity("shop", key="code")(Shop)
    made.entity("note", key="code", history=False)(Shop)
    made.entity("door", key="code")(Door)
    return made


ROWS = "SELECT shop, region FROM sale"
GROUPS = "SELECT shop, count(*) AS n FROM sale GROUP BY shop"
CHANGES = "SELECT shop, count(*) AS n FROM sale_changes GROUP BY shop"
BY_WINDOW = "SELECT window.start AS s, count(*) AS n FROM sale GROUP BY window(moment, {})"
NUMBERED = "SELECT shop, row_number() OVER (PARTITION BY shop ORDER BY day) AS n FROM sale"
JOINED = "SELECT s.shop, h.city FROM sale s JOIN shop h ON s.shop = h.code"

HISTORY = "SELECT region, price FROM sale_history"
IN_LAKE: dict[str, Any] = {"store": "lake"}
REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    (ROWS, {"scale": 2}, "the option scale is only for views of sums", "Leave it out"),
    (GROUPS, {"indexes": ["shop"]}, "the option indexes is only for views of rows", None),
    (GROUPS, {"search": ["shop"]}, "the option search is only for views of rows", None),
    (CHANGES, {"ttl": "1 hour"}, "the option ttl is only for views of rows", None),
    (ROWS, {"language": "english"}, "language is only for views of words", None),
    (ROWS, {"search": ["shop"], "language": "englsh"}, "language 'englsh'", "english"),
    (ROWS, {"search": ["shp"]}, "shp", "shop"),
    (ROWS, {"indexes": [["shop", "regio"]]}, "regio", "region"),
    (ROWS, {"search": ["shop"], "ttl": "1 hour"}, "both ttl and search", None),
    ("SELECT shop AS _words FROM sale", {"search": ["_words"]}, "adds itself", "another name"),
    ("SELECT shop AS _Active_at FROM sale", {"ttl": "1 hour"}, "adds itself", "another name"),
    ("SELECT shop AS _expires_at FROM sale", {"ttl": "1 hour"}, "adds itself", "another name"),
    (f"{JOINED} AND CAST(s.quantity AS INT) = h.city", {}, "a number with string", "CAST one"),
    (f"{JOINED} AND CAST(h.size AS STRING) = s.quantity", {}, "number with string", "CAST one"),
    (
        "SELECT h.city, count(*) AS n FROM sale s JOIN shop h ON s.shop = h.code "
        "AND s.region = h.code GROUP BY h.city",
        {},
        "compares h.code with two values",
        "the two with each other",
    ),
    (
        "SELECT h.city, count(*) AS n FROM sale s JOIN shop h ON s.shop = h.code "
        "AND s.shop = h.city GROUP BY h.city",
        {},
        "compares s.shop with two values",
        "the two with each other",
    ),
    (
        "SELECT window.start AS s, count(*) AS n FROM door GROUP BY window(opened, '1 hour')",
        {},
        "opened is a local time",
        "window(CAST(opened AS TIMESTAMP), …)",
    ),
    (ROWS, {"ttl": "soon"}, "'soon' is not a duration", "'24 hours'"),
    (ROWS, {"ttl": "0 hours"}, "is not a duration for ttl", None),
    (ROWS, {"lateness": "1 hour", "late": "count"}, "only a view of changes", "FROM sale_changes"),
    (CHANGES, {"lateness": "1 hour"}, "has both or neither", 'late="count"'),
    (CHANGES, {"late": "count"}, "has both or neither", 'lateness="1 hour"'),
    (CHANGES, {"lateness": "1 hour", "late": "drop"}, "has both or neither", None),
    (
        "SELECT shop FROM sale_changes",
        {"lateness": "1 hour", "late": "count"},
        "needs groups",
        "GROUP BY",
    ),
    (
        BY_WINDOW.format("'1 month'"),
        {},
        "not a duration of fixed length",
        "date_trunc('MONTH', ts)",
    ),
    (BY_WINDOW.format("'0 seconds'"), {}, "the second duration of window", None),
    (BY_WINDOW.format("'1 hour', '2 hours'"), {}, "at most as long as the first", "'15 minutes'"),
    (
        BY_WINDOW.format("'1 day', '1 second'"),
        {},
        "in 86,400 windows, and at most 1,000",
        "second duration longer",
    ),
    (
        "SELECT window(moment, '1 hour').start AS s FROM sale",
        {},
        "only in a view with GROUP BY",
        None,
    ),
    (
        "SELECT count(*) AS n FROM sale WHERE window(moment, '1 hour').start IS NULL "
        "GROUP BY window(moment, '1 hour')",
        {},
        "not allowed in WHERE",
        "the time itself",
    ),
    (
        "SELECT window(moment, '1 hour').start AS a, window(moment, '2 hours').start AS b "
        "FROM sale GROUP BY window(moment, '1 hour'), window(moment, '2 hours')",
        {},
        "only one kind of window",
        "a view for each",
    ),
    (
        "SELECT session_window(moment, '1 hour').start AS s FROM sale "
        "GROUP BY session_window(moment, '1 hour')",
        {},
        "session_window is not allowed",
        "window(ts, '1 hour')",
    ),
    (
        f"{ROWS} QUALIFY rank() OVER (PARTITION BY shop ORDER BY day) <= 2",
        {},
        "only row_number() <= n is",
        None,
    ),
    (f"{ROWS} QUALIFY row_number() OVER (ORDER BY day) <= 2", {}, "no PARTITION BY", "LIMIT n"),
    (
        f"{ROWS} QUALIFY row_number() OVER (PARTITION BY shop) <= 2",
        {},
        "only row_number() <= n is",
        None,
    ),
    ("SELECT shop, rank() OVER (ORDER BY day) AS r FROM sale", {}, "only in QUALIFY", "QUALIFY"),
    (
        "SELECT key FROM sale_changes QUALIFY row_number() OVER (PARTITION BY shop "
        "ORDER BY occurred_at DESC) = 1",
        {},
        "over changes",
        "LIMIT n",
    ),
    (
        f"{ROWS} QUALIFY row_number() OVER (PARTITION BY shop ORDER BY 2) <= 2",
        {},
        "ORDER BY 2 in a window is a constant",
        "the column's name",
    ),
    (
        f"{NUMBERED} QUALIFY n <= 2 ORDER BY shop, n LIMIT 5",
        {},
        "ORDER BY names n, which is the row_number",
        "the category and the order of the window",
    ),
    (f"{NUMBERED} QUALIFY n <= 2 ORDER BY 2", {}, "ORDER BY names n", None),
    (
        f"{NUMBERED.replace(' n ', ' region ')} QUALIFY region <= 2",
        {},
        "the name region in QUALIFY is both a column and an alias",
        "another name",
    ),
    (f"{JOINED} JOIN shop g ON g.code = s.region", {}, "at most two", "join the third"),
    (JOINED.replace("JOIN shop", "RIGHT JOIN shop"), {}, "only JOIN … ON", None),
    (JOINED.replace("JOIN shop h", "JOIN sale h").replace("city", "day"), {}, "with itself", None),
    (JOINED.replace("= h.code", "< h.code"), {}, "does not compare a field", "f.carrier = a.code"),
    (JOINED.replace("FROM sale s", "FROM sale_changes s"), {}, "a join of changes", None),
    (
        "SELECT h.city, max(s.price) AS m FROM sale s JOIN shop h ON s.shop = h.code "
        "GROUP BY h.city",
        {},
        "over a join are not allowed",
        "of one side",
    ),
    (
        "SELECT h.city, sum(s.ratio) AS r FROM sale s JOIN shop h ON s.shop = h.code "
        "GROUP BY h.city",
        {},
        "over the float s.ratio cannot",
        "CAST(s.ratio AS DECIMAL(18, 4))",
    ),
    (
        "SELECT s.region, count(*) AS n FROM sale s JOIN shop h ON s.shop = h.code GROUP BY h.city",
        {},
        "region: the column 's.region' is neither in GROUP BY (h.city) nor",
        "one value of each term",
    ),
    (
        "SELECT count(*) AS n FROM sale s LEFT JOIN shop h ON s.shop = h.code WHERE h.size > 1 "
        "GROUP BY s.region",
        {},
        "right side of a LEFT JOIN",
        "Write JOIN",
    ),
    (
        "SELECT count(*) AS n FROM sale s JOIN shop h ON s.shop = h.code "
        "GROUP BY window(moment, '1 hour')",
        {},
        "not allowed in a join",
        "date_trunc",
    ),
    (HISTORY, {}, "PostgreSQL keeps no view of all states", 'store="lake"'),
    (HISTORY, {"store": "redis"}, "all states are kept in the lake", 'store="lake"'),
    (HISTORY, {**IN_LAKE, "ttl": "1 hour"}, "ttl is only for", None),
    (
        HISTORY,
        {**IN_LAKE, "policies": [ignore(actor="x")]},
        "a trigger or policies",
        "sale_changes",
    ),
    (f"{HISTORY} ORDER BY region LIMIT 3", IN_LAKE, "ORDER BY, LIMIT, OFFSET and indexes", None),
    (HISTORY.replace("price", "day AS valid_to"), IN_LAKE, "column 'valid_to' is of", None),
    (
        "SELECT region, count(*) AS n FROM sale_history GROUP BY region",
        IN_LAKE,
        "groups and top lists of a history",
        "Keep its rows",
    ),
    (JOINED.replace("JOIN shop h", "JOIN shop_history h"), {}, "or of histories", None),
]


@pytest.mark.parametrize(("sql", "options", "reason", "advice"), REFUSED)
def test_what_cannot_be_kept_is_refused_with_the_nearest_form(
    sql: str, options: dict[str, Any], reason: str, advice: str | None
) -> None:
    with pytest.raises(InvalidView) as refused:
        app().view("v", sql=sql, **options)
    assert reason in refused.value.message
    assert advice is None or advice in (refused.value.advice or "")


@pytest.mark.parametrize(
    ("attributes", "entity", "reason"),
    [
        ((), "sale", "names no attribute"),
        (("shp",), "sale", "shp"),
        (("place",), "sale", "several values"),
        (("city",), "note", "note was registered without"),
        (("shop", "day", "shop"), "sale", "attribute shop twice.*each attribute once"),
        (("reason",), "door", "already has a column reason.*from door_history"),
    ],
)
def test_a_timeline_says_what_it_needs(
    attributes: tuple[str, ...], entity: str, reason: str
) -> None:
    with pytest.raises(InvalidView, match=reason):
        app().timeline("t", entity, *attributes)


def test_a_view_of_what_is_sent_aside_is_declared_beside_it() -> None:
    made = app()
    made.view("v", sql=CHANGES, lateness="1 hour", late="aside")
    assert list(made.views) == ["v", "v_late"]
    assert {"key", "version", "current", "late"} - set(made.views["v_late"].defined) == {"late"}


@pytest.mark.parametrize("plan", kinds.views.values(), ids=lambda plan: plan.name)
def test_every_kind_says_what_is_kept_and_what_a_read_costs(plan: ViewPlan) -> None:
    told = plan.explained
    assert min(len(told.kept), len(told.change), len(told.read)) >= len("nothing")
    assert "None" not in f"{told.kept} {told.change} {told.read}"


def test_views_that_are_read_from_others_share_what_they_are_read_from() -> None:
    made = app()
    made.view("one", sql=f"{JOINED} WHERE s.paid")
    made.view("two", sql=f"{JOINED.replace('h.city', 'upper(h.city) AS c')} WHERE s.paid")
    made.view("three", sql=JOINED)
    one, two, three = (set(made.views[name].inputs) for name in ("one", "two", "three"))
    assert len(one & three) == 1
    assert len(one | two | three) <= 4


@pytest.mark.parametrize(("left", "right"), [("s", "h"), ("l", "r"), ("r", "l"), ("h", "l")])
def test_a_join_reads_the_same_under_any_aliases(left: str, right: str) -> None:
    made = app()
    made.view("one", sql=JOINED)
    made.view(
        "two",
        sql=f"SELECT {left}.shop, {right}.city FROM sale {left} JOIN shop {right} "
        f"ON {left}.shop = {right}.code",
    )
    assert made.views["one"].inputs == made.views["two"].inputs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 hour", HOUR),
        ("INTERVAL '90 minutes'", HOUR * 3 // 2),
        ("1 day 12 hours", 36 * HOUR),
        ("2 weeks", 336 * HOUR),
        ("500 milliseconds", 500_000),
        ("-1 hour", -HOUR),
        ("1 month", None),
        ("1 year", None),
        ("hour", None),
        ("", None),
        ("1 hour or so", None),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, expected: int | None) -> None:
    assert microseconds(text) == expected


FIELDS = (
    pa.field("amount", pa.decimal128(12, 2)),
    pa.field("at", pa.timestamp("us", "UTC")),
    pa.field("day", pa.date32()),
    pa.field("ratio", pa.float64()),
    pa.field("n", pa.int64()),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("place", pa.struct([("city", pa.string())])),
)


def test_states_are_typed_as_their_model_says_and_what_does_not_fit_is_null() -> None:
    texts = [
        '{"amount": "1.50", "at": "2026-01-02T03:04:05Z", "day": "2026-01-02", "ratio": 1, "n": 7,'
        ' "tags": ["a", null], "place": {"city": "x", "more": 1}}',
        '{"amount": 2.25, "at": "soon", "day": 5, "n": "7", "tags": "a", "place": 3}',
        None,
    ]
    first, second, third = typed_states(texts, FIELDS).to_pylist()
    assert first == {
        "amount": Decimal("1.50"),
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "ratio": 1.0,
        "n": 7,
        "tags": ["a", None],
        "place": {"city": "x"},
    }
    assert second["amount"] == Decimal("2.25")
    assert {name for name, value in second.items() if value is not None} <= {"amount", "tags"}
    assert third is None


def test_a_value_that_a_column_cannot_hold_exactly_is_null() -> None:
    """Arrow would fail for such a decimal, and so would the view, at each later change."""
    fields = (*FIELDS, pa.field("sums", pa.map_(pa.string(), pa.decimal128(12, 2))))
    texts = [
        '{"amount": "12.505", "at": "2026-01-02T03:04:05.0000001Z", "day": "2026-01-02T03:04:05",'
        ' "sums": {"a": 1.505}}',
        '{"amount": 12.500, "at": "2026-01-02T03:04:05.0000000Z", "sums": {"a": 1.50}}',
    ]
    first, second = typed_states(texts, fields).to_pylist()
    assert {name for name, value in first.items() if value is not None} == set()
    assert (second["amount"], second["sums"]) == (Decimal("12.50"), [("a", Decimal("1.50"))])
    assert second["at"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def table(function: Callable[[pa.Table], Any]) -> PythonTable:
    columns = (pa.field("n", pa.int64()),)
    fields = (pa.field("shop", pa.string()),)
    return PythonTable(
        view="v",
        version=1,
        fingerprint="f",
        function=function,
        returned=columns,
        fields=fields,
        history="sale_history",
    )


def changes(counts: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"key": key, "version": version, "kind": "updated", "current": {"shop": "a"}}
        for key, count in counts.items()
        for version in range(1, count + 1)
    ]


def counted(given: pa.Table) -> pa.Table:
    found = given.group_by("key").aggregate([("version", "count")])
    return found.rename_columns({"version_count": "n"})


def test_a_function_gets_whole_keys_whatever_the_batches() -> None:
    """C30: what a Spark task gets is cut anywhere; a key is never divided."""
    kept, counts = table(counted), {"a": 3, "b": 15_000, "c": 9_000, "d": 1, "e": 25_000}
    schema = input_schema(kept)
    inside = ["event", "provenance", "current", "original"]
    rows = pa.Table.from_pylist(changes(counts), schema=schema).combine_chunks()
    argument = pa.StructArray.from_arrays([rows[name].chunk(0) for name in inside], inside)
    given = rows.drop_columns(inside).append_column("argument", argument)
    found = pa.Table.from_batches(InBatch(kept)(iter(given.to_batches(max_chunksize=7_001))))
    assert dict(zip(found["key"].to_pylist(), found["n"].to_pylist(), strict=True)) == counts


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda _: None, "returned NoneType"),
        (lambda _: 1 / 0, "division by zero"),
        (lambda _: sys.exit(3), "SystemExit: 3"),
        (lambda given: given.select(["key"]), "n"),
        (
            lambda _: pa.table({"key": ["stranger"], "n": [1]}),
            "'stranger', which was not in its input",
        ),
        (lambda given: pa.table({"key": given["key"], "n": ["x"] * given.num_rows}), "x"),
    ],
)
def test_a_function_that_fails_says_how(function: Callable[[Any], Any], reason: str) -> None:
    kept = table(function)
    given = pa.Table.from_pylist(changes({"a": 2}), schema=input_schema(kept))
    with pytest.raises(FunctionFailed, match=reason):
        called(kept, given)


def forever(_given: pa.Table) -> None:
    while True:
        pass


@pytest.mark.parametrize("function", [forever, lambda _: threading.Event().wait(30)])
def test_a_function_that_does_not_end_is_given_up_and_its_keys_are_named(
    function: Callable[[Any], Any],
) -> None:
    kept = replace(table(function), call_s_max=0.2)
    given = pa.Table.from_pylist(changes({"a": 2, "b": 1}), schema=input_schema(kept))
    began = time.monotonic()
    with pytest.raises(
        ViewFailed, match=r"longer than 0\.2 s for 3 changes of the keys 'a' to 'b'"
    ):
        called(kept, given)
    assert time.monotonic() < began + 5


def test_a_call_of_many_changes_may_take_longer_and_has_whole_keys() -> None:
    counts = {"a": 3, "b": 15_000, "c": 9_000, "d": 1, "e": 45_000, "f": 2}
    schema = input_schema(table(counted))
    rows = pa.Table.from_pylist(changes(counts), schema=schema)
    parts = list(by_whole_keys(rows))
    assert [pc.unique(part["key"]).to_pylist() for part in parts] == [
        ["a", "b", "c"],
        ["d", "e"],
        ["f"],
    ]
    assert pa.concat_tables(parts) == rows

    def slowly(given: pa.Table) -> pa.Table:
        time.sleep(0.5)
        return counted(given)

    # A limit of 0.02 s is for 20,000 changes.
    with pytest.raises(ViewFailed, match=r"longer than 0\.045001 s for 45,001 changes"):
        called(replace(table(slowly), call_s_max=0.02), parts[1])
    assert called(table(slowly), parts[1]).num_rows == 2


def test_another_body_of_a_function_is_another_meaning_and_a_comment_is_not() -> None:
    columns = [pa.field("n", pa.int64())]
    prints = []
    for body in ("return given", "return given  # all", "return given.slice(0)"):
        scope: dict[str, Any] = {}
        exec(compile(f"def f(given):\n    {body}\n", "<made>", "exec"), scope)
        made = app()
        made.python_view("v", of="sale", columns=columns)(scope["f"])
        prints.append(made.views["v"].fingerprint)
    assert prints[0] == prints[1] != prints[2]
    made = app()
    made.python_view("v", of="sale", columns=columns, version=2)(scope["f"])
    assert made.views["v"].fingerprint not in prints


WITHOUT_SOURCE = """
from everstate.views.kinds.python import _meaning
from everstate.views.kinds.row import RowPlan
f = eval("lambda t: (lambda u: u['n'] in {'a', 'b', 'c', ('d', 'e')})(t) or {'x', 'y', 'z'} > t")
print(_meaning(f))
"""


def test_a_function_without_a_source_has_one_meaning_in_every_process() -> None:
    texts = {
        subprocess.run(
            [sys.executable, "-c", WITHOUT_SOURCE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1
    # A plain one has the meaning that it had in earlier releases.
    plain = eval("lambda t: t.slice(1, 2.5)")
    code = plain.__code__
    assert _meaning(plain) == f"{code.co_code.hex()} {code.co_consts!r} {code.co_names!r}"


class Called:
    def __call__(self, given: pa.Table) -> pa.Table:
        return given


@pytest.mark.parametrize("function", [Called(), partial(lambda n, given: given, 1)])
def test_what_is_no_function_is_refused_as_a_view_in_python(function: Any) -> None:
    with pytest.raises(InvalidView, match="is no function"):
        app().python_view("v", of="sale", columns=[pa.field("n", pa.int64())])(function)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("n", "N"), "a name that no other has"),
        (("Key",), "a name that no other has"),
        (("a" * 64,), "longer than 63 bytes"),
        (("ä" * 32,), "longer than 63 bytes"),
    ],
)
def test_a_view_in_python_has_columns_that_postgresql_and_spark_tell_apart(
    names: tuple[str, ...], reason: str
) -> None:
    columns = [pa.field(name, pa.int64()) for name in names]
    with pytest.raises(InvalidView, match=reason):
        app().python_view("v", of="sale", columns=columns)(lambda given: given)


class Renamed(BaseModel):
    """The name of the key is the alias of another field."""

    id: str = Field(alias="uid")
    code: str = Field(alias="id")


def test_the_key_is_shown_under_its_alias_and_no_other_field_as_the_key() -> None:
    made = App("declared")
    made.entity("renamed", key="id")(Renamed)
    made.view("v", sql="SELECT id, uid FROM renamed")
    plan = made.views["v"]
    assert isinstance(plan, RowPlan)
    assert [(column.output, column.name) for column in plan.row] == [("id", "c0"), ("uid", "key")]


class Deep(BaseModel):
    code: str
    a_very_long_name_of_an_attribute_that_has_sixty_four_characters_: str = ""


def test_a_timeline_has_no_column_whose_name_postgresql_would_truncate() -> None:
    made = App("declared")
    made.entity("deep", key="code")(Deep)
    with pytest.raises(InvalidView, match="longer than 63 bytes"):
        made.timeline("t", "deep", list(Deep.model_fields)[-1])
