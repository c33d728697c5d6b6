"""A shop: guests, what they buy, and the views of it."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field

from everstate import App

app = App("shop")

Key = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,40}$")]
Text = Annotated[str, Field(max_length=200)]
Money = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    """Somebody who buys here."""

    guest_id: Key
    name: Text
    city: Text
    note: Text = ""


@app.entity("purchase", key="order_id")
class Purchase(BaseModel):
    """An order; it changes as a whole."""

    order_id: Key
    guest_id: Key
    ordered_at: AwareDatetime
    status: Literal["open", "paid", "cancelled"] = "open"
    total: Money


@app.entity("line", key="line_id")
class Line(BaseModel):
    """One article of an order."""

    line_id: Key
    order_id: Key
    article: Text
    quantity: Annotated[int, Field(ge=1, le=1000)]


app.view(
    "spend_by_guest",
    sql="SELECT guest_id, count(*) AS orders, sum(total) AS spent "
    "FROM purchase WHERE status = 'paid' GROUP BY guest_id",
)
app.view(
    "sold_by_article",
    sql="SELECT article, count(*) AS orders, sum(quantity) AS sold FROM line GROUP BY article",
)
app.view("open_orders", sql="SELECT order_id, guest_id, total FROM purchase WHERE status = 'open'")
app.view(
    "best_sellers",
    sql="SELECT article, sum(quantity) AS sold FROM line GROUP BY article "
    "ORDER BY sold DESC LIMIT 3",
)
app.view(
    "last_orders",
    sql="SELECT guest_id, order_id, ordered_at, total FROM purchase "
    "QUALIFY row_number() OVER (PARTITION BY guest_id ORDER BY ordered_at DESC) <= 3",
)
app.view("active_orders", sql="SELECT order_id, status FROM purchase", ttl="4 hours")
app.view(
    "guests", sql="SELECT guest_id, name, city, note FROM guest", search=("name", "note", "city")
)


def day(text: str) -> datetime:
    """A moment of the shop's days."""
    return datetime.fromisoformat(f"{text}T12:00:00+00:00")
