"""A table of functions and boundary values: a test's rows are those of the running view.

The running view: changes planned by Spark as in the keeper, merged and read in PostgreSQL. Whoever
tests a definition has `ViewBehaviour`. Each cell is one function of one value, in both.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from typing import Annotated, Any, Final

import pytest
from pydantic import AwareDatetime, BaseModel, Field
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from everstate import App
from everstate.errors import PipelineError
from everstate.testing.view_behaviour import ViewBehaviour
from everstate.views.definition import ViewDefinition
from everstate.views.plan import compile_view
from kinds_rig import KeptKinds, plan_changes, story

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
app = App("table")


@app.entity("cell", key="id")
class Cell(BaseModel):
    """A value of each type."""

    id: str
    s: str | None = None
    n: int | None = None
    m: int | None = None
    f: float | None = None
    d: Annotated[Decimal, Field(max_digits=10, decimal_places=3)] | None = None
    t: AwareDatetime | None = None
    tags: list[str] | None = None


@app.entity("other", key="id")
class Other(BaseModel):
    """What a cell may be joined with."""

    id: str
    s: str | None = None


VALUES: Final[dict[str, list[Any]]] = {
    "s": [
        *("", " ", "ß", "İ", "ı", "ſ", "Straße 12", "a%b", "a_b", "a\\b", "axb", "A%B", "e\u0301"),
        *("𝄞x", "a\nb", "  x ", "42", " 42 ", "4.5", "1e3", "true", "2026-02-28", "x,y,,z", "$1"),
        *("NaN", "null", "\t", "Σς", None),
    ],
    "n": [0, 1, -1, 7, -7, 25, -25, 127, 2**31 - 1, 2**31, -(2**31), 2**53, -(2**53), None],
    "f": [0.0, -0.0, 0.5, 1.5, 2.5, 3.5, -2.5, 0.1, 1e-7, 1234567.891, 1e15, -1e9, None],
    "d": [
        *map(Decimal, ("0", "0.005", "2.5", "-2.5", "3.5", "0.125", "-0.125", "9999999.999")),
        None,
    ],
    "t": [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1582, 10, 4, 12, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2024, 2, 29, 12, 30, 1, 500000, tzinfo=UTC),
        datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
        datetime(2027, 1, 3, tzinfo=UTC),
        datetime(9999, 12, 30, 23, tzinfo=UTC),
        None,
    ],
    "tags": [[], [""], ["a"], ["b", "a", "b"], ["A", "ß"], None],
}
"""Boundary values by the field that has them; the other fields are null."""
FUNCTIONS: Final[dict[str, list[str]]] = {
    "s": [
        *("upper(s)", "lower(s)", "initcap(s)", "length(s)", "reverse(s)", "trim(s)", "ascii(s)"),
        *(r"s LIKE 'a\\%b'", r"s LIKE 'a\\_b'", "s LIKE 'a/%b' ESCAPE '/'", "s LIKE 'a%'"),
        *(r"s LIKE 'a\\\\b'", "s LIKE 'a_b'", "s ILIKE 'STRASSE%'", "s ILIKE 'a%B'", "s LIKE ''"),
        *("s RLIKE '^[a-z]+'", "regexp_replace(s, '([a-z])', '<$1>')", "md5(s)", "sha2(s, 256)"),
        *("regexp_extract(s, '([0-9]+)', 1)", "substring(s, 0, 2)", "substring(s, -2, 1)"),
        *("left(s, 2)", "right(s, 2)", "lpad(s, 3, '*')", "rpad(s, 3, '')", "repeat(s, 2)"),
        *("split(s, ',')[0]", "instr(s, 'b')", "locate('a', s)", "replace(s, 'a', '$')"),
        *("translate(s, 'ab', 'x')", "concat(s, '|')", "concat_ws('-', s, 'z')", "s || s"),
        *("substring_index(s, ',', 2)", "TRY_CAST(s AS INT)", "TRY_CAST(s AS DOUBLE)"),
        *("TRY_CAST(s AS DATE)", "TRY_CAST(s AS BOOLEAN)", "TRY_CAST(s AS DECIMAL(4, 1))"),
        *("s > 'a'", "s = 'ss'", "s IN ('ß', 'İ')", "coalesce(s, '-')", "octet_length(s)"),
    ],
    "n": [
        *("n / 2", "n % 3", "n % -3", "pmod(n, 3)", "n DIV 2", "abs(n)", "-n", "n * 2", "n + 0.5"),
        *("round(n, -1)", "bround(n, -1)", "CAST(n AS DOUBLE)", "CAST(n AS STRING)", "bin(n)"),
        *("hex(n)", "n & 3", "n ^ 1", "~n", "try_mod(n, 0)", "try_divide(n, 0)", "sign(n)"),
        *("CAST(n AS DECIMAL(20, 2))", "greatest(n, 3)", "least(n, 3)", "n BETWEEN -1 AND 7"),
        *("CAST(n AS BOOLEAN)", "format_number(n, 1)", "nullif(n, 0)", "sqrt(abs(n))"),
    ],
    "f": [
        *("CAST(f AS BIGINT)", "round(f)", "round(f, 1)", "bround(f)", "bround(f, 1)", "floor(f)"),
        *("ceil(f)", "rint(f)", "f % 2", "f * 3", "f / 3", "-f", "abs(f)", "sign(f)", "f = 0"),
        *("CAST(f AS STRING)", "CAST(f AS DECIMAL(20, 2))", "CAST(f AS BOOLEAN)", "f > 2.5"),
        *("sqrt(abs(f))", "exp(least(f, 1))", "f + 0.1"),
    ],
    "d": [
        *("round(d, 1)", "bround(d, 1)", "round(d)", "bround(d)", "floor(d)", "ceil(d)", "d * d"),
        *("d / 3", "d % 2", "CAST(d AS INT)", "CAST(d AS STRING)", "CAST(d AS DECIMAL(9, 1))"),
        *("CAST(d AS DOUBLE)", "d + 0.0001", "-d", "abs(d)", "d > 2.5", "round(d, -1)", "sign(d)"),
    ],
    "t": [
        *("year(t)", "quarter(t)", "month(t)", "day(t)", "dayofweek(t)", "weekday(t)", "hour(t)"),
        *("weekofyear(t)", "dayofyear(t)", "date_trunc('MONTH', t)", "date_trunc('HOUR', t)"),
        *(
            "date_format(t, 'yyyy-MM-dd HH:mm:ss.SSS')",
            "CAST(t AS DATE)",
            "last_day(t)",
            "second(t)",
        ),
        *("CAST(t AS STRING)", "unix_micros(t)", "unix_seconds(t)", "t > TIMESTAMP '2026-01-01'"),
        *("date_add(CAST(t AS DATE), 1)", "datediff(DATE '2026-01-01', t)", "trunc(t, 'YEAR')"),
        *(
            "months_between(DATE '2026-01-31', t)",
            "add_months(t, 0)",
            "date_trunc('WEEK', greatest(t, TIMESTAMP '1970-01-01'))",
        ),
    ],
    "tags": [
        *(
            "size(tags)",
            "array_contains(tags, 'a')",
            "array_join(tags, ',')",
            "tags",
            "get(tags, 0)",
        ),
        *("array_join(sort_array(tags), '|')", "array_join(array_distinct(tags), '|')"),
        *(
            "array_max(tags)",
            "array_position(tags, 'b')",
            "try_element_at(tags, 1)",
            "get(tags, 2)",
        ),
    ],
}


SUMMED: Final[dict[str, list[tuple[int | None, int | None, str | None]]]] = {
    "zero": [(0, 0, "0"), (5, -5, "0.5"), (-5, 5, "-0.5")],
    "one": [(1, 3, "2.5")],
    "minus": [(-7, 2, "-2.5"), (0, None, None)],
    "large": [(2**53, 1, "9999999.999"), (2**53, 1, "9999999.999")],
    "none": [(None, None, None)],
    "ß": [(25, 10, "0.125"), (None, 0, "0.005")],
}
"""`n`, `m` and `d` of the cells of each group."""
AROUND: Final = [
    *("sum(n) % sum(m)", "sum(n) / sum(m)", "sum(n) % 0", "sum(n) / 0", "10 / sum(m)"),
    *("sum(n) + sum(m)", "sum(n) - sum(m)", "sum(m) * 3", "-sum(n)", "avg(n)", "avg(d)", "sum(d)"),
    *("sum(d) / count(*)", "sum(d) % 2", "round(sum(d), 1)", "round(avg(n), 0)", "floor(sum(d))"),
    *("ceil(sum(d))", "abs(sum(n))", "greatest(sum(n), sum(m))", "least(sum(n), 3)"),
    *("sum(n) > sum(m)", "sum(n) BETWEEN 0 AND 9", "sum(n) IN (0, 1)", "sum(n) IS NULL"),
    *("coalesce(sum(n), -1)", "nullif(sum(n), 0)", "if(sum(n) > 0, 1, 0)", "count(n)", "count(*)"),
    *("CASE WHEN sum(n) = 0 THEN 'none' ELSE s END", "CAST(sum(n) AS DECIMAL(3, 1))", "min(n)"),
    *("CAST(sum(d) AS DECIMAL(3, 1))", "CAST(sum(n) / sum(m) AS DOUBLE)", "max(d)"),
    *("count_if(n > 0)", "count(DISTINCT m)", "sum(n) FILTER (WHERE m > 0)", "max(n) - min(n)"),
    *("sum(n) / (sum(m) % 2)", "1 / (2 / sum(m))", "round(sum(n) / 3, 2)", "sum(n) <> 0 AND true"),
]
STOPS: Final[dict[str, Cell]] = {
    "10 / n": Cell(id="1", n=0),
    "n % m": Cell(id="1", n=1, m=0),
    "n DIV m": Cell(id="1", n=1, m=0),
    "n + 9223372036854775807": Cell(id="1", n=1),
    "n * 9223372036854775807": Cell(id="1", n=2),
    "abs(n - 1)": Cell(id="1", n=-(2**63) + 1),
    "CAST(n AS INT)": Cell(id="1", n=2**31),
    "CAST(f AS INT)": Cell(id="1", f=1e300),
    "CAST(f AS DECIMAL(10, 2))": Cell(id="1", f=1e300),
    "CAST(d AS DECIMAL(3, 1))": Cell(id="1", d="1234.5"),
    "d * d * d * d * d": Cell(id="1", d="9999999.999"),
    "tags[0]": Cell(id="1", tags=[]),
    "tags[n]": Cell(id="1", tags=["a"], n=1),
    "element_at(tags, 2)": Cell(id="1", tags=["a"]),
    "split(s, ',')[1]": Cell(id="1", s="a"),
    "CAST(s AS INT)": Cell(id="1", s="4.5"),
    "CAST(s AS DOUBLE)": Cell(id="1", s="x"),
    "CAST(s AS DATE)": Cell(id="1", s="2026-02-30"),
    "CAST(s AS BOOLEAN)": Cell(id="1", s="maybe"),
    "to_timestamp(s, 'yyyy-MM-dd')": Cell(id="1", s="30.01.2026"),
    "make_date(n, 2, 30)": Cell(id="1", n=2026),
    "s LIKE 'a\\\\b'": Cell(id="1", s="a"),
}
"""What ANSI, or Spark, stops: an expression, and a cell that it cannot be computed for."""
UNSEEN: Final = {
    "SELECT id, 10 / n AS x FROM cell ORDER BY id LIMIT 1": "beyond LIMIT",
    "SELECT count(*) AS x FROM cell WHERE 10 / n > 0": "in WHERE",
    "SELECT s, sum(10 DIV n) AS x FROM cell GROUP BY s HAVING count(*) > 9": "hidden by HAVING",
    "SELECT s, 10 / n AS x FROM cell QUALIFY row_number() OVER (PARTITION BY s ORDER BY id) <= 1": (
        "a later row of its category"
    ),
    "SELECT c.id, 10 / c.n AS x, o.s FROM cell c JOIN other o ON c.s = o.s": "without a partner",
}
"""Views in which the cell that stops them is not to be seen: nothing of it may be left out."""
RIGHT: Final[list[tuple[str, Cell, Any]]] = [
    (r"s LIKE 'a\\%b'", Cell(id="1", s="a%b"), True),
    (r"s LIKE 'a\\%b'", Cell(id="1", s="axb"), False),
    ("s LIKE 'a/_b' ESCAPE '/'", Cell(id="1", s="axb"), False),
    ("CAST(f AS INT)", Cell(id="1", f=3.5), 3),
    ("upper(s)", Cell(id="1", s="ß"), "SS"),
    ("lower(s)", Cell(id="1", s="İ"), "i̇"),
    ("regexp_replace(s, '([a-z])', '<$1>')", Cell(id="1", s="a1"), "<a>1"),
    ("bround(f)", Cell(id="1", f=2.5), 2.0),
    ("bround(d, 1)", Cell(id="1", d="0.25"), Decimal("0.2")),
]
"""What another engine had given otherwise: an expression, a cell, and Spark's value."""


