"""Which SQL can be kept, what it becomes, and what the rest is told."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.views.definition import ViewDefinition
from everstate.views.kinds import ViewPlan
from everstate.views.kinds.linear import LinearPlan
from everstate.views.kinds.row import RowPlan
from everstate.views.kinds.values import ValuesPlan
from everstate.views.outputs import refuse_sum_type
from everstate.views.plan import compile_view
from everstate.views.stores.postgres.tables import Readers


class Place(BaseModel):
    city: str
    code: int | None = None


class Flight(BaseModel):
    flight_id: str
    carrier: str | None
    status: str
    arr_delay: int | None = None
    fuel: float | None = None
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)] | None = None
    origin: Place
    departs: datetime
    tags: list[str] = []
    notes: dict[str, str] = {}


FLIGHT = EntityType("flight", Flight, "flight_id")


def plan(sql: str, name: str = "v") -> ViewPlan:
    return compile_view(ViewDefinition(name, sql), {"flight": FLIGHT})


def linear(sql: str) -> LinearPlan:
    found = plan(sql)
    assert isinstance(found, LinearPlan)
    return found


REFUSED = [
    ("SELECT carrier FROM flight, b", "only JOIN … ON", "ON f.carrier = a.code"),
    ("SELECT carrier FROM (SELECT * FROM flight)", "a subquery", None),
    ("SELECT carrier FROM flight WHERE arr_delay > (SELECT 1)", "a subquery", None),
    ("WITH x AS (SELECT 1) SELECT carrier FROM flight", "common table", None),
    ("SELECT DISTINCT carrier FROM flight", "DISTINCT", "GROUP BY a, b"),
    ("SELECT count(DISTINCT carrier, status) AS n FROM flight", "a, b", "length(a), '/', a, b"),
    ("SELECT any(arr_delay > 1) AS a FROM flight", "any cannot", "count_if(x) > 0"),
    ("SELECT count(*) > 1 AND any(fuel > 1) AS a FROM flight", "any cannot", "count_if(x) > 0"),
    ("SELECT some(arr_delay > 1) AS a FROM flight", "some cannot", "count_if(x) > 0"),
    ("SELECT every(arr_delay > 1) AS a FROM flight", "every cannot", "count_if(NOT x) = 0"),
    ("SELECT bool_and(arr_delay > 1) AS a FROM flight", "bool_and cannot", "count_if(NOT x) = 0"),
    ("SELECT max(fuel) + 1 AS m FROM flight", "over agg", "max(CAST(fuel AS DECIMAL(18, 4)))"),
    ("SELECT count(*) AS n FROM flight HAVING max(departs) > 1", "over agg", "Compute it in the"),
    ("SELECT min(arr_delay / 2) + 1 AS m FROM flight", "over agg", "if it is a number, or"),
    ("SELECT sum(DISTINCT arr_delay) AS n FROM flight", "only in count", "count(DISTINCT x)"),
    ("SELECT max_by(carrier, arr_delay) AS m FROM flight", "max_by cannot", "row_number()"),
    ("SELECT collect_list(carrier) AS m FROM flight", "collect_list cannot", "collect its values"),
    ("SELECT max(arr_delay, 2) AS m FROM flight", "another meaning in Spark", None),
    ("SELECT max(count(*)) AS m FROM flight", "inside another aggregate", None),
    ("SELECT carrier FROM flight HAVING carrier = 'UA'", "needs GROUP BY", "WHERE"),
    ("SELECT carrier FROM flight GROUP BY carrier HAVING status = 'x'", "neither in", None),
    ("SELECT carrier FROM flight GROUP BY carrier HAVING count(*)", "is not a boolean", None),
    (
        "SELECT sum(arr_delay) AS arr_delay FROM flight GROUP BY carrier HAVING arr_delay > 1",
        "both a column and an alias",
        "another name",
    ),
    ("SELECT carrier FROM flight LIMIT 3", "LIMIT without ORDER BY", "come first"),
    ("SELECT carrier FROM flight ORDER BY carrier LIMIT 1 + 1", "not a whole number", "LIMIT 10"),
    ("SELECT carrier FROM flight ORDER BY 2", "refers to a column", "SELECT list"),
    ("SELECT carrier FROM flight SORT BY carrier", "SORT BY", "ORDER BY"),
    ("SELECT sum(arr_delay) OVER () AS s FROM flight", "window", None),
    ("SELECT first(arr_delay) AS m FROM flight", "first cannot", "QUALIFY"),
    ("SELECT stddev(arr_delay) AS m FROM flight", "stddev", None),
    ("SELECT carrier FROM flight WHERE departs > now()", "now()", "in the query that reads"),
    ("SELECT carrier FROM flight WHERE departs > current_date", "current_date", None),
    ("SELECT unix_timestamp() AS t FROM flight", "changes while no entity changes", None),
    ("SELECT rand() AS r FROM flight", "another value at each call", None),
    ("SELECT uuid() AS r FROM flight", "another value at each call", None),
    ("SELECT current_user() AS r FROM flight", "session", None),
    ("SELECT my_udf(carrier) AS r FROM flight", "my_udf", "deterministic function of Spark"),
    ("SELECT explode(tags) AS t FROM flight", "several rows", None),
    ("SELECT carrier FROM flight LATERAL VIEW explode(tags) t AS x", "LATERAL", None),
    ("SELECT transform(tags, x -> upper(x)) AS t FROM flight", "lambda", None),
    ("SELECT carrir FROM flight", "flight has no column 'carrir'", "Did you mean carrier?"),
    ("SELECT origin.town FROM flight", "no column 'origin.town'", "city, code"),
    ("SELECT carrier FROM fligt", "no entity type 'fligt'", "Did you mean flight?"),
    ("SELECT carrier.x FROM flight", "'carrier.x': carrier is of the type string, without", None),
    ("SELECT origin.code.x FROM flight", "code is of the type int64, without fields", None),
    ("SELECT carrier, count(*) AS n FROM flight", "neither in GROUP BY (there is none)", "GROUP"),
    (
        "SELECT upper(carrier) AS u, carrier, count(*) AS n FROM flight GROUP BY upper(carrier)",
        "carrier: the column 'carrier' is neither in GROUP BY (UPPER(carrier)) nor",
        "one value of each term",
    ),
    (
        "SELECT carrier, count(*) AS n FROM flight GROUP BY carrier HAVING status = 'x'",
        "HAVING: the column 'status' is neither in GROUP BY (carrier) nor",
        None,
    ),
    ("SELECT upper(carrier) AS u FROM flight GROUP BY carrier", "over aggregates and groups", None),
    ("SELECT carrier, count(*) FROM flight GROUP BY carrier", "no name", "AS name"),
    ("SELECT sum(fuel) AS s FROM flight", "float fuel", "scale=4"),
    ("SELECT avg(fuel * 2) AS s FROM flight", "float", None),
    ("SELECT sum(CAST(arr_delay AS DOUBLE)) AS s FROM flight", "float", None),
    ("SELECT sum(carrier) AS s FROM flight", "cannot be summed", None),
    ("SELECT sum(count(*)) AS s FROM flight", "aggregate", None),
    ("SELECT carrier FROM flight WHERE count(*) > 1", "aggregate", None),
    ("SELECT carrier, count(*) AS n FROM flight GROUP BY ROLLUP(carrier)", "ROLLUP", None),
    ("SELECT carrier, count(*) AS n FROM flight GROUP BY carrier WITH CUBE", "ROLLUP", None),
    ("SELECT carrier FROM flight UNION SELECT carrier FROM flight", "not exactly one SELECT", None),
    ("DELETE FROM flight", "not exactly one SELECT", None),
    ("SELECT carrier FROM flight; SELECT 1", "not exactly one SELECT", None),
    ("SELECT carrier FROM", "cannot be parsed", None),
    ("SELECT carrier AS a, status AS A FROM flight", "two columns have the name", None),
    ("SELECT CAST(avg(arr_delay) AS INT) AS a FROM flight", "CAST", "round"),
    ("SELECT carrier FROM flight WHERE carrier = :x", "no value", None),
    ("SELECT carrier AS _key FROM flight", "_key", None),
    (f"SELECT carrier AS {'a' * 64} FROM flight", "longer than 63 bytes", "another name"),
    ("SELECT carrier AS _version, count(*) AS n FROM flight GROUP BY 1", "_version", None),
    ("SELECT carrier AS `unit price` FROM flight", "has a blank", None),
    ("SELECT carrier AS c, count(*) AS `n;` FROM flight GROUP BY 1", "';'", None),
    ("SELECT carrier FROM other.flight", "not the name of", None),
    ("SELECT f.a FROM flight AS f(a, b)", "not the name of", None),
    ("SELECT carrier FROM flight WHERE departs < 'now'", "'now' is not", "compare it"),
    ("SELECT carrier FROM flight WHERE 'today' <= departs", "'today' is not allowed", None),
    ("SELECT carrier FROM flight WHERE departs BETWEEN ' Yesterday' AND '2030-01-01'", "y", None),
    ("SELECT carrier FROM flight WHERE departs IN ('tomorrow UTC')", "changes", None),
    ("SELECT count(*) FILTER (WHERE departs < 'now') AS n FROM flight", "changes", None),
    ("SELECT carrier FROM flight WHERE departs > '10:30'", "'10:30' is not allowed", None),
    ("SELECT carrier COLLATE UTF8_LCASE AS c, count(*) AS n FROM flight GROUP BY 1", "COLL", "low"),
    ("SELECT count(*) AS n FROM flight GROUP BY collate(carrier, 'UTF8_LCASE')", "COLL", None),
    ("SELECT CAST(carrier AS STRING COLLATE UTF8_LCASE) AS c FROM flight", "COLLATE", None),
    ("SELECT coalesce(sum(arr_delay), 'none') AS s FROM flight", "'none' is a", "in the query"),
    ("SELECT sum(arr_delay) DIV 2 AS s FROM flight", "SUM(arr_delay) DIV 2 is not allowed", None),
    ("SELECT sum(arr_delay) + 'a' AS s FROM flight", "'a' is not a number", None),
    ("SELECT -carrier AS c, count(*) AS n FROM flight GROUP BY carrier", "is not a number", None),
    ("SELECT CASE WHEN sum(arr_delay) THEN 1 END AS s FROM flight", "is not a boolean", None),
    ("SELECT CAST(departs AS DATE) AS d, count(*) AS n FROM flight GROUP BY departs", "CAST", "wh"),
    ("SELECT CAST(count(*) AS STRING) AS s FROM flight", "CAST", None),
    ("SELECT round(sum(arr_delay), carrier) AS s FROM flight GROUP BY carrier", "a constant", None),
    ("SELECT count() AS n FROM flight", "must have exactly one argument", None),
    ("SELECT mean(arr_delay, fuel) AS n FROM flight", "must have exactly one argument", None),
    ("SELECT count(f.*) AS n FROM flight f", "* is used inside", "count(*)"),
    ("SELECT TRANSFORM(carrier) USING 'cat' AS c FROM flight", "in an expression", None),
    ("SELECT to_char(arr_delay, '999') AS c FROM flight", "Argument 'format'", None),
    ("SELECT CAST(departs AS TIME) AS t FROM flight", "another meaning in Spark", None),
    ("SELECT 'a\\0b' AS t FROM flight", "NUL", None),
    (f"SELECT {'(' * 3000}1{')' * 3000} AS x FROM flight", "nested too deeply", None),
    ("SELECT carrier FROM flight TABLESAMPLE (1 PERCENT)", "not the name of", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "reason", "advice"), REFUSED, ids=[sql[:90] for sql, _, _ in REFUSED]
)
def test_sql_that_cannot_be_kept_is_refused_with_reason_and_nearest_form(
    sql: str, reason: str, advice: str | None
) -> None:
    with pytest.raises(InvalidView) as refusal:
        plan(sql)
    assert reason in refusal.value.message
    if advice is not None:
        assert advice in (refusal.value.advice or "")


TAKEN = [
    "SELECT carrier FROM flight GROUP BY carrier HAVING max(CAST(fuel AS DECIMAL(18, 4))) > 10",
    "SELECT min(CAST(arr_delay / 2 AS DECIMAL(18, 4))) + 1 AS m FROM flight",
    "SELECT max(arr_delay * 2) - min(arr_delay) AS m FROM flight",
    "SELECT max(price) FILTER (WHERE status = 'x') + 1 AS m FROM flight",
    "SELECT count(DISTINCT concat(length(carrier), '/', carrier, status)) AS n FROM flight",
    "SELECT carrier FROM flight WHERE carrier LIKE ANY ('U%', 'A%')",
    "SELECT count_if(arr_delay > 1) > 0 AS a, count_if(NOT arr_delay > 1) = 0 AS b FROM flight",
]


@pytest.mark.parametrize("sql", TAKEN)
def test_what_a_refusal_advises_is_taken(sql: str) -> None:
    plan(sql)


def test_a_sum_of_distinct_values_is_refused_for_that_also_with_a_scale() -> None:
    definition = ViewDefinition("v", "SELECT sum(DISTINCT fuel) AS s FROM flight", scale=2)
    with pytest.raises(InvalidView, match="DISTINCT is allowed only in count"):
        compile_view(definition, {"flight": FLIGHT})


@pytest.mark.parametrize("name", ["flight", "flight_history", "position", "Big", "a b", ""])
def test_names_that_are_taken_or_odd_are_refused(name: str) -> None:
    with pytest.raises(InvalidView):
        plan("SELECT carrier FROM flight", name)


def test_a_linear_view_has_groups_accumulators_and_outputs() -> None:
    found = linear(
        "SELECT carrier, avg(CAST(arr_delay AS DECIMAL(18,4))) AS delay, count(*) AS flights "
        "FROM flight WHERE status = 'arrived' GROUP BY carrier"
    )
    assert [c.spark_sql for c in found.group] == ["`__image__`.`carrier`"]
    assert [(a.name, a.kind) for a in found.accumulators] == [
        ("n", "count"),
        ("a0", "sum"),
        ("a1", "count"),
    ]
    assert list(found.outputs) == [
        ("carrier", "g0"),
        ("delay", "CAST(a0 AS DECIMAL) / NULLIF(a1, 0)"),
        ("flights", "n"),
    ]
    assert found.columns("original") == (
        "CASE WHEN `original` IS NOT NULL AND (`original`.`status` = 'arrived') THEN "
        "named_struct('g0', `original`.`carrier`, "
        "'a0', CAST(`original`.`arr_delay` AS DECIMAL(18, 4)), "
        "'a1', CASE WHEN (CAST(`original`.`arr_delay` AS DECIMAL(18, 4))) IS NULL "
        "THEN 0 ELSE 1 END) END"
    )


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("max(origin.code) * min(origin.code)", "CAST(m0 AS DECIMAL) * CAST(m1 AS DECIMAL)"),
        ("-max(arr_delay)", "-CAST(m0 AS DECIMAL)"),
        (
            "coalesce(max(arr_delay), 0) + 1",
            "COALESCE(CAST(m0 AS DECIMAL), 0) + 1",
        ),
        (
            "CASE WHEN max(status) = 'x' THEN 1 ELSE 0 END * max(arr_delay)",
            "CASE WHEN m0 = 'x' THEN 1 ELSE 0 END * CAST(m1 AS DECIMAL)",
        ),
        ("max(arr_delay)", "m0"),
    ],
)
def test_what_is_computed_of_a_max_does_not_overflow(output: str, text: str) -> None:
    found = linear(f"SELECT {output} AS x FROM flight")
    assert [each for _, each in found.outputs] == [text]


def test_a_max_that_is_stored_itself_does_not_overflow_either() -> None:
    found = linear("SELECT max(arr_delay) * 2 AS x FROM flight_changes")
    assert [each for _, each in found.outputs] == ["CAST(a0 AS DECIMAL) * 2"]


def test_a_row_view_has_a_row_per_entity() -> None:
    found = plan("SELECT flight_id, f.origin.city AS town, notes['gate'] AS gate FROM flight f")
    assert isinstance(found, RowPlan)
    assert [c.output for c in found.row] == ["flight_id", "town", "gate"]
    assert "`current`.`origin`.`city`" in found.columns("current")
    assert found.batch(["t"]).startswith(
        "SELECT __key AS key, __version AS version, `live_entity`.`origin`.`city` AS c1"
    )
    # The key is a column of its own already.
    shown = found.read(Readers("views", 1))
    assert shown.startswith('SELECT "key" AS "flight_id", "c1" AS "town"')


def test_a_star_is_all_columns_of_the_entity() -> None:
    found = plan("SELECT * FROM flight WHERE status <> 'cancelled'")
    assert isinstance(found, RowPlan)
    assert [c.output for c in found.row] == FLIGHT.arrow_schema.names


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) AS n FROM flight",
        "SELECT carrier FROM flight GROUP BY carrier",
        "SELECT sum(arr_delay) / count(*) AS r, count_if(arr_delay > 15) AS late FROM flight",
        "SELECT round(avg(price), 2) AS a, mean(price) AS m FROM flight",
        "SELECT origin.city, count(*) FILTER (WHERE status = 'x') AS n FROM flight GROUP BY 1",
        "SELECT date_trunc('DAY', departs) AS day, coalesce(sum(arr_delay), 0) AS s "
        "FROM flight GROUP BY day",
        "SELECT carrier, count(carrier) AS n FROM flight GROUP BY ALL",
        "SELECT sum(CASE WHEN status = 'x' THEN price ELSE 0 END) AS s FROM flight "
        "WHERE carrier IN ('UA', 'AA') AND status LIKE 'a%' AND arr_delay BETWEEN 1 AND 9",
        "SELECT CASE WHEN count(*) > 9 THEN 'many' ELSE 'few' END AS w FROM flight",
        "SELECT carrier, status, sum(price) AS s FROM flight GROUP BY status, carrier",
        "SELECT sum(arr_delay) % 2 AS odd, CAST(avg(price) AS DOUBLE) AS a FROM flight",
        "SELECT coalesce(carrier, 'none') AS c, arr_delay + 1 AS d, count(*) AS n FROM flight "
        "WHERE status = 'now' OR upper(status) IN ('today', '10:30') GROUP BY carrier, arr_delay",
        "SELECT CAST(departs AS DATE) AS day, count(*) AS n FROM flight GROUP BY 1",
        "SELECT if(arr_delay > 9, 'today', 'now') AS c, count(*) AS n FROM flight GROUP BY 1",
    ],
)
def test_sums_counts_and_averages_can_be_kept(sql: str) -> None:
    assert linear(sql).outputs


def test_equal_aggregates_share_their_accumulators() -> None:
    found = linear("SELECT sum(price) AS s, avg(price) AS a, count(price) AS c FROM flight")
    assert len(found.accumulators) == 3


def test_the_fingerprint_is_of_the_meaning_and_not_of_the_schema_version() -> None:
    one = plan("SELECT carrier, count(*) AS n FROM flight GROUP BY carrier")
    same = plan("select  f.CARRIER AS carrier, COUNT(*) as n from flight AS f group by 1")
    other = plan("SELECT carrier, count(*) AS n FROM flight GROUP BY carrier, status")
    newer = compile_view(
        ViewDefinition("v", one.sql),
        {"flight": EntityType("flight", Flight, "flight_id", schema_version=2)},
    )
    assert one.fingerprint == same.fingerprint
    assert newer.fingerprint == one.fingerprint != other.fingerprint


def test_v10_the_fingerprint_has_the_types_of_the_fields_that_are_used() -> None:
    class Wide(Flight):
        note: str | None = None

    class Other(Flight):
        carrier: int  # type: ignore[assignment]

    text = "SELECT carrier, count(*) AS n FROM flight GROUP BY carrier"
    one, wide, other = (
        compile_view(
            ViewDefinition("v", text), {"flight": EntityType("flight", model, "flight_id")}
        )
        for model in (Flight, Wide, Other)
    )
    assert one.fingerprint == wide.fingerprint != other.fingerprint


def test_a_column_named_in_a_literal_stays_text() -> None:
    found = plan("SELECT 'the `carrier` of current' AS t FROM flight")
    assert "'the `carrier` of current'" in found.columns("current")


def test_min_max_and_distinct_keep_a_count_of_each_value() -> None:
    found = plan(
        "SELECT carrier, max(arr_delay) - min(arr_delay) AS spread, count(DISTINCT status) AS s "
        "FROM flight GROUP BY carrier"
    )
    assert isinstance(found, ValuesPlan)
    assert [(v.name, v.spark_sql) for v in found.values] == [
        ("v1", "`__image__`.`arr_delay`"),
        ("v2", "`__image__`.`status`"),
    ]
    assert [(p.pick, p.slot) for p in found.picked] == [("max", 1), ("min", 1), ("distinct", 2)]
    assert found.table(1).groups == ("slot", "g0", "v1", "v2")


def test_floats_are_summed_in_declared_places_and_nothing_else_is_rounded() -> None:
    text = "SELECT sum(fuel) AS f, avg(fuel * 2) AS g, sum(price) AS p FROM flight"
    found = compile_view(ViewDefinition("v", text, scale=2), {"flight": FLIGHT})
    assert isinstance(found, LinearPlan)
    sums = [a.spark_sql for a in found.accumulators if a.kind == "sum"]
    assert sums == [
        "CAST(`__image__`.`fuel` AS DECIMAL(38, 2))",
        "CAST(`__image__`.`fuel` * 2 AS DECIMAL(38, 2))",
        "`__image__`.`price`",
    ]
    assert "SUM(CAST(fuel AS DECIMAL(38, 2)))" in found.batch_as_read
    assert ViewDefinition.of("v", found.definition) == found.declared
    for scale in (-1, 19):
        with pytest.raises(InvalidView, match="decimal places"):
            compile_view(ViewDefinition("v", text, scale=scale), {"flight": FLIGHT})


def test_the_order_of_readers_is_total_and_has_an_index() -> None:
    found = plan("SELECT carrier FROM flight ORDER BY arr_delay DESC, departs LIMIT 3")
    assert isinstance(found, RowPlan)
    types = {"c0": pa.string(), "c1": pa.int64(), "c2": pa.timestamp("us", "UTC")}
    (index,) = found.layout(types).indexes
    order = ["c1 DESC NULLS LAST", "c2 ASC NULLS FIRST", "key ASC NULLS FIRST"]
    assert [getattr(column, "sql", "") for column in index.columns] == order
    shown = found.read(Readers("views", 1))
    assert shown.endswith(f" ORDER BY {', '.join(f'kept.{by}' for by in order)} LIMIT 3")
    with pytest.raises(InvalidView, match="nested"):
        found.layout({**types, "c1": pa.list_(pa.string())})


def test_texts_that_a_case_gives_are_ordered_as_in_spark() -> None:
    """Whatever the locale of the database: 'Few' is before 'many', and 'many' after 'Some'."""
    many = "CASE WHEN count(*) > 9 THEN 'many' WHEN count(*) > 5 THEN 'Some' ELSE ('Few') END"
    found = linear(
        f"SELECT carrier, {many} AS w FROM flight GROUP BY 1 ORDER BY w, carrier LIMIT 3"
    )
    assert [by.text for by in found.shown.order] == [
        """CASE WHEN n > 9 THEN 'many' COLLATE "C" WHEN n > 5 THEN 'Some' COLLATE "C" """
        """ELSE ('Few' COLLATE "C") END""",
        "g0",
    ]


def test_spark_has_the_last_word_on_the_type_of_a_sum() -> None:
    refuse_sum_type("v", "x", pa.decimal128(20, 2))
    with pytest.raises(InvalidView, match="float x"):
        refuse_sum_type("v", "x", pa.float64())
    with pytest.raises(InvalidView, match="cannot be summed"):
        refuse_sum_type("v", "x", pa.string())


def test_a_number_with_more_digits_than_it_is_cast_to_is_null() -> None:
    """Else one group would make the whole view unreadable."""
    sql = "SELECT carrier, CAST(sum(arr_delay) AS DECIMAL(5, 2)) AS late FROM flight GROUP BY 1"
    (late,) = (text for name, text in linear(sql).outputs if name == "late")
    total = "CASE WHEN a1 <> 0 THEN a0 END"
    assert late.startswith("CASE WHEN ABS(ROUND(")
    assert late.endswith(f", 2)) < 1000 THEN CAST({total} AS DECIMAL(5, 2)) END")
