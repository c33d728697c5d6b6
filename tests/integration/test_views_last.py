"""The last n of a category are found by index, however many rows the view has."""

from __future__ import annotations

from typing import Any

import psycopg
from pydantic import BaseModel

from everstate.app import App
from everstate.views.kinds.last import LastPlan
from everstate.views.stores.postgres.tables import Readers

ROWS, CATEGORIES = 40_000, 8


class Sale(BaseModel):
    id: str
    shop: str | None
    price: int


def plan() -> LastPlan:
    app = App("shop")
    app.entity("sale", key="id")(Sale)
    app.view(
        "newest",
        sql="SELECT shop, id, price, row_number() OVER (PARTITION BY shop ORDER BY price DESC) "
        "AS place FROM sale QUALIFY place <= 30",
    )
    found = app.views["newest"]
    assert isinstance(found, LastPlan)
    return found


def test_the_rows_of_one_category_are_read_by_index(database: str) -> None:
    made = plan()
    (index,) = made.indexes()
    names = [str(getattr(each, "sql", each)) for each in index.columns]
    columns = {column.output: column.name for column in made.row}
    with psycopg.connect(database, autocommit=True) as connection:
        text = (
            f"CREATE TABLE newest__v1 (key text PRIMARY KEY, version bigint, "
            f"{columns['shop']} text, {columns['price']} bigint);"
            f"INSERT INTO newest__v1 SELECT 'k' || i, 1, nullif('s' || i % {CATEGORIES}, 's0'), i "
            f"FROM generate_series(1, {ROWS}) i;"
            f"CREATE INDEX ON newest__v1 ({', '.join(names)})"
        )
        connection.execute(text.encode())
        connection.execute(b"VACUUM ANALYZE newest__v1")
        connection.execute(f"CREATE VIEW newest AS {made.read(Readers('public', 1))}".encode())
        query = b"SELECT price, place FROM newest WHERE shop = 's3' ORDER BY place"
        found = connection.execute(query).fetchall()
        assert found == [(ROWS - 5 - CATEGORIES * n, n + 1) for n in range(30)]
        (plans,) = connection.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + query).fetchone() or ()
        assert touched(plans[0]["Plan"]) < 200
        without = connection.execute(b"SELECT count(*) FROM newest WHERE shop IS NULL").fetchone()
        assert without == (30,)
        assert connection.execute(b"SELECT count(*) FROM newest").fetchone() == (30 * CATEGORIES,)


def touched(node: dict[str, Any]) -> int:
    """Rows that the scans of a plan read."""
    here = 0
    if "Scan" in node["Node Type"] and "Plans" not in node:
        removed = node.get("Rows Removed by Filter", 0)
        here = (node["Actual Rows"] + removed) * node["Actual Loops"]
    return int(here + sum(touched(each) for each in node.get("Plans", ())))
