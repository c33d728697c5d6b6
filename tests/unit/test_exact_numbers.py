"""Numbers, days and collections of any writer arrive exactly; any other is refused."""

from __future__ import annotations

from collections import deque
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, field_validator

from everstate.changes import EntityType
from everstate.changes.accepting import NotAccepted, accept
from everstate.changes.json_numbers import decode
from everstate.errors import EverstateError, InvalidChange, InvalidEntityType
from exact_cases import (
    SALE,
    WAYS_IN,
    Line,
    Sale,
    by_json_lines,
    by_json_lines_with_nan,
    by_store,
)


class Scale(BaseModel):
    """Its numbers pass a validator of its own."""

    scale_id: str
    weight: float = 0.0
    grams: Annotated[float, BeforeValidator(lambda value: value)] = 0.0
    limits: list[float] = []

    @field_validator("*", mode="before")
    @classmethod
    def _unchanged(cls, value: Any) -> Any:
        return value


class Tag(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    tag_id: str
    labels: list[str] = []
    size: float | None = None
    name: str | None = None


class Note(BaseModel):
    note_id: str
    text: Annotated[str, Field(coerce_numbers_to_str=True)] = ""


class Coerced(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    coerced_id: str
    pieces: int = 0
    day: date | None = None
    price: Decimal | None = None
    text: str = ""


def test_only_a_text_shows_how_a_number_was_written() -> None:
    accepted = accept(Coerced, b'{"coerced_id": 1.10, "price": 1.10, "text": 1.50}')
    assert isinstance(accepted, Coerced)
    assert (accepted.coerced_id, str(accepted.price), accepted.text) == ("1.10", "1.1", "1.50")
    for field, reason in (("pieces", "fractional part"), ("day", "1.5 is a number and no date")):
        with pytest.raises(NotAccepted) as refused:
            accept(Coerced, f'{{"coerced_id": "a", "{field}": 1.5}}'.encode())
        assert reason in str(refused.value)


@pytest.mark.parametrize("way", [by_json_lines, by_json_lines_with_nan, by_store])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("9007199254740993.0", 9007199254740993),
        ("12345678901234567.00", 12345678901234567),
        ("9.223372036854775e18", 9223372036854775000),
        ("9.0071992547409931e17", 900719925474099310),
        ("5.0", 5),
    ],
)
def test_a_whole_number_with_a_point_keeps_its_digits(
    way: Any, written: str, value: int, tmp_path: Path
) -> None:
    assert way(SALE, f'"pieces": {written}', tmp_path).pieces == value


@pytest.mark.parametrize("way", [*WAYS_IN, by_store])
@pytest.mark.parametrize("written", ["1.00000000000000000001", "9007199254740993.5", "1e-400"])
def test_a_number_that_is_not_whole_is_no_integer(way: Any, written: str, tmp_path: Path) -> None:
    with pytest.raises(EverstateError) as refused:
        way(SALE, f'"pieces": {written}', tmp_path)
    assert "pieces" in str(getattr(refused.value, "problems", refused.value))


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize(
    ("field", "written", "reason"),
    [
        ("pieces", "true", "true is no number"),
        ("weight", "false", "false is no number"),
        ("day", '"2026-01-01T00:00:00+05:00"', "has a time"),
        ("day", '"2026-01-01 00:00:00"', "has a time"),
        ("day", '"2026-01-01_00:00:00Z"', "has a time"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    way: Any, field: str, written: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EverstateError) as refused:
        way(SALE, f'"{field}": {written}', tmp_path)
    told = str(getattr(refused.value, "problems", refused.value))
    assert field in told
    assert reason in told


def test_a_day_is_not_made_of_a_time_with_an_offset() -> None:
    midnight = datetime.fromisoformat("2026-01-01T00:00:00")
    sale = SALE.accept({"sale_id": "s1", "day": midnight})
    assert isinstance(sale, Sale)
    assert sale.day == date(2026, 1, 1)
    with pytest.raises(InvalidChange, match=r"day: .* has a UTC offset"):
        SALE.accept({"sale_id": "s1", "day": midnight.replace(tzinfo=UTC)})


def test_a_union_with_a_boolean_takes_it() -> None:
    class Either(BaseModel):
        value: int | bool

    assert accept(Either, b'{"value": true}') == Either(value=True)


@pytest.mark.parametrize("field", ["weight", "grams", "limits"])
@pytest.mark.parametrize("strict", [None, True])
def test_a_validator_of_the_model_does_not_hide_that_a_float_is_changed(
    field: str, strict: bool | None
) -> None:
    form = "[%s]" if field == "limits" else "%s"
    text = f'{{"scale_id": "s", "{field}": {form}}}'
    assert accept(Scale, text % "2.5", strict=strict)
    for written in ("9007199254740993", "9007199254740993.0"):
        with pytest.raises(NotAccepted, match="a float cannot hold exactly"):
            accept(Scale, text % written, strict=strict)
        with pytest.raises(NotAccepted, match="a float cannot hold exactly"):
            accept(Scale, decode(text % written))


class Many(BaseModel):
    many_id: str
    times: set[datetime] = set()
    weights: frozenset[float] = frozenset()
    parts: list[Line] = []
    days: list[date] | None = None


MANY = EntityType("many", Many, "many_id")


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("times", {"2026"}),
        ("times", frozenset({"2026"})),
        ("times", {"2026": 1}.keys()),
        ("times", {1: "2026"}.values()),
        ("times", deque(["2026"])),
        ("weights", {9007199254740993}),
        ("parts", deque([{"price": "1_000"}])),
        ("days", {86400}),
    ],
)
def test_the_values_of_any_collection_are_checked(field: str, given: Any) -> None:
    with pytest.raises(InvalidChange, match=rf"{field}\.0"):
        MANY.accept({"many_id": "m", field: given})
    assert MANY.accept({"many_id": "m", "times": {"2026-01-02T03:04:05Z"}, "weights": {2.5}})


@pytest.mark.parametrize("field", ["times", "weights", "parts", "days"])
def test_an_iterator_is_refused_because_it_can_be_read_only_once(field: str) -> None:
    nothing: list[Any] = []
    for given in (iter(nothing), (each for each in nothing)):
        with pytest.raises(InvalidChange, match=f"{field}: .* only once; give a list"):
            MANY.accept({"many_id": "m", field: given})


@pytest.mark.parametrize(
    "written", ["12345678901234567890.123", "0.10", "1e5", "123456789012345678901234567890", "-0.0"]
)
def test_a_number_that_becomes_a_text_keeps_its_digits(written: str) -> None:
    tags = f'{{"tag_id": "t", "name": {written}, "labels": [{written}], "size": 0.10}}'
    made = accept(Tag, tags)
    assert isinstance(made, Tag)
    assert (made.name, made.labels, made.size) == (written, [written], 0.1)
    assert accept(Note, f'{{"note_id": "n", "text": {written}}}') == Note(note_id="n", text=written)
    for strict in (tags, '{"tag_id": 0.5}'):
        with pytest.raises(NotAccepted):
            accept(Tag, strict, strict=True)


def test_an_enum_of_numbers_beyond_64_bits_is_refused_when_it_is_declared() -> None:
    class Large(Enum):
        first = 2**63

    class Holder(BaseModel):
        holder_id: str
        large: Large | None = None

    beyond: Any = Literal[9223372036854775808]
    named = create_model("Named", named_id=(str, ...), large=(beyond, ...))
    for model, key in ((Holder, "holder_id"), (named, "named_id")):
        with pytest.raises(InvalidEntityType, match=r"large: .* beyond 64 bits"):
            EntityType("holder", model, key)
