"""Departures of an airport, and the view that its board shows."""

from typing import Literal

from pydantic import AwareDatetime, BaseModel

from everstate import App

app = App("airport")


@app.entity("departure", key="departure_id")
class Departure(BaseModel):
    """A flight that leaves."""

    departure_id: str
    departs: AwareDatetime
    flight: str
    destination: str
    gate: str | None = None
    status: Literal["on time", "boarding", "delayed", "cancelled", "departed"] = "on time"


app.view(
    "departures",
    sql="SELECT departs, flight, destination, gate, status FROM departure "
    "WHERE status <> 'departed'",
)
