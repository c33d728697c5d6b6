"""Attribute triggers: which changes fire."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
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


class Booking(BaseModel):
    booking_id: str
    status: Literal["open", "paid", "cancelled"] = "open"
    rooms: int = 1
    price: Annotated[Decimal, Field(max_digits=8, decimal_places=2)] = Decimal(0)
    at: datetime | None = None
    place: Place | None = None
    paid: bool = False


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
        (CANCELLED & when("nights").changes(), "no field 'nights'"),
    ],
)
def test_a_trigger_that_no_change_can_answer_is_refused(trigger: Trigger, reason: str) -> None:
    with pytest.raises(InvalidTrigger, match=reason):
        trigger.check(BOOKING)