def declared(sql: str) -> ViewBehaviour:
    return ViewBehaviour(compile_view(ViewDefinition("v", sql), app.entities), app.entities)


def kept_rows(
    database: str, spark: SparkSession, view: ViewBehaviour, cells: list[Cell]
) -> list[dict[str, Any]]:
    """What readers of the running view get, of cells that were each created."""
    plan, types, random = view.plan, {"cell": app.entities["cell"]}, Random(7)
    told = story(random, "cell", [(cell.id, cell) for cell in cells])
    (changes,) = plan_changes(spark, types["cell"], [told], [plan])
    with KeptKinds.installed(database, spark, types, [plan]) as kept:
        kept.reset({"cell": told.partitions})
        kept.apply(random, told, changes)
        listed = ", ".join(f'"{name}"' for name in plan.defined)
        found = kept.rows(f"SELECT {listed} FROM v")
    return [dict(zip(plan.defined, row, strict=True)) for row in found]


def cells_differ(
    database: str, spark: SparkSession, view: ViewBehaviour, cells: list[Cell]
) -> tuple[int, list[str]]:
    """The number of compared cells of the table, and those that differ."""
    shown = view.rows({("cell", cell.id): cell for cell in cells})
    kept = {row["id"]: row for row in kept_rows(database, spark, view, cells)}
    assert kept.keys() == {row["id"] for row in shown}
    wrong = [
        f"{row['id']}.{name}: {row[name]!r} shown, {kept[row['id']][name]!r} kept"
        for row in shown
        for name in row
        if view.differences([{"x": row[name]}], [{"x": kept[row["id"]][name]}])
    ]
    return len(shown) * (len(view.plan.defined) - 1), wrong


