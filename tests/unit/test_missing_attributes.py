"""A filter finds states of older models by the defaults that readers see in them."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.sources.crud.filters import Filters
from everstate.sources.stores.cassandra.store import _meets
from everstate.sources.stores.rows import shown_for_missing


class Status(Enum):
    SCHEDULED = "scheduled"
    GONE = "gone"


class Flight(BaseModel):
    flight_id: str
    note: str | None = None
    status: Status = Status.SCHEDULED
    seats: int = 0
    is_full: bool = False
    day: date = date(2013, 2, 8)
    gate: str | None = Field(default="A1", alias="atGate")
    fare: Annotated[Decimal, Field(max_digits=9, decimal_places=2)] | None = Decimal("1.50")
    made: str = Field(default_factory=lambda: "now")


FLIGHT = EntityType("flight", Flight, "flight_id")
FILTERS = Filters(FLIGHT)


@pytest.mark.parametrize(
    ("name", "value", "is_found"),
    [
        ("note", "null", True),
        ("note", "late", False),
        ("status", "scheduled", True),
        ("status", "gone", False),
        ("seats", "0", True),
        ("seats", "1", False),
        ("is_full", "false", True),
        ("day", "2013-02-08", True),
        ("atGate", "A1", True),
        ("atGate", "null", False),
        ("fare", "1.5", True),
        ("fare", "1.51", False),
        ("made", "now", False),
    ],
)
def test_a_state_without_an_attribute_has_its_default(
    name: str, value: str, is_found: bool
) -> None:
    equal = FILTERS.parse([(name, value)])
    missing = shown_for_missing(Flight, equal)
    old: dict[str, Any] = {"flight_id": "f1"}
    shown = json.loads(FLIGHT.encode(FLIGHT.validate_json(json.dumps(old))))
    if not isinstance(equal[name], Decimal):
        assert (shown[name] == equal[name]) is (is_found or name == "made")
    assert _meets(json.dumps(old), equal, missing) is is_found
    other = "other" if is_found else str(equal[name]) if name == "fare" else equal[name]
    assert _meets(json.dumps({**old, name: other}), equal, missing) is not is_found
