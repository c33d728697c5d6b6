"""Conditions over an entity's fields."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime

from everstate.changes import EntityType
from everstate.errors import InvalidQuery
from everstate.serving.predicates import condition, field_of, order_term


class Address(BaseModel):
    city: str
    floor: int | None = None


class Guest(BaseModel):
    guest_id: str
    name: str | None
    nights: int
    vip: bool
    born: date
    arrives: AwareDatetime
    checked_out: NaiveDatetime
    paid: Annotated[Decimal, Field(max_digits=10, decimal_places=2)]
    score: float
    status: Literal["booked", "here", "gone"]
    address: Address
    tags: list[str] = []


FIELD = partial(field_of, EntityType("guest", Guest, "guest_id"))


@pytest.mark.parametrize(
    ("text", "path", "operator", "value"),
    [
        ("status=here", ("status",), "=", "here"),
        ("nights>=3", ("nights",), ">=", 3),
        (" nights != 3 ", ("nights",), "!=", 3),
        ("vip=True", ("vip",), "=", True),
        ("born<2000-01-01", ("born",), "<", date(2000, 1, 1)),
        (
            "arrives<=2026-01-01T00:00Z",
            ("arrives",),
            "<=",
            datetime(2026, 1, 1, tzinfo=UTC),
        ),
        ("paid>19.90", ("paid",), ">", Decimal("19.90")),
        ("score=1.5", ("score",), "=", Decimal("1.5")),
        ("score=9007199254740993", ("score",), "=", Decimal(9007199254740993)),
        ("score!=0.10000000000000000001", ("score",), "!=", Decimal("0.10000000000000000001")),
        ("score<1e400", ("score",), "<", Decimal("1e400")),
        ("score>1e-400", ("score",), ">", Decimal("1e-400")),
        ("nights>99999999999999999999", ("nights",), ">", 99999999999999999999),
        ("address.city=Wien", ("address", "city"), "=", "Wien"),
        ("address.floor=null", ("address", "floor"), "=", None),
        ("name!=null", ("name",), "!=", None),
        ("name=a=b", ("name",), "=", "a=b"),
        ('name="null"', ("name",), "=", "null"),
        ('name=" a"', ("name",), "=", " a"),
        ('name="a', ("name",), "=", '"a'),
        ("name=a ", ("name",), "=", "a "),
        ("name =a\t", ("name",), "=", "a\t"),
        ("nights=3 ", ("nights",), "=", 3),
        ("name=", ("name",), "=", ""),
        ('name= " a"', ("name",), "=", " a"),
        ("name = null", ("name",), "=", None),
    ],
)
def test_a_condition_is_read_in_the_type_of_its_field(
    text: str, path: tuple[str, ...], operator: str, value: Any
) -> None:
    predicate = condition(text, FIELD)
    assert predicate.term.name == ".".join(path)
    assert (predicate.operator, predicate.value) == (operator, value)
    assert type(predicate.value) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("statsu=here", "no field 'statsu'. Did you mean status"),
        ("address.town=Wien", "no field 'address.town'"),
        ("name.first=Eva", "name has no fields"),
        ("address=Wien", "holds an object; compare one of its fields"),
        ("tags=a", "a list or map"),
        ("nights=many", "nights is a whole number, and 'many' is none"),
        ("vip=1", "Write true or false"),
        ("born=yesterday", "born is a date"),
        ("arrives=2026-01-01T00:00", "no UTC offset"),
        ("paid=free", "a decimal number"),
        ("nights<null", "null can only be compared by = and !="),
        ("nights=1_000", "nights is a whole number, and '1_000' is none"),
        ("paid=1_000", "a decimal number"),
        ("paid=NaN", "a decimal number"),
        ("paid=sNaN", "a decimal number"),
        ("score=nan", "a decimal number"),
        ("score<inf", "a decimal number"),
        ("paid=1e200000", "131,072 digits"),
        ("arrives=2026-01-01T00:00:00.1234569Z", "parts of a microsecond"),
        ("born=20000101", "born is a date"),
        ("checked_out=2026-01-01T00:00+02:00", "without an offset"),
        ("nights", "cannot be read"),
        ("nights~3", "cannot be read"),
        ("name= a", "begins with a blank"),
        ("name = a", 'Write name=a, or name=" a"'),
    ],
)
def test_a_condition_that_cannot_hold_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(InvalidQuery) as refused:
        condition(text, FIELD)
    assert said in f"{refused.value.message} {refused.value.advice}"


def test_an_order_names_a_field_and_may_turn_round() -> None:
    assert not order_term("nights", FIELD).is_descending
    assert order_term("-arrives", FIELD).is_descending
    with pytest.raises(InvalidQuery, match="Did you mean nights"):
        order_term("night", FIELD)
