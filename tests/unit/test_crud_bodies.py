"""Bodies read as entities: what is misspelt is refused, what was read may be written back."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ConfigDict, computed_field

from everstate.changes import EntityType
from everstate.errors import InvalidBody
from everstate.http.openapi import Schemas
from everstate.sources.crud.bodies import read_entity


class Item(BaseModel):
    article: str
    quantity: int = 1


class Order(BaseModel):
    order_id: str
    city: str | None = None
    items: list[Item] = []
    notes: dict[str, str] = {}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def pieces(self) -> int:
        """All articles together."""
        return sum(item.quantity for item in self.items)


class Loose(BaseModel):
    model_config = ConfigDict(extra="ignore")
    loose_id: str
    items: list[Item] = []


class Keeping(BaseModel):
    model_config = ConfigDict(extra="allow")
    keeping_id: str


ORDER = EntityType("order", Order, "order_id")
LOOSE = EntityType("loose", Loose, "loose_id")


@pytest.mark.parametrize(
    ("more", "field", "reason"),
    [
        ({"citty": "Wien"}, "citty", "there is no field of this name; did you mean city?"),
        ({"zzz": 1}, "zzz", "there is no field of this name"),
        ({"items": [{"article": "tea", "quanttity": 2}]}, "items.0.quanttity", "there is no field"),
        ({"citty": "Wien", "pieces": 0}, "citty", "there is no field"),
    ],
)
def test_a_misspelt_field_is_refused_and_named(
    more: dict[str, object], field: str, reason: str
) -> None:
    with pytest.raises(InvalidBody) as refusal:
        read_entity(ORDER, json.dumps({"order_id": "o1", **more}).encode())
    ((found, why),) = refusal.value.problems
    assert found == field
    assert why.startswith(reason)


def test_what_was_read_may_be_written_back_with_its_computed_fields() -> None:
    order = read_entity(
        ORDER, b'{"order_id": "o1", "items": [{"article": "tea"}], "notes": {"any": "name"}}'
    )
    assert b'"pieces":1' in ORDER.encode(order)
    assert read_entity(ORDER, ORDER.encode(order)) == order


def test_a_model_that_says_what_it_does_with_unknown_fields_is_followed() -> None:
    body = b'{"loose_id": "l1", "citty": 1, "items": [{"article": "tea", "quanttity": 2}]}'
    assert read_entity(LOOSE, body) == Loose(loose_id="l1", items=[Item(article="tea")])
    kept = read_entity(EntityType("keeping", Keeping, "keeping_id"), b'{"keeping_id": "k", "a": 1}')
    assert kept.model_extra == {"a": 1}


def test_the_description_says_which_objects_take_no_other_fields() -> None:
    components = Schemas([ORDER]).components
    assert {
        name for name, each in components.items() if each.get("additionalProperties") is False
    } == {
        "Order-Input",
        "Item",
    }
    assert "additionalProperties" not in Schemas([LOOSE]).components["Loose"]


def test_a_body_with_very_many_faults_is_refused_without_a_list_of_them() -> None:
    body = b'{"order_id":"a","items":[' + b",".join([b"1"] * 100_001) + b"]}"
    with pytest.raises(InvalidBody, match="100,001 values are wrong"):
        read_entity(ORDER, body)
