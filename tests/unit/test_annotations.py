"""Fields whose type has a name of its own: in Python, in pydantic, or of the project."""

from __future__ import annotations

from decimal import Decimal
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal, NewType, TypeVar

import pyarrow as pa
import pytest
from pydantic import (
    BaseModel,
    Field,
    FutureDate,
    HttpUrl,
    IPvAnyAddress,
    PastDate,
    PastDatetime,
    create_model,
)
from typing_extensions import TypeAliasType

from everstate.changes import EntityType
from everstate.changes.triggers import when
from everstate.errors import InvalidChange, InvalidEntityType, InvalidTrigger
from everstate.views.definition import ViewDefinition
from everstate.views.plan import compile_view

T = TypeVar("T")
GuestId = NewType("GuestId", str)
Money = TypeAliasType("Money", Annotated[Decimal, Field(max_digits=6, decimal_places=2)])
Price = NewType("Price", Money)
Many = TypeAliasType("Many", list[T], type_params=(T,))
Status = TypeAliasType("Status", Literal["open", "paid"])


class Line(BaseModel):
    price: Money


NamedLine = NewType("NamedLine", Line)


def entity_of(annotation: Any) -> EntityType:
    model = create_model("Thing", key=(GuestId, ...), value=(annotation, ...))
    return EntityType("thing", model, "key")


@pytest.mark.parametrize(
    ("annotation", "value", "column", "written"),
    [
        (GuestId, "g", pa.string(), "g"),
        (Money, "1.50", pa.decimal128(6, 2), "1.50"),
        (Price, "1.50", pa.decimal128(6, 2), "1.50"),
        (Many[Money], ["1.50"], pa.list_(pa.field("element", pa.decimal128(6, 2), False)), None),
        (dict[str, Price], {"a": "1.50"}, pa.map_(pa.string(), pa.decimal128(6, 2)), None),
        (NamedLine, {"price": "1.50"}, None, {"price": "1.50"}),
        (Status, "paid", pa.string(), "paid"),
        (HttpUrl, "https://everstate.example/a", pa.string(), "https://everstate.example/a"),
        (IPv4Address, "10.0.0.1", pa.string(), "10.0.0.1"),
        (IPvAnyAddress, "::1", pa.string(), "::1"),
        (PastDate, "2020-01-02", pa.date32(), "2020-01-02"),
        (PastDatetime, "2020-01-02T03:04:05Z", pa.timestamp("us", "UTC"), "2020-01-02T03:04:05Z"),
    ],
)
def test_a_named_type_has_the_column_of_what_it_means(
    annotation: Any, value: Any, column: pa.DataType | None, written: Any
) -> None:
    thing = entity_of(annotation)
    if column is not None:
        assert thing.arrow_schema.field("value").type == column
    state = thing.encode(thing.accept({"key": "k", "value": value}))
    assert thing.validate_json(state) == thing.accept({"key": "k", "value": written or value})


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (Money, "1.555", "2 decimal places"),
        (Many[int], [2**63], "beyond 64 bits"),
        (TypeAliasType("Ratio", float), float("nan"), "NaN"),
        (TypeAliasType("Ratio", float), 9007199254740993, "cannot hold exactly"),
        (PastDate, "2020-01-02T03:04:05", "has a time"),
        (PastDatetime, 0, "is a number and no time"),
        (NamedLine, {"price": "1.50", "prize": 1}, "no field of this name"),
    ],
)
def test_the_rules_of_values_hold_behind_a_name(annotation: Any, value: Any, reason: str) -> None:
    thing = entity_of(annotation)
    with pytest.raises(InvalidChange, match=reason):
        thing.encode(thing.accept({"key": "k", "value": value}))


def test_equal_values_behind_a_name_are_no_change() -> None:
    thing = entity_of(Many[Money])
    assert thing.is_equal('{"key":"k","value":["1.5"]}', '{"key":"k","value":["1.50"]}')


def test_a_type_that_cannot_be_kept_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidEntityType, match="no date stays in the future"):
        entity_of(FutureDate)


def test_the_values_of_a_literal_behind_a_name_are_known_to_triggers() -> None:
    thing = entity_of(Status)
    when("value").changes(to="paid").check(thing)
    with pytest.raises(InvalidTrigger, match="lost"):
        when("value").changes(to="lost").check(thing)


def test_a_key_that_is_a_named_text_is_the_key_of_a_view() -> None:
    thing = entity_of(int)
    definition = ViewDefinition("things", sql="SELECT key, value FROM thing")
    table = compile_view(definition, {"thing": thing}).table(0)
    assert table.columns == ("c1",)
