"""Entity types: typed columns from pydantic models, and clear refusals."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime, create_model

from everstate.changes import EntityType
from everstate.errors import InvalidChange, InvalidEntityType


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Inner(BaseModel):
    name: str
    size: int | None = None


class Itself(BaseModel):
    key: str
    parent: Itself | None = None


@pytest.mark.parametrize(
    ("annotation", "expected", "nullable"),
    [
        (bool, pa.bool_(), False),
        (int, pa.int64(), False),
        (float, pa.float64(), False),
        (str, pa.string(), False),
        (UUID, pa.string(), False),
        (date, pa.date32(), False),
        (datetime, pa.timestamp("us", tz="UTC"), False),
        (AwareDatetime, pa.timestamp("us", tz="UTC"), False),
        (NaiveDatetime, pa.timestamp("us"), False),
        (Colour, pa.string(), False),
        (Level, pa.int64(), False),
        (Literal["a", "b"], pa.string(), False),
        (str | None, pa.string(), True),
        (Optional[int], pa.int64(), True),  # noqa: UP045
        (
            Annotated[Decimal, Field(max_digits=12, decimal_places=2)],
            pa.decimal128(12, 2),
            False,
        ),
        (list[int], pa.list_(pa.field("element", pa.int64(), nullable=False)), False),
        (dict[str, float], pa.map_(pa.string(), pa.float64()), False),
        (
            Inner,
            pa.struct([pa.field("name", pa.string(), nullable=False), ("size", pa.int64())]),
            False,
        ),
    ],
)
def test_each_annotation_has_one_column_type(
    annotation: Any, expected: pa.DataType, nullable: bool
) -> None:
    model = create_model("Thing", key=(str, ...), value=(annotation, ...))
    column = EntityType("thing", model, "key").arrow_schema.field("value")
    assert column.type == expected
    assert column.nullable == nullable


@pytest.mark.parametrize("annotation", [bytes, Any, int | str, Decimal, dict[int, str], complex])
def test_what_has_no_column_type_is_refused_with_the_field(annotation: Any) -> None:
    model = create_model(
        "Thing",
        key=(str, ...),
        value=(annotation, ...),
        __config__={"arbitrary_types_allowed": True},
    )
    with pytest.raises(InvalidEntityType, match=r"Thing\.value"):
        EntityType("thing", model, "key")


def test_a_model_that_contains_itself_is_refused() -> None:
    with pytest.raises(InvalidEntityType, match="contains itself"):
        EntityType("thing", Itself, "key")


@pytest.mark.parametrize("name", ["", "Thing", "1st", "a-b", "x" * 41])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(InvalidEntityType, match="must match"):
        EntityType(name, Inner, "name")


def test_the_key_must_exist_and_have_a_value() -> None:
    with pytest.raises(InvalidEntityType, match="no field or property"):
        EntityType("thing", Inner, "nothing")
    inner = EntityType("thing", Inner, "name")
    assert inner.key_of(Inner(name="a")) == "a"
    with pytest.raises(InvalidChange, match="missing or empty"):
        inner.key_of(Inner(name=""))


def test_wrong_types_name_the_field_and_the_key() -> None:
    with pytest.raises(InvalidChange, match=r"thing 'a': size"):
        EntityType("thing", Inner, "name").validate({"name": "a", "size": "many"})


class Count(BaseModel):
    name: str
    value: int | None = None
    parts: list[dict[str, int]] = []


@pytest.mark.parametrize(
    "broken",
    [
        {"value": 2**63},
        {"value": -(2**63) - 1},
        {"parts": [{"x": 1}, {"x": 2**70}]},
    ],
)
def test_integers_that_no_column_holds_are_refused(broken: dict[str, Any]) -> None:
    counts = EntityType("count", Count, "name")
    with pytest.raises(InvalidChange, match="beyond 64 bits"):
        counts.encode(Count(name="a", **broken))
    widest = Count(name="a", value=2**63 - 1, parts=[{"x": -(2**63)}])
    assert counts.validate_json(counts.encode(widest)) == widest
