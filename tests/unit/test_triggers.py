"""Attribute triggers: which changes fire."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.changes.triggers import Trigger, trigger_of, when
from everstate.errors import InvalidTrigger


class Place(BaseModel):
    city: str | None = None
    zip: str | None = None


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Booking(BaseModel):
    booking_id: str
    status: Literal["open", "paid", "cancelled"] = "open"
    rooms: int = 1
    price: Annotated[Decimal, Field(max_digits=8, decimal_places=2)] = Decimal(0)
    at: datetime | None = None
    place: Place | None = None
    paid: bool = False
    size: Annotated[Size | None, Field(description="of the room")] = None
    rates: list[Annotated[Decimal, Field(max_digits=8, decimal_places=2)]] = []
    scores: list[float] = []
    seen: list[datetime] = []
    stops: list[Place] = []
    nights: list[int] = []
    extra: dict[str, int] = {}
    notes: list[dict[str, str]] = []
    name: str = ""


BOOKING = EntityType("booking", Booking, "booking_id")
CANCELLED = when("status").changes(to="cancelled")


def fires(trigger: Trigger, original: Any, current: Any) -> bool:
    return trigger.fires(BOOKING, original, current)


@pytest.mark.parametrize(
    ("trigger", "original", "current", "expected"),
    [
        (CANCELLED, {"status": "open"}, {"status": "cancelled"}, True),
        (CANCELLED, {"status": "cancelled"}, {"status": "cancelled"}, False),
        (CANCELLED, {"status": "open"}, {"status": "paid"}, False),
        (CANCELLED, None, {"status": "cancelled"}, True),
        (CANCELLED, {"status": "cancelled"}, None, False),
        (when("status").changes(), {"status": "cancelled"}, None, True),
        (when("status").changes(from_=None), None, {"status": "open"}, True),
        (when("status").changes(to=None), {"status": "open"}, None, True),
        (
            when("status").changes(from_="paid", to=["open", "cancelled"]),
            {"status": "paid"},
            {"status": "open"},
            True,
        ),
        (when("status").changes(from_="paid"), {"status": "open"}, {"status": "paid"}, False),
        (when("place.city").changes(), {"place": {"city": "Wien"}}, {"place": None}, True),
        (when("place.city").changes(), {"place": {"city": None}}, {"place": None}, False),
        (when("place.city").changes(), {}, {"place": {"city": None}}, False),
        (when("price").changes(), {"price": "1.50"}, {"price": "1.5"}, False),
        (when("price").changes(), {"price": "1.50"}, {"price": "1.51"}, True),
        (
            when("at").changes(),
            {"at": "2026-01-01T12:00:00Z"},
            {"at": "2026-01-01T13:00:00+01:00"},
            False,
        ),
        *(
            (when(field).changes(), {field: original}, {field: current}, expected)
            for field, original, current, expected in (
                # Members of an object: their order, those that are missing, and unknown ones.
                ("place", {"city": "Wien", "zip": "1"}, {"zip": "1", "city": "Wien"}, False),
                ("place", {"city": "Wien"}, {"city": "Wien", "zip": None}, False),
                ("place", {"city": "Wien"}, {"city": "Wien", "country": "AT"}, False),
                ("place", {"city": "Wien"}, {"city": "Graz"}, True),
                ("place", {}, None, True),
                ("stops", [{"city": "Wien"}], [{"zip": None, "city": "Wien"}], False),
                ("stops", [{"city": "Wien"}], [{"city": "Wien"}, None], True),
                # Several texts of one value, also in lists.
                ("rates", ["2.5"], ["2.50"], False),
                ("rates", ["2.5"], [2.5], False),
                ("rates", ["2.5", "1"], ["1", "2.5"], True),
                ("scores", [1], [1.0], False),
                ("seen", ["2026-01-01T12:00:00Z"], ["2026-01-01T13:00:00+01:00"], False),
                ("at", "2026-01-01T12:00:00.0000000Z", "2026-01-01T12:00:00Z", False),
                ("price", "12.500", 12.5, False),
                # A value that its type cannot hold exactly is null.
                ("at", "2026-01-01T12:00:00.0000001Z", "2026-01-01T12:00:00Z", True),
                ("at", "2026-01-01T12:00:00.0000001Z", None, False),
                ("price", "12.505", "12.51", True),
                ("price", "12.505", "2,5", False),
                ("rates", ["2.5", "2.123456789"], None, False),
                # A value that does not fit its type is null: one in a list, the whole list.
                ("rooms", "x", "y", False),
                ("rooms", None, "x", False),
                ("rooms", 5, 5.0, True),
                ("rooms", True, 2**70, False),
                ("at", "soon", "later", False),
                ("place", "Wien", None, False),
                ("nights", [1, "x"], [2, "y"], False),
                ("nights", [1, "x"], [1], True),
                # Of a field of text a number is its text.
                ("name", 5, 6, True),
                ("name", 5, "5", False),
                ("name", True, "true", False),
                ("name", {"a": 1.0}, '{"a":1.0}', False),
            )
        ),
        (when("rooms").changes(to=None), {"rooms": 1}, {"rooms": "x"}, True),
        (when("rooms").changes(to=1), {"rooms": 2}, {"rooms": True}, False),
        (when("paid").changes(to=True), {"paid": False}, {"paid": True}, True),
        (when("rooms").changes(to=1), {"rooms": 2}, {"rooms": 1}, True),
        (CANCELLED & when("rooms").changes(), {"rooms": 1}, {"rooms": 1}, False),
        (
            CANCELLED | when("rooms").changes(),
            {"rooms": 1, "status": "open"},
            {"rooms": 2, "status": "open"},
            True,
        ),
        (~CANCELLED, {"status": "open"}, {"status": "paid"}, True),
    ],
)
def test_a_trigger_fires_when_its_field_changes_as_it_says(
    trigger: Trigger, original: Any, current: Any, expected: bool
) -> None:
    assert fires(trigger, original, current) is expected


@given(st.sampled_from(["open", "paid", "cancelled"]), st.sampled_from(["open", "cancelled"]))
def test_a_trigger_that_is_noted_and_read_again_is_the_same(old: str, new: str) -> None:
    for trigger in (CANCELLED, ~(CANCELLED & when("rooms").changes(from_={1, 2})) | CANCELLED):
        trigger.check(BOOKING)
        again = trigger_of(trigger.definition)
        assert again == trigger
        states = ({"status": old}, {"status": new})
        assert fires(again, *states) is fires(trigger, *states)


@pytest.mark.parametrize(
    ("trigger", "reason"),
    [
        (when("stauts").changes(), "booking has no field 'stauts'"),
        (when("place.town").changes(), "no field 'place.town'"),
        (when("status.length").changes(), "no field"),
        (when("rooms").changes(to="2"), "cannot be asked for '2'"),
        (when("price").changes(to="1.50"), "cannot be asked for"),
        (when("paid").changes(to=1), "cannot be asked for 1"),
        (CANCELLED & when("beds").changes(), "no field 'beds'"),
        (when("extra").changes(), "booking.extra has a dict"),
        (when("notes").changes(), "booking.notes has a dict"),
        (when("rooms").changes(to=2**70), "cannot be asked for"),
        (when("status").changes(to="cancled"), "never is 'cancled'.*'open', 'paid', 'cancelled'"),
        (when("size").changes(to=["s", "m"]), "never is 'm'.*'s', 'l'"),
    ],
)
def test_a_trigger_that_no_change_can_answer_is_refused(trigger: Trigger, reason: str) -> None:
    with pytest.raises(InvalidTrigger, match=reason):
        trigger.check(BOOKING)


def test_values_of_a_literal_and_of_an_enum_can_be_named() -> None:
    when("size").changes(to=[Size.SMALL, "l", None]).check(BOOKING)
    when("status").changes(from_="open", to=["paid", None]).check(BOOKING)
