"""The apps that the benches run: purchases and one linear view of them; a captured table."""

from __future__ import annotations

import os

from pydantic import BaseModel

from bench.data import ENTITY, Purchase
from everstate.app import App
from everstate.declarations.captures import Table
from everstate.views.policies import Policy, throttle

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

elsewhere = App("bench")
"""Purchases that another system has: they are read from the views, and not from a store."""
elsewhere.entity(ENTITY, key="id", schema_version=1, source="capture")(Purchase)

lean = _app(history=False)
"""Latest and the view: what the floors keep too."""

mirrored = _app(history=False)
"""The same, and a view of rows in each other store that the bench starts."""
for _store in os.environ.get("BENCH_STORES", "").split():
    mirrored.view(
        f"in_{_store}",
        sql=f"SELECT id, country, status, total FROM {ENTITY}",
        store=_store,
    )

SHOWN = "shown"
"""A view of rows, in which the bench `throttle` looks for its live changes."""


def _with_views(*policies: Policy) -> App:
    """Several views, so that keeping them is most of the work; the same policies for each."""
    made = App("bench")
    made.entity(ENTITY, key="id", schema_version=1, history=False)(Purchase)
    made.view(SHOWN, sql=f"SELECT id, status, total FROM {ENTITY}", policies=policies)
    made.view(VIEW, sql=VIEW_SQL, policies=policies)
    for number in range(4):
        made.view(
            f"by_sku_{number}",
            sql=f"SELECT lines[0].sku AS sku, status, count(*) AS n, sum(total) AS total "
            f"FROM {ENTITY} WHERE total > {number} GROUP BY lines[0].sku, status",
            policies=policies,
        )
    return made


unthrottled = _with_views()
throttled = _with_views(throttle(service_name="importer", per_second=2_000))

CAPTURED = "depot"
CAPTURED_DSN = "BENCH_CAPTURED_DSN"
"""Variable of the environment that has its database."""
"""Name of the capture of the bench `cdc`."""


class Parcel(BaseModel):
    """A row of the captured table."""

    id: int
    country: str
    status: str
    weight_g: int
    total: str
    note: str | None = None


captured = App("captured")
"""One table of another system's database."""
captured.entity("parcel", key="id", source="capture")(Parcel)
captured.capture(
    CAPTURED,
    kind="postgresql",
    tables={"public.parcels": Table(entity="parcel")},
    dsn=os.environ.get(CAPTURED_DSN, "postgresql:///"),
)
