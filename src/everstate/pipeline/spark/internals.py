"""What PySpark does not offer of Spark: the one place that reaches for its private names."""

# ruff: noqa: SLF001

from __future__ import annotations

from typing import Any

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql.classic.column import Column as ClassicColumn


def java() -> tuple[Any, Any]:
    """The gateway to the JVM of the running context, and the JVM's packages."""
    context = SparkContext._active_spark_context
    assert context is not None, "a session runs"
    return context._gateway, context._jvm


def analysed(frame: DataFrame) -> Any:
    """The analysed plan of a frame, as an object of the JVM."""
    return frame._jdf.queryExecution().analyzed()


def or_null(column: Column) -> Column:
    """A column that is null where Spark cannot compute it, and no error there."""
    sql = java()[1].org.apache.spark.sql
    columns = sql.classic.ExpressionUtils
    tried = sql.catalyst.expressions.TryEval(columns.expression(column._jc))
    return ClassicColumn(columns.column(tried))
