"""App "flights": one entity type and the views that the demonstration keeps of it."""

from __future__ import annotations

from datetime import date
from typing import Literal

from pydantic import AwareDatetime, BaseModel

from everstate.app import App

app = App("flights")


@app.entity("flight", key="flight_id", schema_version=1)
class Flight(BaseModel):
    """One flight on one day, as the airport knows it.

    Times carry the offset of the place they are read at: departures New York's, arrivals that of
    the destination. Delays are minutes, negative when early.
    """

    flight_id: str
    """Carrier, number, origin and day: unique over the whole data set."""
    carrier: str
    number: int
    tailnum: str | None
    origin: str
    dest: str
    day: date
    sched_dep: AwareDatetime
    sched_arr: AwareDatetime
    dep: AwareDatetime | None = None
    arr: AwareDatetime | None = None
    dep_delay: int | None = None
    arr_delay: int | None = None
    distance: int
    """Miles."""
    status: Literal["scheduled", "departed", "arrived", "diverted", "cancelled"]


app.view(
    "board",
    sql="""
    SELECT origin, sched_dep, carrier, number, dest, status, dep, dep_delay
    FROM flight WHERE status IN ('scheduled', 'departed', 'cancelled')
    """,
)

app.view(
    "delay_by_carrier",
    sql="""
    SELECT carrier, avg(arr_delay) AS delay, count(*) AS flights
    FROM flight WHERE status = 'arrived' GROUP BY carrier
    """,
)

app.view(
    "cancellations_by_day",
    sql="""
    SELECT day, sum(CASE WHEN status = 'cancelled' THEN 1 ELSE 0 END) AS cancelled,
           count(*) AS flights
    FROM flight GROUP BY day
    """,
)

app.view(
    "flights_by_origin",
    sql="SELECT origin, status, count(*) AS flights FROM flight GROUP BY origin, status",
)