@pytest.mark.parametrize("field", FUNCTIONS)
def test_each_function_gives_the_rows_of_the_running_view(
    database: str, spark: SparkSession, field: str
) -> None:
    outputs = ", ".join(f"{text} AS c{place}" for place, text in enumerate(FUNCTIONS[field]))
    cells = [Cell(id=str(n), **{field: value}) for n, value in enumerate(VALUES[field])]
    view = declared(f"SELECT id, {outputs} FROM cell")
    count, wrong = cells_differ(database, spark, view, cells)
    assert (count, wrong) == (len(FUNCTIONS[field]) * len(VALUES[field]), [])


def test_what_postgresql_computes_around_aggregates_is_what_spark_shows(
    database: str, spark: SparkSession
) -> None:
    outputs = ", ".join(f"{text} AS c{place}" for place, text in enumerate(AROUND))
    view = declared(f"SELECT s AS id, {outputs} FROM cell GROUP BY s")
    cells = [
        Cell(id=f"{group}{place}", s=group, n=n, m=m, d=d)
        for group, each in SUMMED.items()
        for place, (n, m, d) in enumerate(each)
    ]
    count, wrong = cells_differ(database, spark, view, cells)
    assert (count, wrong) == (len(AROUND) * len(SUMMED), [])


@pytest.mark.parametrize("order", ["HAVING sum(n) % sum(m) IS NULL", "ORDER BY sum(n) / sum(m), s"])
def test_a_division_by_zero_is_null_in_every_clause(
    database: str, spark: SparkSession, order: str
) -> None:
    view = declared(f"SELECT s AS id, count(*) AS x FROM cell GROUP BY s {order}")
    cells = [Cell(id=s, s=s, n=n, m=m) for s, n, m in [("a", 1, 0), ("b", 4, 2), ("c", 9, 3)]]
    shown = view.rows({("cell", cell.id): cell for cell in cells})
    assert view.differences(shown, kept_rows(database, spark, view, cells)) == []


