"""The app that the benches run: purchases, and one linear view of them."""

from __future__ import annotations

from bench.data import ENTITY, Purchase
from everstate.app import App

VIEW = "totals_by_country"
VIEW_SQL = (
    f"SELECT country, status, count(*) AS purchases, sum(total) AS total "
    f"FROM {ENTITY} GROUP BY country, status"
)

app = App("bench")
app.entity(ENTITY, key="id", schema_version=1)(Purchase)
app.view(VIEW, sql=VIEW_SQL)
