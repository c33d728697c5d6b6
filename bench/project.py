"""The apps that the benches run: purchases, and one linear view of them."""

from __future__ import annotations

from bench.data import ENTITY, Purchase
from everstate.app import App

VIEW = "totals_by_country"
VIEW_SQL = (
    f"SELECT country, status, count(*) AS purchases, sum(total) AS total "
    f"FROM {ENTITY} GROUP BY country, status"
)


def _app(history: bool) -> App:
    made = App("bench")
    made.entity(ENTITY, key="id", schema_version=1, history=history)(Purchase)
    made.view(VIEW, sql=VIEW_SQL)
    return made


app = _app(history=True)
"""As projects are by default: latest, history and the view."""

lean = _app(history=False)
"""Latest and the view: what the floors keep too."""