def test_windows_of_time_are_those_of_the_running_view(database: str, spark: SparkSession) -> None:
    view = declared(
        "SELECT window.start AS id, window.end AS e, count(*) AS x FROM cell "
        "GROUP BY window(t, '1 hour', '15 minutes')"
    )
    cells = [Cell(id=str(n), t=t) for n, t in enumerate(VALUES["t"])]
    count, wrong = cells_differ(database, spark, view, cells)
    assert (count > len(cells), wrong) == (True, [])


@pytest.mark.parametrize(("text", "cell"), STOPS.items())
def test_what_stops_the_running_view_fails_the_test(
    spark: SparkSession, text: str, cell: Cell
) -> None:
    view = declared(f"SELECT id, {text} AS x FROM cell")
    told = story(Random(7), "cell", [(cell.id, cell)])
    with pytest.raises(PySparkException) as running:
        plan_changes(spark, app.entities["cell"], [told], [view.plan])
    with pytest.raises(PipelineError, match="view v: ") as tested:
        view.given(cell).then()
    assert str(running.value.getCondition()) in tested.value.message


@pytest.mark.parametrize("sql", UNSEEN, ids=UNSEEN.values())
def test_a_cell_that_stops_the_view_fails_the_test_where_no_row_shows_it(
    spark: SparkSession, sql: str
) -> None:
    with pytest.raises(PipelineError, match="DIVIDE_BY_ZERO"):
        declared(sql).given(Cell(id="1", s="a", n=1), Cell(id="2", s="a", n=0)).then()


@pytest.mark.parametrize(("text", "cell", "value"), RIGHT)
def test_values_are_those_of_spark(
    spark: SparkSession, text: str, cell: Cell, value: object
) -> None:
    declared(f"SELECT {text} AS x FROM cell").given(cell).then({"x": value})
