"""Spark has the last word on the columns of a view: their types, and whether they are fixed."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Annotated

import pyarrow as pa
import pytest
from pydantic import BaseModel, Field
from pyspark.sql import SparkSession

from everstate.app import App
from everstate.errors import InvalidView, PipelineError
from everstate.pipeline.batch.sameness import changing
from everstate.pipeline.keeping.plan import column_types
from everstate.pipeline.spark.session import spark_errors
from everstate.views.kinds.row import RowPlan


class Order(BaseModel):
    order_id: str
    amount: int
    due: datetime | None = None
    price: Annotated[Decimal, Field(max_digits=20, decimal_places=8)] = Decimal(0)


def orders() -> App:
    app = App("shop")
    app.entity("ordr", key="order_id")(Order)
    return app


def test_c16_a_column_that_spark_calls_non_deterministic_is_refused(spark: SparkSession) -> None:
    app = orders()
    plan = app.view("v", sql="SELECT amount + 1 AS x FROM ordr")
    assert isinstance(plan, RowPlan)
    assert len(column_types(spark, app.entity_type("ordr"), plan)) == 1
    (column,) = plan.row
    random = replace(column, spark_sql=f"{column.spark_sql} + uniform(1, 9)")
    hidden = replace(plan, row=(random,))
    with pytest.raises(InvalidView, match="does not guarantee to give the same value"):
        column_types(spark, app.entity_type("ordr"), hidden)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("due < concat('no', 'w')", "'now' as a timestamp"),
        ("coalesce(due, 'today') IS NULL", "'today' as a timestamp"),
        ("date_add('tomorrow', 1) IS NULL", "'tomorrow' as a date"),
        ("due > order_id", "reads a text like '10:00'"),
        ("hour(order_id) = 1", "to_timestamp"),
        ("due < DATE '2026-13-45'", "2026-13-45"),
        ("amount + 'a' > 1", "CAST_INVALID_INPUT|DATATYPE_MISMATCH"),
    ],
)
def test_c16_spark_refuses_what_the_grammar_cannot_tell(
    spark: SparkSession, text: str, reason: str
) -> None:
    """Words for the present time in any disguise, and all that Spark does not understand."""
    app = orders()
    plan = app.view("v", sql=f"SELECT amount FROM ordr WHERE {text}")
    with pytest.raises(InvalidView, match=reason):
        column_types(spark, app.entity_type("ordr"), plan)


def test_an_error_of_spark_is_said_by_our_error_alone(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PySpark would print a page of JSON with a trace on the terminal."""
    printed: list[str] = []
    monkeypatch.setattr(
        logging.Logger, "callHandlers", lambda _, record: printed.append(record.getMessage())
    )
    app = orders()
    plan = app.view("v", sql="SELECT amount FROM ordr WHERE due < DATE '2026-13-45'")
    with pytest.raises(InvalidView, match="2026-13-45"):
        column_types(spark, app.entity_type("ordr"), plan)
    assert printed == []


def test_c16_a_cast_is_found_in_what_replaces_a_function(spark: SparkSession) -> None:
    query = spark.sql("SELECT to_timestamp(word) AS at FROM VALUES ('10:00') AS words (word)")
    assert "reads a text like '10:00'" in str(changing(query._jdf.queryExecution().analyzed()))


def test_c16_texts_and_constant_times_stay_what_they_are(spark: SparkSession) -> None:
    app = orders()
    sql = (
        "SELECT CASE order_id WHEN 'now' THEN 'today' ELSE '10:00' END AS word FROM ordr "
        "WHERE due < '2026-01-01 10:00' AND to_timestamp(order_id, 'HH:mm') > due"
    )
    assert column_types(spark, app.entity_type("ordr"), app.view("v", sql=sql))


def test_a_product_of_decimals_keeps_all_its_places_or_is_refused(spark: SparkSession) -> None:
    """With Spark's default setting it is rounded to six places when it may need 38 digits."""
    app = orders()
    plan = app.view("v", sql="SELECT price * amount AS cost FROM ordr")
    assert list(column_types(spark, app.entity_type("ordr"), plan).values()) == [
        pa.decimal128(38, 8)
    ]
    number = "CAST('{}' AS DECIMAL({}))".format
    query = "SELECT {} * {} AS cost".format
    (row,) = spark.sql(query(number("0.12345678", "20, 8"), "3L")).collect()
    assert row.cost == Decimal("0.37037034")
    wide = number("12.5", "38, 18")
    with pytest.raises(PipelineError, match=r"156\.25\S* cannot be represented") as refused:
        with spark_errors("view v"):
            spark.sql(query(wide, wide)).collect()
    assert "ansi" not in str(refused.value)


def test_a_product_with_more_places_than_spark_has_is_refused(spark: SparkSession) -> None:
    """Spark rounds it to 38 places in silence, with any setting."""
    app = orders()
    product = " * ".join(["price"] * 5)
    for name, text in {"rows": product, "sums": f"sum({product})"}.items():
        plan = app.view(name, sql=f"SELECT {text} AS cost FROM ordr")
        with pytest.raises(InvalidView, match="may have 40 decimal places") as refused:
            column_types(spark, app.entity_type("ordr"), plan)
        assert "Cast a side" in str(refused.value)
    kept = app.view("kept", sql="SELECT price * price * price * price AS cost FROM ordr")
    assert column_types(spark, app.entity_type("ordr"), kept)
