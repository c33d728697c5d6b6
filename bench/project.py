"""The apps that the benches run: purchases and one linear view of them; a captured table."""

from __future__ import annotations

from pydantic import BaseModel

from bench.data import ENTITY, Purchase
from everstate.app import App
from everstate.sources.cdc.declaration import Table

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

CAPTURED = "depot"
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
captured.entity("parcel", key="id")(Parcel)
captured.capture(CAPTURED, kind="postgresql", tables={"public.parcels": Table(entity="parcel")})
