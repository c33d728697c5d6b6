"""A hotel: guests, their sessions and orders, and what they do; two views."""

from decimal import Decimal
from typing import Annotated, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field

from everstate import App

app = App("hotel")

Key = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,40}$")]
Text = Annotated[str, Field(max_length=200, pattern=r"^[^\x00]*$")]


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    """Somebody who stays with us."""

    guest_id: Key
    name: Text
    city: Text | None = None
    nights: Annotated[int, Field(ge=0, le=365)] = 0


@app.entity("session", key="session_id")
class Session(BaseModel):
    """A guest at our web site."""

    session_id: Key
    guest_id: Key
    device: Literal["phone", "desk"] = "desk"
    ended: bool = False


class Item(BaseModel):
    """One line of an order."""

    article: Text
    quantity: Annotated[int, Field(ge=1, le=1000)] = 1
    price: Annotated[Decimal, Field(max_digits=8, decimal_places=2, ge=0)]


@app.entity("order", key="order_id")
class Order(BaseModel):
    """What a guest ordered; it changes as a whole, items and all."""

    order_id: Key
    guest_id: Key
    status: Literal["open", "paid", "cancelled"] = "open"
    items: list[Item] = []


@app.entity("event", key="event_id", source="log")
class Event(BaseModel):
    """Something a guest did: a fact, in the log and the log only."""

    event_id: UUID
    session_id: Key
    type: Text
    occurred_at: AwareDatetime
    page: Text | None = None


app.view(
    "nights_by_city",
    sql="SELECT city, count(*) AS guests, sum(nights) AS nights FROM guest GROUP BY city",
)
app.view("events_by_type", sql="SELECT type, count(*) AS times FROM event GROUP BY type")
