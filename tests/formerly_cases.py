"""A model with each kind of place where a field can be renamed, and states from before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, Field

from everstate import Formerly
from everstate.changes import EntityType, Provenance

WHO = Provenance(api_version="v1", service_name="test", identifier="t")
Money = Annotated[Decimal, Field(max_digits=30, decimal_places=2)]


class OldLine(BaseModel):
    sum: Money


class OldHome(BaseModel):
    street: str
    town: str | None = None


class Old(BaseModel):
    """A guest in the days before."""

    guest_id: str
    city_name: str | None = None
    price: Money | None = None
    home: OldHome | None = None
    lines: list[OldLine] = []
    homes: dict[str, OldHome] = {}


class Line(BaseModel):
    amount: Annotated[Money, Formerly("sum")]


class Home(BaseModel):
    street: str
    place: Annotated[str | None, Formerly("town", "village")] = None


class New(BaseModel):
    """Each kind of place where a field can be renamed."""

    guest_id: str
    city: Annotated[str | None, Formerly("city_name")] = None
    paid: Annotated[Money | None, Formerly("price")] = None
    address: Annotated[Home | None, Formerly("home")] = None
    lines: list[Line] = []
    homes: dict[str, Home] = {}


GUEST, WAS = EntityType("guest", New, "guest_id"), EntityType("guest", Old, "guest_id")


@dataclass(frozen=True)
class Case:
    """A state as it was written, and what it says with today's names."""

    was: dict[str, Any]
    now: dict[str, Any]


EXACT = "1234567890123456789012345678.25"
CASES = {
    "a field": Case({"city_name": "Wien"}, {"city": "Wien"}),
    "a number with all digits": Case({"price": EXACT}, {"paid": EXACT}),
    "an object, and a field in it": Case(
        {"home": {"street": "a", "town": "b"}}, {"address": {"street": "a", "place": "b"}}
    ),
    "the first of two former names": Case(
        {"home": {"street": "a", "village": "b"}}, {"address": {"street": "a", "place": "b"}}
    ),
    "in a list": Case({"lines": [{"sum": "2.50"}]}, {"lines": [{"amount": "2.50"}]}),
    "in a mapping": Case(
        {"homes": {"x": {"street": "a", "town": "b"}}},
        {"homes": {"x": {"street": "a", "place": "b"}}},
    ),
    "only the new name of the outer field": Case(
        {"address": {"street": "a", "town": "b"}}, {"address": {"street": "a", "place": "b"}}
    ),
    "both names, with one value": Case({"city": "Wien", "city_name": "Wien"}, {"city": "Wien"}),
    "null beside a value": Case({"city": "Wien", "city_name": None}, {"city": "Wien"}),
    "a value beside null": Case({"city": None, "city_name": "Wien"}, {"city": "Wien"}),
    "null": Case({"city_name": None}, {"city": None}),
    "nothing": Case({}, {}),
    "an empty list and mapping": Case({"lines": [], "homes": {}}, {"lines": [], "homes": {}}),
    "an escaped name": Case({"city_name": "Wien \\ Linz"}, {"city": "Wien \\ Linz"}),
}


def text(state: dict[str, Any]) -> bytes:
    """A whole state as JSON."""
    return json.dumps({"guest_id": "a", **state}).encode()


@dataclass(frozen=True)
class Clash:
    """A state with different values under the names of a field."""

    was: dict[str, Any]
    field: str


CLASHES = {
    "a field": Clash({"city": "Wien", "city_name": "Linz"}, "city"),
    "in an object": Clash({"address": {"street": "a", "place": "b", "town": "c"}}, "address.place"),
    "two former names": Clash(
        {"home": {"street": "a", "town": "b", "village": "c"}}, "address.place"
    ),
    "in a list": Clash(
        {"lines": [{"amount": "1.00"}, {"amount": "1.00", "sum": "2.00"}]},
        "lines.1.amount",
    ),
    "in a mapping": Clash(
        {"homes": {"x": {"street": "a", "place": "b", "town": "c"}}},
        "homes.x.place",
    ),
}
