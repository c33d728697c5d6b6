"""A state is read as the entity that was given, or it is refused with field and reason."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from functools import cached_property
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import pytest
from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    PrivateAttr,
    SerializeAsAny,
    WrapSerializer,
    computed_field,
    create_model,
    field_serializer,
    model_serializer,
)
from pyspark.cloudpickle import dumps, loads

from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.changes.accepting import read_exactly
from everstate.changes.json_numbers import decode
from everstate.errors import EverstateError, InvalidChange
from everstate.sources.commands.wire import command_json
from everstate.sources.outbox.emit import emit_arguments
from kit.changes import change_of


class Status(Enum):
    OPEN = "open"
    PAID = "paid"


class Line(BaseModel):
    sku: str
    pieces: int = 1


class GiftLine(Line):
    note: str


class Order(BaseModel):
    order_id: str
    pieces: int = 1
    total: Annotated[Decimal, Field(max_digits=6, decimal_places=2)] = Decimal("1.00")
    ratio: float = 0.5
    status: Status = Status.OPEN
    day: date | None = None
    at: AwareDatetime | None = None
    tags: set[str] = set()
    lines: list[Line] = []
    first: Line | None = None


class GiftOrder(Order):
    note: str = "for you"


ORDER = EntityType("order", Order, "order_id")
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def changed(**values: Any) -> Order:
    return Order(order_id="o-1").model_copy(update=values)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"pieces": "two"}, "pieces"),
        ({"pieces": "2"}, "pieces"),
        ({"pieces": None}, "pieces"),
        ({"pieces": 1.5}, "pieces"),
        ({"pieces": 2.0}, "pieces"),
        ({"total": Decimal("1.234")}, "total"),
        ({"total": 0.1 + 0.2}, "total"),
        ({"total": Decimal("12345.00")}, "total"),
        ({"ratio": 2**53 + 1}, "ratio"),
        ({"ratio": "0.5"}, "ratio"),
        ({"status": "lost"}, "status"),
        ({"day": NOON}, "day"),
        ({"at": "noon"}, "at"),
        ({"at": datetime(2026, 1, 2)}, "at"),  # noqa: DTZ001
        ({"first": GiftLine(sku="a", note="b")}, "first"),
        ({"lines": [Line(sku="a"), GiftLine(sku="a", note="b")]}, "lines"),
        ({"lines": [Line(sku="a").model_copy(update={"pieces": "x"})]}, "lines.0.pieces"),
        ({"lines": [{"sku": "a", "pices": 2}]}, "lines"),
    ],
)
def test_what_the_model_would_not_read_as_it_was_given_is_refused(
    values: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidChange) as found:
        ORDER.encode(changed(**values))
    assert (found.value.key, found.value.field) == ("o-1", field)


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ({}, {}),
        ({"total": Decimal("9.5")}, {"total": "9.5"}),
        ({"total": 9.5}, {"total": 9.5}),
        ({"total": 0.1}, {"total": 0.1}),
        ({"ratio": 2}, {"ratio": 2.0}),
        ({"status": Status.PAID}, {"status": "paid"}),
        ({"status": "paid"}, {"status": "paid"}),
        ({"at": NOON}, {"at": "2026-01-02T12:00:00Z"}),
        ({"at": "2026-01-02T12:00:00Z"}, {"at": "2026-01-02T12:00:00Z"}),
        ({"tags": {"b", "a"}}, {"tags": ["a", "b"]}),
        ({"tags": ["a"]}, {"tags": ["a"]}),
        ({"lines": (Line(sku="a"),)}, {"lines": [{"sku": "a", "pieces": 1}]}),
        ({"lines": [{"sku": "a", "pieces": 2}]}, {"lines": [{"sku": "a", "pieces": 2}]}),
    ],
)
def test_what_is_read_as_it_was_given_is_written(
    values: dict[str, Any], written: dict[str, Any]
) -> None:
    state = decode(ORDER.encode(changed(**values)))
    assert {name: state[name] for name in written} == written


def test_a_field_that_was_assigned_is_refused_in_a_change() -> None:
    order = Order(order_id="o-1")
    order.pieces = "two"  # type: ignore[assignment]
    source = Provenance(api_version="v1", service_name="shop", identifier="till")
    with pytest.raises(InvalidChange, match="pieces"):
        ChangeCodec(ORDER).encode(change_of("order", "o-1", 1, order, who=source, at=NOON))
    with pytest.raises(InvalidChange, match="pieces"):
        ChangeCodec(ORDER).encode(change_of("order", "o-1", 1, None, order, who=source, at=NOON))
    with pytest.raises(InvalidChange, match="pieces"):
        emit_arguments(ORDER, "o-1", order, None, source, None, NOON, "strict")


def test_an_entity_type_that_has_encoded_can_be_sent_to_a_task() -> None:
    ORDER.encode(Order(order_id="o-1"))
    with pytest.raises(InvalidChange, match="pieces"):
        loads(dumps(ORDER)).encode(changed(pieces="two"))  # type: ignore[no-untyped-call]


def test_a_subclass_may_not_have_fields_that_the_log_would_lack() -> None:
    class Parcel(Order):
        def weight(self) -> int:
            return self.pieces

    assert decode(ORDER.encode(Parcel(order_id="o-1")))["order_id"] == "o-1"
    with pytest.raises(InvalidChange, match="Order has no such field; GiftOrder adds it"):
        ORDER.encode(ORDER.accept(GiftOrder(order_id="o-1")))


def test_a_missing_field_is_refused() -> None:
    order = Order(order_id="o-1")
    del order.pieces
    with pytest.raises(InvalidChange, match="nothing is written as nothing and read as 1"):
        ORDER.encode(order)
    with pytest.raises(InvalidChange, match="Field required"):
        ORDER.encode(Order.model_construct(pieces=1))  # type: ignore[call-arg]


def own_form(annotation: Any, value: Any) -> bytes:
    model = create_model("Thing", key=(str, ...), value=(annotation, ...))
    return EntityType("thing", model, "key").encode(model(key="k", value=value))


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (Annotated[int, PlainSerializer(lambda n: f"n{n}")], 1, "valid integer"),
        (Annotated[int, PlainSerializer(str)], 1, "written as '1', and its column is int64"),
        (Annotated[float, PlainSerializer(lambda n: round(n, 2))], 1.234, "read as 1.23"),
        (Annotated[str, WrapSerializer(lambda v, write: {"x": write(v)})], "a", "valid string"),
        (Annotated[int, BeforeValidator(lambda n: n + 1)], 1, "written as 2 and read as 3"),
        (Annotated[int, Field(exclude=True)], 1, "Field required"),
        (Json[int], "1", "JSON input"),
        (list[Annotated[int, PlainSerializer(str)]], [1], "its column is list"),
        (SerializeAsAny[Line], GiftLine(sku="a", note="b"), "read as Line"),
    ],
)
def test_a_model_that_writes_what_it_does_not_read_is_refused(
    annotation: Any, value: Any, reason: str
) -> None:
    with pytest.raises(EverstateError, match=reason):
        own_form(annotation, value)


def test_a_model_may_have_functions_that_change_no_value() -> None:
    money = Annotated[Decimal, Field(max_digits=9, decimal_places=2)]
    assert own_form(Annotated[money, PlainSerializer(float)], Decimal("1.25")) == (
        b'{"key":"k","value":1.25}'
    )
    assert own_form(Annotated[float, PlainSerializer(lambda n: round(n, 2))], 1.25)
    assert own_form(Annotated[str, BeforeValidator(str.strip)], " a ") == b'{"key":"k","value":"a"}'

    class Named(BaseModel):
        key: str
        given: str = Field("", alias="name")

        @field_serializer("given")
        def _same(self, value: str) -> str:
            return value

        @model_serializer(mode="wrap")
        def _all(self, write: Any) -> Any:
            return write(self)

    assert EntityType("named", Named, "key").encode(Named(key="k", name="n")) == (
        b'{"key":"k","name":"n"}'
    )


def test_an_hour_that_a_clock_shows_twice_is_read_back() -> None:
    """Python takes such a time for unequal to the same instant in UTC."""
    vienna = ZoneInfo("Europe/Vienna")
    for fold, written in ((0, "+02:00"), (1, "+01:00")):
        at = datetime(2026, 10, 25, 2, 30, tzinfo=vienna, fold=fold)
        for values in ({"at": at}, {"lines": [], "at": at}):
            assert decode(ORDER.encode(changed(**values)))["at"] == f"2026-10-25T02:30:00{written}"


def test_a_computed_value_that_its_column_cannot_hold_is_refused() -> None:
    class Bill(BaseModel):
        key: str
        price: Annotated[Decimal, Field(max_digits=6, decimal_places=2)]

        @computed_field
        def taxed(self) -> Annotated[Decimal, Field(max_digits=6, decimal_places=2)]:
            return self.price * Decimal("1.1")

        @computed_field
        def pieces(self) -> int:
            return 1.5 if self.price == 3 else 1  # type: ignore[return-value]

    bill = EntityType("bill", Bill, "key")
    assert decode(bill.encode(Bill(key="k", price=Decimal("1.00"))))["taxed"] == "1.100"
    with pytest.raises(InvalidChange, match=r"taxed: it is written as '1.111', and its column is"):
        bill.encode(Bill(key="k", price=Decimal("1.01")))
    with pytest.raises(InvalidChange, match=r"pieces: it is written as 1.5, and its column is int"):
        bill.encode(Bill(key="k", price=Decimal("3.00")), "made")
    # An earlier release wrote such states, which can still be read.
    assert decode(bill.encode(Bill(key="k", price=Decimal("3.00")), "stored"))["pieces"] == 1.5


def test_what_is_no_field_may_differ() -> None:
    class Inner(BaseModel):
        pieces: int
        _seen: int = PrivateAttr(0)

    class Box(BaseModel):
        model_config = ConfigDict(extra="forbid")
        key: str
        inner: Inner
        _seen: int = PrivateAttr(0)

        @computed_field
        def twice(self) -> int:
            return 2 * self.inner.pieces

        @cached_property
        def thrice(self) -> int:
            return 3 * self.inner.pieces

    box = Box(key="k", inner=Inner(pieces=2))
    box._seen = box.inner._seen = 5
    assert box.thrice == 6
    assert (
        EntityType("box", Box, "key").encode(box) == b'{"key":"k","inner":{"pieces":2},"twice":4}'
    )


def test_a_model_that_is_built_at_its_first_use_is_looked_through() -> None:
    class Late(BaseModel):
        model_config = ConfigDict(defer_build=True)
        key: str
        value: Annotated[int, PlainSerializer(str)]

    with pytest.raises(InvalidChange, match="its column is int64"):
        EntityType("late", Late, "key").encode(Late(key="k", value=1))


def test_a_model_that_holds_plain_values_of_an_enum_is_read_back() -> None:
    class Plain(BaseModel):
        model_config = ConfigDict(use_enum_values=True)
        key: str
        status: Status

    plain = EntityType("plain", Plain, "key")
    given = Plain(key="k", status=Status.OPEN)
    assert plain.encode(given) == b'{"key":"k","status":"open"}'
    paid = given.model_copy(update={"status": Status.PAID})
    assert plain.encode(paid) == b'{"key":"k","status":"paid"}'


class Ship(BaseModel):
    lines: list[Line]
    day: date = Field(date(2026, 1, 2), alias="onDay")
    weight: Annotated[float, PlainSerializer(lambda n: round(n, 1))] = 1.5

    @computed_field
    def pieces(self) -> int:
        return sum(line.pieces for line in self.lines)


def test_a_command_is_read_by_its_handler_as_it_was_given() -> None:
    ship = Ship(lines=[Line(sku="a")])
    sent = command_json(ship)
    assert sent == b'{"lines":[{"sku":"a","pieces":1}],"day":"2026-01-02","weight":1.5,"pieces":1}'
    assert read_exactly(Ship, sent) == ship
    for values, reason in (
        ({"lines": [GiftLine(sku="a", note="b")]}, "lines: .*GiftLine.* read as .*Line"),
        ({"day": "tomorrow"}, "day: "),
        ({"weight": 1.55}, "weight: 1.55 is written as 1.6 and read as 1.6"),
    ):
        with pytest.raises(ValueError, match=reason):
            command_json(ship.model_copy(update=values))
