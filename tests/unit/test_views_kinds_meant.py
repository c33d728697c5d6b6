"""What each kind makes of a definition: its plan, and the text that Spark runs in batch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import timedelta

import duckdb
import pyarrow as pa
import pytest
from pydantic import BaseModel

from duck import arrow, in_duckdb
from everstate.app import App
from everstate.views.kinds.join import JoinPlan
from everstate.views.kinds.kind import quoted
from everstate.views.kinds.last import LastPlan
from everstate.views.kinds.linear import LinearPlan
from everstate.views.kinds.timeline import TimelinePlan
from everstate.views.parsing import reading
from kind_cases import EPOCH, Shop
from view_fuzz import Sale

BY_WINDOW = "SELECT window.start AS s, count(*) AS n FROM sale GROUP BY window(moment, {})"
JOINED = "SELECT s.shop, h.city FROM sale s JOIN shop h ON s.shop = h.code"


class Door(BaseModel):
    """Fields with the names that a timeline uses."""

    code: str
    state: str | None = None
    there: str | None = None
    as_of: str | None = None
    was_there: str | None = None
    was_0: str | None = None
    was_a0: str | None = None
    a0: str | None = None
    a1: str | None = None


def app() -> App:
    made = App("meant")
    made.entity("sale", key="sale_id")(Sale)
    made.entity("shop", key="code")(Shop)
    made.entity("door", key="code")(Door)
    return made


SOLD = [
    *(("s1", "a", "x", 5), ("s2", "a", "x", 9), ("s3", "A", "x", 7), ("s4", "A", "y", 1)),
    *(("s5", "b", "X", 2), ("s6", "b", "y", 3), ("s7", "B", "X", 4)),
]
SHADOWING = {
    "SELECT shop, sale_id, -quantity AS quantity FROM sale QUALIFY row_number() OVER "
    "(PARTITION BY shop ORDER BY quantity DESC) <= 1": ("shop", "quantity"),
    "SELECT shop, sale_id, -quantity AS quantity FROM sale QUALIFY row_number() OVER "
    "(PARTITION BY shop ORDER BY sale.quantity DESC) <= 1": ("shop", "quantity"),
    "SELECT upper(shop) AS shop, sale_id, row_number() OVER (PARTITION BY shop ORDER BY quantity) "
    "AS n FROM sale WHERE sale.shop <> 'B' QUALIFY n <= 1": ("shop", "quantity"),
    "SELECT upper(s.place.city) AS city, sale_id FROM sale s QUALIFY row_number() OVER "
    "(PARTITION BY place.city ORDER BY s.quantity) <= 1": ("place.city", "quantity"),
    "SELECT upper(shop) AS name, sale_id, row_number() OVER (PARTITION BY name ORDER BY quantity) "
    "AS n FROM sale QUALIFY n <= 1": ("UPPER(shop)", "quantity"),
    "SELECT shop, sale_id, -quantity AS less FROM sale QUALIFY row_number() OVER "
    "(PARTITION BY shop ORDER BY less) <= 1 ORDER BY 3 DESC LIMIT 3": ("shop", "-quantity"),
}


@pytest.mark.parametrize(("sql", "by"), SHADOWING.items())
def test_a_window_means_columns_also_where_an_output_has_the_name_of_one(
    sql: str, by: tuple[str, str]
) -> None:
    made = app()
    made.view("v", sql=sql)
    plan = made.views["v"]
    assert isinstance(plan, LastPlan)
    texts = {each.name: each.spark_sql.replace("`", "") for each in plan.row}
    kept = (texts[plan.category[0]], texts[plan.first[0].text])
    assert kept == tuple(re.sub(r"\b(?=[a-z])", "__image__.", part, count=1) for part in by)
    blank = dict.fromkeys(Sale.model_fields)
    sales = [
        Sale.model_validate(
            blank | {"sale_id": i, "shop": s, "quantity": q, "place": {"city": city}}
        )
        for i, s, city, q in SOLD
    ]
    with duckdb.connect() as duck:
        table = arrow(sales)
        duck.register("sale", table.append_column("__key", table["sale_id"]))
        expected = sorted(duck.execute(in_duckdb(sql, "spark")).fetchall())
        for text in (plan.batch_as_read, plan.batch_as_shown):
            found = duck.execute(in_duckdb(text, "spark")).fetchall()
            if "LIMIT" not in sql or text == plan.batch_as_shown:
                assert sorted(found) == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("'1 hour'", ["0001-01-01 00:00:00", "9999-12-31 23:00:00"]),
        (
            "'1 hour', '30 minutes'",
            ["0001-01-01 00:00:00", "9999-12-31 23:00:00", "9999-12-31 23:30:00"],
        ),
        ("'7 days'", ["9999-12-30 00:00:00"]),
        ("'14 days', '7 days'", ["9999-12-23 00:00:00", "9999-12-30 00:00:00"]),
    ],
)
def test_a_window_that_would_begin_before_the_first_year_has_no_row(
    window: str, expected: list[str]
) -> None:
    """Its start would have no place in a store, and the view would stop at one record."""
    made = app()
    made.view("v", sql=BY_WINDOW.format(window))
    plan = made.views["v"]
    assert isinstance(plan, LinearPlan)
    starts = plan.starts or f"ARRAY({plan.group[0].spark_sql})"
    query = f"SELECT EXPLODE({starts}) AS s FROM edges WHERE {plan.where_sql}"
    with duckdb.connect() as duck:
        duck.execute("CREATE MACRO pmod(a, b) AS ((a % b) + b) % b")
        duck.execute("CREATE MACRO timestamp_micros(a) AS a")
        duck.execute(
            "CREATE TABLE edges AS SELECT unnest([NULL, TIMESTAMP '0001-01-01 00:10:00', "
            "TIMESTAMP '9999-12-31 23:40:00']) AS moment"
        )
        found = duck.execute(in_duckdb(query.replace("`__image__`.", ""), "spark")).fetchall()
    times = [EPOCH + timedelta(microseconds=start) for (start,) in found]
    assert sorted(time.isoformat(" ")[:19] for time in times) == expected


def test_the_end_of_a_window_after_the_last_year_is_null() -> None:
    made = app()
    made.view("v", sql=BY_WINDOW.format("'1 day'").replace("window.start", "window.end"))
    plan = made.views["v"]
    assert isinstance(plan, LinearPlan)
    text = plan.outputs[0][1].replace("TIMESTAMPTZ", "TIMESTAMP").replace("+00", "")
    with duckdb.connect() as duck:
        days = "(VALUES (DATE '2026-01-01'), (DATE '9999-12-31')) AS kept (g0)"
        found = duck.execute(f"SELECT {text} FROM {days}").fetchall()
    assert [end and end.isoformat()[:10] for (end,) in found] == ["2026-01-02", None]
    made.view(
        "all",
        sql="SELECT window(moment, '1 day').start AS s, window(moment, '1 day').end AS e, shop, "
        "count(*) AS n FROM sale GROUP BY ALL ORDER BY e DESC, 2",
    )
    assert "GROUP BY WINDOW(moment, '1 day'), shop HAVING" in made.views["all"].batch_as_read
    shown = made.views["all"].batch_as_shown
    order = "ORDER BY window.end DESC, window.end, window.start, window.start, shop"
    assert shown.endswith(order)
    assert "CASE WHEN UNIX_MICROS(`window`.end) <= 253402300799999999" in plan.batch_as_shown
    assert "HAVING UNIX_MICROS(window.start) >= -62135596800000000" in plan.batch_as_read


class InDuckDB:
    """The history of doors as a table of DuckDB."""

    def view(self, name: str) -> str:
        return quoted(name)

    table = view

    def field(self, path: Sequence[Sequence[str]], kind: pa.DataType) -> str:
        return f"(state ->> '{path[0][0]}')"


@pytest.mark.parametrize("name", ["there", "as_of", "was_there", "was_0", "was_a0", "a0", "state"])
def test_a_timeline_shows_an_attribute_of_any_name(name: str) -> None:
    made = app()
    made.timeline("t", "door", name, "a1")
    plan = made.views["t"]
    assert isinstance(plan, TimelinePlan)
    with duckdb.connect() as duck:
        duck.execute(
            "CREATE TABLE door_history (key text, version bigint, as_of timestamp, state json, "
            "provenance json, event json)"
        )
        for version, value in enumerate(("x", "y", "y", None), 1):
            state = None if value is None else json.dumps({name: value, "a1": "same"})
            values = ["k", version, f"2026-01-0{version}", state]
            duck.execute("INSERT INTO door_history VALUES (?, ?, ?, ?, '{}', '{}')", values)
        read = duck.execute(plan.read(InDuckDB())).fetchall()
        duck.execute(plan.compared(InDuckDB()))
    assert [(*row[:3], *(at.day for at in row[3:5]), row[-1]) for row in read] == [
        ("k", "x", "same", 1, 2, 1),
        ("k", "y", "same", 2, 4, 2),
    ]


MEANS = [
    "SELECT shop, mean(quantity) AS q, count(*) AS n FROM sale_changes GROUP BY shop",
    "SELECT shop, mean(quantity) AS q FROM sale_changes GROUP BY shop",
    "SELECT shop, mean(quantity) FILTER (WHERE paid) AS q FROM sale_changes GROUP BY shop",
    "SELECT shop FROM sale_changes GROUP BY shop HAVING mean(quantity) > 3",
    "SELECT shop FROM sale_changes GROUP BY shop ORDER BY mean(quantity) LIMIT 3",
    "SELECT shop, `mean`(quantity) AS quantity FROM sale_changes GROUP BY shop "
    "HAVING mean(quantity) > 3",
]


@pytest.mark.parametrize("sql", MEANS)
def test_mean_is_avg_also_where_late_changes_are_counted(sql: str) -> None:
    made = app()
    made.view("mean", sql=sql, lateness="1 hour", late="count")
    made.view("avg", sql=re.sub("`?mean`?", "avg", sql), lateness="1 hour", late="count")
    mean, avg = made.views["mean"], made.views["avg"]
    assert isinstance(mean, LinearPlan)
    assert (mean.fingerprint, mean.batch_as_read) == (avg.fingerprint, avg.batch_as_read)
    plain = [a for a in mean.accumulators if a.spark_sql and "occurred_at" not in a.spark_sql]
    assert plain == []


@pytest.mark.parametrize(
    ("how", "rest"),
    [
        ("LEFT", "AND s.region <> 'x'"),
        ("LEFT", "AND s.region IS NOT NULL"),
        ("LEFT", "WHERE h.size > 1 OR s.region = 'x'"),
        ("", "AND (h.city LIKE 'x%' OR s.region IN ('x', 'y'))"),
        ("", "WHERE h.size > 1 OR s.region = 'x'"),
        ("", "WHERE s.paid OR h.size + 1 > 5"),
        ("", "WHERE NOT (h.city = 'x' AND s.region = 'x')"),
        ("", "WHERE CASE WHEN h.size > 5 THEN s.region = 'x' ELSE (s.ratio > 1) END"),
    ],
)
def test_a_join_takes_conditions_on_one_side_and_on_both(how: str, rest: str) -> None:
    made = app()
    made.view("v", sql=f"{JOINED.replace('JOIN', f'{how} JOIN')} {rest}")
    assert isinstance(made.views["v"], JoinPlan)


def test_a_join_may_choose_a_value_of_one_side_by_a_condition_on_the_other() -> None:
    made = app()
    made.view("v", sql=JOINED.replace("h.city", "CASE WHEN h.size > 5 THEN s.region END AS r"))
    plan = made.views["v"]
    assert isinstance(plan, JoinPlan)
    assert plan.outputs[1] == ("r", "CASE WHEN r1 THEN l1 END")


@pytest.mark.parametrize(
    ("sql", "as_read"),
    [
        ("SELECT sale.shop AS s FROM sale", "SELECT sale.shop AS s FROM other AS `sale`"),
        ("SELECT x.shop FROM sale AS x", "SELECT x.shop FROM other AS `x`"),
        (
            "SELECT 'FROM sale' AS sale FROM (SELECT * FROM sale) AS `sale` "
            "GROUP BY WINDOW(moment, '1 day')",
            "SELECT 'FROM sale' AS sale FROM (SELECT * FROM other AS `sale`) AS `sale` "
            "GROUP BY WINDOW(moment, '1 day')",
        ),
    ],
)
def test_a_definition_reads_another_table_under_the_name_that_it_uses(
    sql: str, as_read: str
) -> None:
    assert reading(sql, "other") == as_read
