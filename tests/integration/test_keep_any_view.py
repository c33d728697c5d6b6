"""Law 6 for views made at random: kept by Spark and PostgreSQL, proved row by row."""

from __future__ import annotations

from random import Random

import pytest
from keep_cases import World, drain
from pyspark.sql import SparkSession

from everstate.app import App
from everstate.config import Config
from tiers import counted
from view_fuzz import SALE, Sale, Writer, histories

LINEAR, ROWS, CHANGES = counted((3, 1, 60), full=(14, 6, 120))


def sales_app(random: Random) -> App:
    """Views of every kind that the grammar has, and one of each field's own type."""
    app = App("sales")
    app.entity("sale", key="sale_id")(Sale)
    writer = Writer(random)
    for number in range(LINEAR):
        app.view(f"linear_{number}", sql=writer.linear())
    for number in range(ROWS):
        app.view(f"row_{number}", sql=writer.row())
    for name in counted(["ratio"], full=SALE.arrow_schema.names):
        app.view(f"by_{name}", sql=f"SELECT {name}, count(*) AS n FROM sale GROUP BY {name}")
    app.view("reals", sql="SELECT sale_id, CAST(ratio AS FLOAT) AS ratio FROM sale")
    app.view("by_real", sql="SELECT CAST(ratio AS REAL) AS r, count(*) AS n FROM sale GROUP BY 1")
    app.view("big_sums", sql="SELECT shop, moment, sum(big) AS total FROM sale GROUP BY ALL")
    return app


@pytest.mark.settings(archive={"trigger_s": 1})
def test_views_made_at_random_equal_their_batch(config: Config, spark: SparkSession) -> None:
    """Also with 0.0 and -0.0, with sums beyond 64 bits, and at both ends of time."""
    random = Random(14)
    world = World(config, spark, sales_app(random), "sale")
    keeper = world.keeper(batch_changes_max=CHANGES // 3)
    world.send(*(world.change(key, state) for key, state in histories(random, 9, CHANGES)))
    assert drain(keeper) == (CHANGES, 0, 0, 0)
    assert world.rows("SELECT name, error FROM view WHERE status <> 'live'") == []
    reports = world.verify()
    keeper.close()
    assert {name: report.differences for name, report in reports.items() if not report.holds} == {}
    compared = [report for report in reports.values() if report.as_read == "equal"]
    assert len(compared) >= LINEAR
