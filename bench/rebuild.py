"""rebuild: a linear view's plan over the archive, beside the same sums written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench import data, spark_floors
from bench.archive import archiving
from bench.project import VIEW, app
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.archive import table_path
from everstate.views.kinds.linear import LinearPlan
from everstate.views.tables import Image

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

COUNT = 1_000_000
PASSES = 5
"""Times in a row that each figure reads the archive: once is over in a second."""


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    config = session.fresh(session.filled(count))
    with archiving(session, config, data.PURCHASE) as archiver:
        archiver.catch_up()
    archive = table_path(config, data.ENTITY)
    plan = app.view_plan(VIEW)
    assert isinstance(plan, LinearPlan)

    def timed(make: Callable[[], DataFrame]) -> float:
        began = time.perf_counter()
        for _ in range(PASSES):
            # Anew each time: Spark keeps what the stages of a DataFrame have given.
            make().collect()
        return PASSES * count / (time.perf_counter() - began)

    by_hand = {tuple(row) for row in spark_floors.aggregate(session.spark, archive).collect()}
    by_plan = {tuple(row) for row in planned_sums(session.spark, archive, plan).collect()}
    assert by_hand == by_plan, "the plan and the hand do not agree"
    values, floors = session.alternate(
        lambda: timed(lambda: spark_floors.aggregate(session.spark, archive)),
        lambda: timed(lambda: planned_sums(session.spark, archive, plan)),
    )
    session.drop(config)
    return [
        result(
            "rebuild input",
            f"a linear view's plan over the archive, {count:,} changes",
            "changes/s",
            values,
            floors=floors,
            floor_is="the same sums by hand in Spark SQL",
            reach=Reach(ratio_min=0.9),
        )
    ]


def planned_sums(spark: SparkSession, archive: str, plan: LinearPlan) -> DataFrame:
    """Row deltas of every archived change by the plan half that the keeper uses, summed."""
    from pyspark.sql import functions as F

    def side(weight: int, image: Image) -> Column:
        return F.struct(F.lit(weight).alias("weight"), F.expr(plan.columns(image)).alias("row"))

    deltas = (
        spark.read.format("delta")
        .load(archive)
        .select(F.explode(F.array(side(-1, "original"), side(1, "current"))).alias("side"))
        .select("side.*")
        .where("row IS NOT NULL")
    )
    sums = [
        F.sum(F.expr(f"weight * row.{a.name}")).alias(a.name)
        for a in plan.accumulators
        if a.spark_sql is not None and a.kind == "sum"
    ]
    groups = [F.col(f"row.{column.name}") for column in plan.group]
    return deltas.groupBy(*groups).agg(F.sum("weight").alias("n"), *sums).where("n <> 0")
