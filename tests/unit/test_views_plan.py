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
from everstate.views.outputs import refuse_sum_type
from everstate.views.plan import LinearPlan, RowPlan, ViewPlan, compile_view


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
    ("SELECT carrier FROM flight JOIN b USING (x)", "joins", "one view of each entity type"),
    ("SELECT carrier FROM flight, b", "joins", None),
    ("SELECT carrier FROM (SELECT * FROM flight)", "subqueries", None),
    ("SELECT carrier FROM flight WHERE arr_delay > (SELECT 1)", "subqueries", None),
    ("WITH x AS (SELECT 1) SELECT carrier FROM flight", "common table", None),
    ("SELECT DISTINCT carrier FROM flight", "DISTINCT", "GROUP BY a, b"),
    ("SELECT count(DISTINCT carrier) AS n FROM flight", "DISTINCT", "view of its own"),
    ("SELECT sum(arr_delay) OVER () AS s FROM flight", "window", None),
    ("SELECT max(arr_delay) AS m FROM flight", "max cannot", "row view"),
    ("SELECT min(arr_delay) AS m FROM flight", "min cannot", None),
    ("SELECT first(arr_delay) AS m FROM flight", "first cannot", "count, count_if, sum or avg"),
    ("SELECT stddev(arr_delay) AS m FROM flight", "stddev", None),
    ("SELECT carrier FROM flight GROUP BY carrier HAVING count(*) > 1", "HAVING", "when reading"),
    ("SELECT carrier FROM flight ORDER BY carrier", "order", "order when reading"),
    ("SELECT carrier FROM flight LIMIT 3", "LIMIT", None),
    ("SELECT carrier FROM flight WHERE departs > now()", "now()", "when reading"),
    ("SELECT carrier FROM flight WHERE departs > current_date", "current_date", None),
    ("SELECT unix_timestamp() AS t FROM flight", "changes without", None),
    ("SELECT rand() AS r FROM flight", "not deterministic", None),
    ("SELECT uuid() AS r FROM flight", "not deterministic", None),
    ("SELECT current_user() AS r FROM flight", "session", None),
    ("SELECT my_udf(carrier) AS r FROM flight", "my_udf", "deterministic functions"),
    ("SELECT explode(tags) AS t FROM flight", "several rows", None),
    ("SELECT carrier FROM flight LATERAL VIEW explode(tags) t AS x", "LATERAL", None),
    ("SELECT transform(tags, x -> upper(x)) AS t FROM flight", "lambda", None),
    ("SELECT carrir FROM flight", "unknown column 'carrir'", "Did you mean carrier?"),
    ("SELECT origin.town FROM flight", "unknown column 'origin.town'", "city, code"),
    ("SELECT carrier FROM fligt", "unknown entity type 'fligt'", "Did you mean flight?"),
    ("SELECT carrier, count(*) AS n FROM flight", "neither grouped", "GROUP BY"),
    ("SELECT upper(carrier) AS u FROM flight GROUP BY carrier", "cannot be made", None),
    ("SELECT carrier, count(*) FROM flight GROUP BY carrier", "no name", "AS name"),
    ("SELECT sum(fuel) AS s FROM flight", "float fuel", "CAST(fuel AS DECIMAL(18, 4))"),
    ("SELECT avg(fuel * 2) AS s FROM flight", "float", None),
    ("SELECT sum(CAST(arr_delay AS DOUBLE)) AS s FROM flight", "float", None),
    ("SELECT sum(carrier) AS s FROM flight", "cannot be summed", None),
    ("SELECT sum(count(*)) AS s FROM flight", "aggregate", None),
    ("SELECT carrier FROM flight WHERE count(*) > 1", "aggregate", None),
    ("SELECT carrier, count(*) AS n FROM flight GROUP BY ROLLUP(carrier)", "ROLLUP", None),
    ("SELECT carrier, count(*) AS n FROM flight GROUP BY carrier WITH CUBE", "ROLLUP", None),
    ("SELECT carrier FROM flight UNION SELECT carrier FROM flight", "not one SELECT", None),
    ("DELETE FROM flight", "not one SELECT", None),
    ("SELECT carrier FROM flight; SELECT 1", "not one SELECT", None),
    ("SELECT carrier FROM", "cannot be read", None),
    ("SELECT carrier AS a, status AS A FROM flight", "there twice", None),
    ("SELECT CAST(avg(arr_delay) AS INT) AS a FROM flight", "CAST", "round"),
    ("SELECT carrier FROM flight WHERE carrier = :x", "no value", None),
    ("SELECT carrier AS _key FROM flight", "_key", None),
    ("SELECT carrier FROM other.flight", "no entity type", None),
    ("SELECT f.a FROM flight AS f(a, b)", "no entity type", None),
    ("SELECT carrier FROM flight WHERE departs < 'now'", "'now' changes", "when reading"),
    ("SELECT carrier FROM flight WHERE 'today' <= departs", "'today' changes", None),
    ("SELECT carrier FROM flight WHERE departs BETWEEN ' Yesterday' AND '2030-01-01'", "y", None),
    ("SELECT carrier FROM flight WHERE departs IN ('tomorrow UTC')", "changes", None),
    ("SELECT count(*) FILTER (WHERE departs < 'now') AS n FROM flight", "changes", None),
    ("SELECT carrier FROM flight WHERE departs > '10:30'", "'10:30' changes", None),
    ("SELECT carrier COLLATE UTF8_LCASE AS c, count(*) AS n FROM flight GROUP BY 1", "COLL", "low"),
    ("SELECT count(*) AS n FROM flight GROUP BY collate(carrier, 'UTF8_LCASE')", "COLL", None),
    ("SELECT CAST(carrier AS STRING COLLATE UTF8_LCASE) AS c FROM flight", "COLLATE", None),
    ("SELECT coalesce(sum(arr_delay), 'none') AS s FROM flight", "'none' is a text", "reading"),
    ("SELECT sum(arr_delay) DIV 2 AS s FROM flight", "SUM(arr_delay) DIV 2 cannot", None),
    ("SELECT sum(arr_delay) + 'a' AS s FROM flight", "'a' is no number", None),
    ("SELECT -carrier AS c, count(*) AS n FROM flight GROUP BY carrier", "is no number", None),
    ("SELECT CASE WHEN sum(arr_delay) THEN 1 END AS s FROM flight", "is no boolean", None),
    ("SELECT CAST(departs AS DATE) AS d, count(*) AS n FROM flight GROUP BY departs", "CAST", "wh"),
    ("SELECT CAST(count(*) AS STRING) AS s FROM flight", "CAST", None),
    ("SELECT round(sum(arr_delay), carrier) AS s FROM flight GROUP BY carrier", "plain num", None),
    ("SELECT count() AS n FROM flight", "needs one argument", None),
    ("SELECT mean(arr_delay, fuel) AS n FROM flight", "needs one argument", None),
    ("SELECT count(f.*) AS n FROM flight f", "* stands inside", "count(*)"),
    ("SELECT TRANSFORM(carrier) USING 'cat' AS c FROM flight", "is not known", None),
    ("SELECT to_char(arr_delay, '999') AS c FROM flight", "Argument 'format'", None),
    ("SELECT CAST(departs AS TIME) AS t FROM flight", "not what was written", None),
    ("SELECT 'a\\0b' AS t FROM flight", "NUL", None),
    (f"SELECT {'(' * 3000}1{')' * 3000} AS x FROM flight", "nested too deep", None),
    ("SELECT carrier FROM flight TABLESAMPLE (1 PERCENT)", "no entity type", None),
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
    assert [(o.name, o.postgres_sql) for o in found.outputs] == [
        ("carrier", "g0"),
        ("delay", "(CAST(a0 AS DECIMAL) / NULLIF(a1, 0))"),
        ("flights", "n"),
    ]
    assert found.columns("original") == (
        "CASE WHEN `original` IS NOT NULL AND (`original`.`status` = 'arrived') THEN "
        "named_struct('g0', `original`.`carrier`, "
        "'a0', CAST(`original`.`arr_delay` AS DECIMAL(18, 4)), "
        "'a1', CASE WHEN (CAST(`original`.`arr_delay` AS DECIMAL(18, 4))) IS NULL "
        "THEN 0 ELSE 1 END) END"
    )
    assert found.types_needed == ("g0", "a0", "a1")


def test_a_row_view_has_a_row_per_entity() -> None:
    found = plan("SELECT flight_id, f.origin.city AS town, notes['gate'] AS gate FROM flight f")
    assert isinstance(found, RowPlan)
    assert [c.output for c in found.row] == ["flight_id", "town", "gate"]
    assert "`current`.`origin`.`city`" in found.columns("current")
    assert found.batch_sql("t").startswith("SELECT key, `live_entity`.`flight_id` AS c0")


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


def test_spark_has_the_last_word_on_the_type_of_a_sum() -> None:
    refuse_sum_type("v", "x", pa.decimal128(20, 2))
    with pytest.raises(InvalidView, match="float x"):
        refuse_sum_type("v", "x", pa.float64())
    with pytest.raises(InvalidView, match="cannot be summed"):
        refuse_sum_type("v", "x", pa.string())
