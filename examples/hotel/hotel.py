"""A hotel: one entity type and one view."""

from pydantic import BaseModel

from everstate.app import App

app = App("hotel")


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    """Somebody who stays with us."""

    guest_id: str
    name: str
    city: str | None = None
    nights: int = 0


app.view(
    "nights_by_city",
    sql="SELECT city, count(*) AS guests, sum(nights) AS nights FROM guest GROUP BY city",
)
