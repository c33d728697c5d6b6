"""Given / When / Then of views on Spark: what a definition means, and that a wrong one is seen."""

from __future__ import annotations

import enum
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated
from uuid import UUID

import pytest
from pydantic import AwareDatetime, BaseModel, Field

from everstate import App
from everstate.testing.view_behaviour import ViewBehaviour
from page_reader import blocks

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
app = App("desk")
pytestmark = pytest.mark.usefixtures("spark")


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Address(BaseModel):
    city: str | None = None


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    address: Address = Address()
    paid: Annotated[Decimal, Field(max_digits=8, decimal_places=2)] = Decimal(0)
    share: float = 0.0
    seen: AwareDatetime = NOON
    level: Level = Level.LOW
    badge: UUID = UUID(int=7)
    tags: list[str] = []
    marks: dict[str, int] = {}


@app.entity("room", key="room_id")
class Room(BaseModel):
    room_id: str
    guest_id: str


app.view(
    "by_city", sql="SELECT address.city AS city, sum(paid) AS paid FROM guest GROUP BY address.city"
)
app.view("high", sql="SELECT guest_id, seen, badge, tags FROM guest WHERE level = 'high'")
app.view("halves", sql="SELECT avg(share) AS half FROM guest", scale=4)
app.view(
    "richest", sql="SELECT guest_id, paid FROM guest ORDER BY paid DESC LIMIT 2", indexes=["paid"]
)
app.view(
    "rooms", sql="SELECT r.room_id, g.level FROM room r JOIN guest g ON r.guest_id = g.guest_id"
)


def guest(key: str, **values: object) -> Guest:
    return Guest(guest_id=key, **values)


def test_rows_follow_what_is_created_changed_and_deleted() -> None:
    wien = Address(city="Wien")
    one, two = guest("1", address=wien, paid="1.50"), guest("2", address=wien, paid="2.25")
    view = ViewBehaviour.of(app, "by_city")
    view.given().then()
    given = view.given(one, two).then({"city": "Wien", "paid": Decimal("3.75")})
    moved = given.when(guest("2", paid="2.25")).then(
        {"city": None, "paid": Decimal("2.25")}, {"city": "Wien", "paid": Decimal("1.5")}
    )
    moved.when_deleted(one).then({"city": None, "paid": Decimal("2.25")})
    # A Given is not changed by what follows from it.
    given.then({"city": "Wien", "paid": Decimal("3.75")})


def test_values_of_every_kind_are_compared_as_the_model_has_them() -> None:
    at = NOON.astimezone(timezone(timedelta(hours=5)))
    seen = guest("1", level="high", seen=at, tags=["a"], marks={"x": 1})
    ViewBehaviour.of(app, "high").given(seen, guest("2")).then(
        {"guest_id": "1", "seen": NOON, "badge": str(UUID(int=7)), "tags": ["a"]}
    )


def test_floats_are_summed_in_the_declared_scale() -> None:
    halves = ViewBehaviour.of(app, "halves").given(guest("1", share=0.1), guest("2", share=0.2))
    halves.then({"half": 0.15})


def test_the_order_of_rows_counts_where_the_view_has_one() -> None:
    given = ViewBehaviour.of(app, "richest").given(*(guest(str(n), paid=n) for n in range(4)))
    rows = {"guest_id": "3", "paid": Decimal(3)}, {"guest_id": "2", "paid": Decimal(2)}
    given.then(*rows)
    with pytest.raises(AssertionError, match=r"found .*'3'.* expected .*'2'"):
        given.then(*reversed(rows))


def test_a_join_reads_both_entity_types() -> None:
    rooms = ViewBehaviour.of(app, "rooms").given(guest("g"), Room(room_id="r", guest_id="g"))
    rooms.then({"room_id": "r", "level": "low"}).when_deleted(guest("g")).then()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "not expected {'city': 'Wien'"),
        ([{"city": "Wien", "paid": Decimal(2)}], "missing .*Decimal.'2'"),
        ([{"city": "Wien"}], "missing {'city': 'Wien'}"),
        ([{"city": "Wien", "paid": Decimal(1)}] * 2, "missing {'city': 'Wien'"),
    ],
)
def test_a_wrong_row_a_missing_one_and_one_too_many_are_seen(
    rows: list[dict[str, object]], told: str
) -> None:
    given = ViewBehaviour.of(app, "by_city").given(guest("1", address={"city": "Wien"}, paid=1))
    with pytest.raises(AssertionError, match=told):
        given.then(*rows)


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("reference/views.md", '"nights": 3}', '"nights": 4}'),
        ("howto/windows-and-changes.md", "from_utc_timestamp(sold, zone)", "sold"),
    ],
)
def test_the_example_of_a_page_holds(
    monkeypatch: pytest.MonkeyPatch, page: str, right: str, wrong: str
) -> None:
    root = Path(__file__).parents[2]
    (example,) = [
        each for each in blocks(root / "docs" / page) if each.runs and "ViewBehaviour" in each.text
    ]
    monkeypatch.syspath_prepend(root / "examples" / "hotel")
    monkeypatch.delitem(sys.modules, "hotel", raising=False)

    def run(text: str) -> None:
        # Not with this module's postponed annotations, which a reader does not have.
        exec(compile(text, page, "exec", dont_inherit=True), {"__name__": "example"})

    run(example.text)
    with pytest.raises(AssertionError, match="the view differs"):
        run(example.text.replace(right, wrong))
    sys.modules.pop("hotel", None)
