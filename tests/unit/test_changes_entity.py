"""Entity types: typed columns from pydantic models, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    NaiveDatetime,
    RootModel,
    computed_field,
    create_model,
    model_validator,
)
from pydantic.alias_generators import to_camel

from everstate.changes import DomainEvent, EntityType
from everstate.changes.values import model_json
from everstate.errors import InvalidChange, InvalidEntityType
from everstate.sources.crud.bodies import read_entity
from everstate.sources.stores.rows import event_text


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


def test_a_field_with_a_default_is_nullable_at_any_depth() -> None:
    """States from before the field, and those of older writers, do not have it."""
    inner = create_model("Within", stars=(int, 0), kinds=(list[str], Field(default_factory=list)))
    model = create_model("Thing", key=(str, ...), stars=(int, 0), within=(inner, ...))
    columns = EntityType("thing", model, "key").arrow_schema
    assert columns.field("stars").nullable
    assert not columns.field("within").nullable
    within = columns.field("within").type
    assert [within.field(name).nullable for name in ("stars", "kinds")] == [True, True]


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


@pytest.mark.parametrize("annotation", [dict, dict[str, Any], list, list[Any], Any])
def test_a_field_of_any_value_is_refused_with_what_can_be_used_instead(annotation: Any) -> None:
    model: Any = create_model("Thing", id=(int, ...), value=(annotation, ...))
    with pytest.raises(InvalidEntityType, match=r"Thing\.value") as caught:
        EntityType("thing", model, "id")
    advice = str(caught.value.advice)
    assert "JSON of any form is kept as its text: str" in advice
    assert not advice.rstrip(".").endswith("dict"), "that is what was refused"


def test_a_model_that_contains_itself_is_refused() -> None:
    with pytest.raises(InvalidEntityType, match="contains itself"):
        EntityType("thing", Itself, "key")


def test_fields_that_differ_by_case_alone_are_refused_at_any_depth() -> None:
    """Spark, Delta and SQL readers would not know which one is meant."""
    inner = create_model("Inner", a=(str, ...), A=(str, ...))
    outer = create_model("Outer", key=(str, ...), parts=(list[inner], ...))
    aliased = create_model("Aliased", key=(str, ...), one=(str, Field(alias="KEY")))
    for model, named in ((inner, "a, A of Inner"), (outer, "a, A of Inner"), (aliased, "key, KEY")):
        with pytest.raises(InvalidEntityType, match=named):
            EntityType("thing", model, "a" if model is inner else "key")


@pytest.mark.parametrize("name", ["_key", "_Version", "unit price", "a.b", "a;b", 'a"b', "a=b"])
def test_a_name_that_no_column_can_have_is_refused_when_it_is_declared(name: str) -> None:
    given: Any = (str | None, Field(alias=name, default=None))
    with pytest.raises(InvalidEntityType, match=r"the name .* another alias"):
        EntityType("thing", create_model("Thing", key=(str, ...), value=given), "key")
    inner = create_model("Inner", value=given)
    outer = create_model("Outer", key=(str, ...), parts=(list[inner], ...))
    if name.startswith("_"):
        EntityType("thing", outer, "key")
    else:
        with pytest.raises(InvalidEntityType, match="Inner: the name"):
            EntityType("thing", outer, "key")


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


class Box(BaseModel):
    """A model with sets everywhere that a set can be; the two orders of {0, 8} differ."""

    model_config = ConfigDict(extra="allow")
    box_id: str
    plain: set[int]
    frozen: frozenset[int]
    named: Annotated[set[Colour | None], Field(alias="NAMED")] = set()
    listed: list[set[int]] = []
    mapped: dict[str, set[int]] = {}
    weight: float = 1e16

    @computed_field
    def doubled(self) -> frozenset[int]:
        return frozenset(2 * part for part in self.plain)


def test_an_entity_with_sets_has_one_encoding_whatever_their_order() -> None:
    def box(numbers: list[int]) -> bytes:
        one = set(numbers)
        listed, mapped = [one, {3, 1}], {"a": one}
        return EntityType("box", Box, "box_id").encode(
            Box(
                box_id="b",
                plain=one,
                frozen=frozenset(numbers),
                listed=listed,
                mapped=mapped,
                more={"deep": [one]},
            )
        )

    assert list({0, 8}) != list({8, 0}), "the order of a set is that of its making here"
    assert box([0, 8]) == box([8, 0])
    written = json.loads(box([8, 0]))
    assert (written["plain"], written["more"]) == ([0, 8], {"deep": [[0, 8]]})
    assert (written["listed"], written["doubled"]) == ([[0, 8], [1, 3]], [0, 16])


class Computing(BaseModel):
    """A model with a computed field, and an alias for it."""

    n: int = 9

    @computed_field
    def total(self) -> int:
        return 2 * self.n

    @computed_field(alias="fourfold")
    def twice(self) -> int:
        return 4 * self.n


class Closed(Computing):
    model_config = ConfigDict(extra="forbid")


class Keeping(Computing):
    model_config = ConfigDict(extra="allow")


class Aliased(BaseModel):
    n: int = Field(9, alias="theN")


class Named(Aliased):
    model_config = ConfigDict(populate_by_name=True)


class Chosen(BaseModel):
    n: int = Field(9, serialization_alias="theN", validation_alias=AliasChoices("old", "theN"))


class Generated(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")
    n_of_it: int = 9

    @computed_field
    def in_all(self) -> int:
        return 2 * self.n_of_it


class Swapped(BaseModel):
    one: int = Field(1, alias="other")
    other: int = Field(2, alias="one")


class Converting(BaseModel):
    n: int = Field(9, serialization_alias="theN")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        return {"n": given["theN"]} if "theN" in given else given


@pytest.mark.parametrize(
    "part",
    [
        Computing(n=3),
        Closed(n=3),
        Keeping.model_validate({"n": 3, "more": 1}),
        Aliased(theN=3),
        Named(n=3),
        Chosen(theN=3),
        Generated(nOfIt=3),
        Swapped(one=3, other=4),
        Converting(n=3),
    ],
    ids=lambda part: type(part).__name__,
)
def test_an_entity_is_read_as_it_was_written_whatever_its_names(part: BaseModel) -> None:
    kind: Any = type(part)
    columns: dict[str, Any] = {
        "one": (kind, ...),
        "many": (list[kind], []),
        "by": (dict[str, kind], {}),
    }
    nested = create_model("Nested", key=(str, ...), **columns)
    flat = create_model("Flat", __base__=kind, key=(str, "k"))
    for model, made in (
        (nested, nested(key="k", one=part, many=[part, part], by={"a": part})),
        (flat, flat.model_validate(part.model_dump(by_alias=True, exclude_computed_fields=True))),
    ):
        thing = EntityType("thing", model, "key")
        stored = thing.encode(made)
        state = json.loads(stored)
        assert set(thing.field_names) <= state.keys()
        for read in (thing.validate_json(stored), thing.validate(state), thing.accept(state)):
            assert read == made
            assert thing.encode(read) == stored
        assert read_entity(thing, stored) == made


@pytest.mark.parametrize(
    "field",
    [
        Field(0, validation_alias="lvl"),
        Field(0, validation_alias=AliasChoices("lvl", "grade")),
        Field(0, validation_alias=AliasPath("levels", 0)),
        Field(0, serialization_alias="lvl"),
        Field(0, validation_alias="lvl", serialization_alias="Level"),
    ],
)
def test_a_field_that_is_written_under_a_name_that_is_not_read_is_refused(field: Any) -> None:
    inner = create_model("Inner", level=(int, field))
    outer = create_model("Outer", key=(str, "k"), parts=(list[inner], []))
    flat = create_model("Flat", __base__=inner, key=(str, "k"))
    for model, where in ((outer, "Inner"), (flat, "Flat")):
        with pytest.raises(InvalidEntityType, match=rf"{where}\.level is written as") as caught:
            EntityType("thing", model, "key")
        assert "Field(alias=" in str(caught.value.advice)


def test_states_of_earlier_releases_are_read_by_the_names_of_their_fields() -> None:
    nested = create_model("Nested", key=(str, ...), inner=(Aliased, ...))
    state = b'{"key":"k","inner":{"n":3}}'
    thing = EntityType("thing", nested, "key")
    assert thing.validate_json(state) == thing.validate(json.loads(state))
    assert thing.encode(thing.validate_json(state)) == b'{"key":"k","inner":{"theN":3}}'


def test_a_closed_model_refuses_what_is_unknown_and_says_so() -> None:
    thing = EntityType("thing", create_model("Flat", __base__=Closed, key=(str, "k")), "key")
    for state in ({"n": 1, "total": 2, "m": 3}, {"n": "x", "total": 2}):
        with pytest.raises(InvalidChange, match=r"'?[mn]'?:"):
            thing.accept(state)
        with pytest.raises(InvalidChange, match=r"'?[mn]'?:"):
            thing.validate_json(json.dumps(state))


class Open(BaseModel):
    """A model that keeps fields that it does not know."""

    model_config = ConfigDict(extra="allow")
    key: str


class Holder(BaseModel):
    key: str
    inside: Open | None = None


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Open(key="a", more=float("nan")), "more"),
        (Open(key="a", more={"deep": [1, float("inf")]}), "more"),
        (Open(key="a", more=2**63), "more"),
        (Holder(key="a", inside=Open(key="b", more=float("nan"))), "inside"),
    ],
)
def test_numbers_that_json_would_lose_are_refused_in_unknown_fields_too(
    value: BaseModel, field: str
) -> None:
    with pytest.raises(InvalidChange, match="NaN") as refused:
        EntityType("thing", type(value), "key").encode(value)
    assert refused.value.field == field


@dataclass
class Weighed:
    grams: float


def test_numbers_that_json_would_lose_are_refused_in_events_facts_and_commands_too() -> None:
    event = DomainEvent(type="Weighed", data={"grams": [float("nan")]})
    with pytest.raises(InvalidChange, match="NaN"):
        event_text("thing", "a", event, "shop")
    for fact in (Weighed(float("inf")), Open(key="a", more=float("nan"))):
        with pytest.raises(ValueError, match="NaN"):
            model_json(fact)
    assert model_json(Weighed(1.5)) == b'{"grams":1.5}'


class Celsius(RootModel[float]):
    """A number with a name."""


class Code(RootModel[str]):
    """A text with a name."""


class Labels(RootModel[set[str]]):
    """Texts in no order."""


class Places(RootModel[list[Inner]]):
    """Models in a list."""


class Titled(BaseModel):
    code: Code
    heat: Celsius | None = None
    price: RootModel[Annotated[Decimal, Field(max_digits=12, decimal_places=2)]] | None = None
    labels: Labels = Labels(set())
    places: Places = Places([])
    maybe: RootModel[int | None] = RootModel[int | None](None)


def test_a_field_that_is_a_root_model_has_the_column_of_its_root() -> None:
    titled = EntityType("titled", Titled, "code")
    inner = pa.struct([pa.field("name", pa.string(), nullable=False), ("size", pa.int64())])
    assert titled.arrow_schema == pa.schema(
        [
            pa.field("code", pa.string(), nullable=False),
            ("heat", pa.float64()),
            ("price", pa.decimal128(12, 2)),
            ("labels", pa.list_(pa.field("element", pa.string(), nullable=False))),
            ("places", pa.list_(pa.field("element", inner, nullable=False))),
            ("maybe", pa.int64()),
        ]
    )
    given = {"code": "a", "heat": 2.5, "labels": list("dcba"), "places": [{"name": "b"}]}
    state = titled.accept(given)
    assert titled.key_of(state) == titled.key_of(given) == "a"
    written = json.loads(titled.encode(state))
    assert written["labels"] == list("abcd")
    assert (written["heat"], written["places"]) == (2.5, [{"name": "b", "size": None}])
    with pytest.raises(InvalidChange, match="heat: 9007199254740993 is a number that a float"):
        titled.accept({"code": "a", "heat": 9007199254740993})


class Endless(RootModel[list["Endless"]]):
    """A list of lists, without end."""


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [(Endless, "contains itself"), (RootModel[Any], "has no column type")],
)
def test_a_root_model_without_a_column_is_refused(annotation: Any, reason: str) -> None:
    model = create_model("Holder", key=(str, ...), value=(annotation, ...))
    with pytest.raises(InvalidEntityType, match=reason):
        EntityType("holder", model, "key")


def test_an_entity_is_no_root_model() -> None:
    with pytest.raises(InvalidEntityType, match="Code is a RootModel"):
        EntityType("code", Code, "root")


@pytest.mark.parametrize("form", ["seconds", "milliseconds"])
def test_a_model_that_writes_times_as_numbers_is_refused(form: Any) -> None:
    class Timed(BaseModel):
        model_config = ConfigDict(ser_json_temporal=form)
        at: datetime

    class Holder(BaseModel):
        key: str
        times: list[Timed] = []

    for model, key in ((Timed, "at"), (Holder, "key")):
        with pytest.raises(InvalidEntityType, match=f"ser_json_temporal='{form}'"):
            EntityType("timed", model, key)
    Timed.model_config["ser_json_temporal"] = "iso8601"
    EntityType("timed", Timed, "at")
