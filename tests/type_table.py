"""The table of types: what becomes of each type's boundary and special values, in every way.

The tests run it (`test_type_table`, `test_types_through_the_log`, `test_cdc_types_captured`), and
`docs/generate.py` writes `docs/reference/types.md` from it. A value is equal at the other end, or
it is refused with a reason; no third outcome can be written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime, create_model

from everstate.changes import EntityType

WAYS_IN: Final = ("put", "REST", "JSON lines", "CSV", "command", "SQL emit", "flat form")
"""`put` and the other calls in Python; a flat form is a row of Maxwell, Canal, GoldenGate or DMS.
"""
WAYS_OUT: Final = (
    "log", "lake", "get", "history", "REST", "typed view", "SQL view", "proof",
)  # fmt: skip

BEYOND = "NaN, infinity and integers beyond 64 bits are refused"
NO_FLOAT = "is a number that a float cannot hold exactly"
FINE = "has parts of a microsecond"
YEARS = "the time is not of the years 1 to 9999 in UTC"
NUL = "NUL characters are refused"
NO_NUMBER = "is a number and no "
TYPE = "the model, or the column, takes no such value; the reason says what it takes"
"""Stands for a reason of the model's own, which says what the type expects."""


@dataclass(frozen=True)
class Given:
    """A value as JSON, and what becomes of it."""

    text: str
    refused: str | None = None
    """The reason, or a part of it; ``None``: it arrives equal."""
    ways: Mapping[str, str | None] = field(default_factory=dict)
    """Ways in that differ: the reason there, or ``None`` where it arrives equal."""

    @property
    def state(self) -> str:
        """A state with this value, as JSON."""
        return f'{{"id": "a", "v": {self.text}}}'

    def reason(self, way: str) -> str | None:
        """Why it is refused in this way; ``None``: it is not."""
        return self.ways.get(way, self.refused)


@dataclass(frozen=True)
class FieldType:
    """A type of a model's field."""

    name: str
    annotation: Any
    given: tuple[Given, ...]


class Colour(Enum):
    """A field of a fixed set."""

    red = "RED"


class Line(BaseModel):
    """A nested model."""

    price: Annotated[Decimal, Field(max_digits=38, decimal_places=10)]


DIGITS: Final = "12345678901234567890.1234567890"


def _equal(*texts: str) -> tuple[Given, ...]:
    return tuple(Given(text) for text in texts)


def _refused(reason: str, *texts: str, **ways: str | None) -> tuple[Given, ...]:
    named = {name.replace("_", " "): why for name, why in ways.items()}
    return tuple(Given(text, reason, named) for text in texts)


UNITS: Final[dict[str, str | None]] = {"flat form": None}
"""A flat form has days and times as numbers, whose unit is declared: they arrive equal."""

FIELD_TYPES: Final = (
    FieldType("bool", bool, (*_equal("true", "false"), *_refused(TYPE, "2", '"maybe"'))),
    FieldType(
        "int", int,
        (
            *_equal("0", str(2**63 - 1), str(-(2**63))),
            *_refused(BEYOND, str(2**63), SQL_emit=TYPE),
            *_refused(TYPE, "1.5", '"x"', "NaN"),
            *_refused("is no number", '"1_000"', SQL_emit=TYPE),
            *_refused("is no number", "true", CSV=TYPE, SQL_emit=TYPE, flat_form=None),
            Given("9007199254740993.0", None, {"REST": TYPE, "SQL emit": TYPE}),
        ),
    ),
    FieldType(
        "float", float,
        (
            *_equal("0.1", "0.30000000000000004", "5e-324", "1.7976931348623157e308", "-0.0"),
            *_equal("9007199254740992"),
            *_refused(NO_FLOAT, "9007199254740993", DIGITS, "1E-400", SQL_emit=TYPE),
            *_refused(BEYOND, "1e400", SQL_emit=TYPE),
            *_refused(TYPE, "NaN"),
        ),
    ),
    FieldType(
        "Decimal", Annotated[Decimal, Field(max_digits=38, decimal_places=10)],
        (
            *_equal(DIGITS, f'"{DIGITS}"', "0.0000000001", "-0.5", "9007199254740993"),
            *_equal('"1E-7"', '"1E+3"', '"0E-10"'),
            *_refused(TYPE, "0.00000000001", "1" + "0" * 28, '"NaN"', '"Infinity"'),
        ),
    ),
    FieldType(
        "str", str,
        (
            *_equal('""', '"null"', '" a "', '"é😀"', r'"\u2028\u007f\r\n"', '"0001"'),
            *_refused(NUL, r'"\u0000"', SQL_emit=TYPE),
            *_refused(TYPE, r'"\ud800"'),
        ),
    ),
    FieldType(
        "date", date,
        (
            *_equal('"0001-01-01"', '"1500-02-28"', '"2024-02-29"', '"9999-12-31"'),
            *_refused(TYPE, '"0000-00-00"', '"2023-02-29"', '"-0044-03-15"', '"10000-01-01"'),
            *_refused(TYPE, '"infinity"', '"2026-01-02T03:04:05"'),
            *_refused("the field is a day", '"2026-01-02T00:00:00+05:00"', SQL_emit=TYPE),
            Given("0", NO_NUMBER + "date", {**UNITS, "SQL emit": TYPE}),
        ),
    ),
    FieldType(
        "AwareDatetime", AwareDatetime,
        (
            *_equal('"0001-01-01T00:00:00Z"', '"9999-12-31T23:59:59.999999Z"'),
            *_equal('"1969-12-31T23:59:59.999999Z"', '"2026-01-02T03:04:05+05:30"'),
            *_refused(YEARS, '"0001-01-01T00:00:00+12:00"', SQL_emit=TYPE),
            *_refused(FINE, '"2026-01-02T03:04:05.1234567Z"', SQL_emit=TYPE),
            *_refused(TYPE, '"2026-01-02T23:59:60Z"', '"2026-01-02T24:00:00Z"', '"infinity"'),
            Given('"2026-01-02T03:04:05"', TYPE, {"SQL emit": None}),
            Given("0", NO_NUMBER + "time", {**UNITS, "SQL emit": TYPE}),
        ),
    ),
    FieldType(
        "NaiveDatetime", NaiveDatetime,
        (
            *_equal('"0001-01-01T00:00:00"', '"9999-12-31T23:59:59.999999"'),
            *_equal('"2026-03-29T02:30:00"'),
            *_refused(TYPE, '"2026-01-02T03:04:05Z"'),
            *_refused(FINE, '"2026-01-02T03:04:05.1234567"', SQL_emit=TYPE),
        ),
    ),
    FieldType(
        "datetime", datetime,
        (
            *_equal('"2026-01-02T03:04:05Z"', '"2026-01-02T03:04:05.000001+05:30"'),
            *_equal('"2026-01-02T03:04:05"'),
            *_refused(FINE, '"2026-01-02T03:04:05.0000001"', SQL_emit=TYPE),
        ),
    ),
    FieldType(
        "UUID", UUID,
        (*_equal('"123e4567-e89b-12d3-a456-426655440000"'), Given('"x"', TYPE, {"SQL emit": None})),
    ),
    FieldType("Enum", Colour, (*_equal('"RED"'), Given('"red"', TYPE, {"SQL emit": None}))),
    FieldType(
        "Literal", Literal["a", "b"], (*_equal('"a"'), Given('"c"', TYPE, {"SQL emit": None})),
    ),
    FieldType("int | None", int | None, (Given("null", None, {"CSV": TYPE}), *_equal("7"))),
    FieldType(
        "list[…]", list[Annotated[Decimal, Field(max_digits=38, decimal_places=10)]],
        (*_equal(f'["{DIGITS}", 0.1]', "[]"), *_refused(TYPE, '["x"]', "[true, {}]")),
    ),
    FieldType(
        "dict[str, …]", dict[str, int],
        (
            *_equal(f'{{"a": {2**63 - 1}, "": -1}}', "{}"),
            *_refused(BEYOND, f'{{"a": {2**63}}}', SQL_emit=TYPE),
        ),
    ),
    FieldType("set[str]", set[str], _equal('["a", "b"]')),
    FieldType(
        "a model", Line,
        (
            *_equal(f'{{"price": {DIGITS}}}'),
        ),
    ),
)  # fmt: skip


def entity_of(kind: FieldType) -> EntityType:
    """An entity type with a key and a field ``v`` of this type."""
    model = create_model("Value", id=(str, ...), v=(kind.annotation, ...))
    return EntityType("value", model, "id")


def same_value(kind: FieldType, text: str, state: bytes, name: str = "v") -> bool:
    """Whether a field of a state has the value that was given, read by other code than ours."""
    given = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    found = json.loads(state, parse_float=Decimal, parse_int=Decimal)[name]
    is_same: bool = _meaning(given, kind.name) == _meaning(found, kind.name)
    return is_same


def _meaning(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _meaning(part, name) for key, part in value.items()}
    if isinstance(value, list):
        return [_meaning(part, name) for part in value]
    if isinstance(value, str) and name in ("Decimal", "list[…]", "a model"):
        return Decimal(value)
    if name.endswith("atetime"):
        # A flat form has times as microseconds since 1970.
        at = _EPOCH if value == 0 else datetime.fromisoformat(value)
        return at if name != "AwareDatetime" or at.tzinfo else at.replace(tzinfo=UTC)
    if name == "date":
        return date(1970, 1, 1) if value == 0 else date.fromisoformat(value)
    return value


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def lake_value(value: Any) -> Any:
    """A value as Arrow takes it: what JSON has as text or as an object."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, UUID):
        return str(value)
    if hasattr(value, "value"):
        return value.value
    return sorted(value) if isinstance(value, set) else value


def arrow_value(value: Any, kind: pa.DataType) -> Any:
    """The same as Arrow gives it back: times in UTC, mappings as pairs."""
    if pa.types.is_map(kind):
        return list(value.items())
    if isinstance(value, datetime) and pa.types.is_timestamp(kind) and kind.tz is not None:
        return value.replace(tzinfo=value.tzinfo or UTC).astimezone(UTC)
    assert not isinstance(value, datetime) or kind == pa.timestamp("us")
    assert not isinstance(value, date) or isinstance(value, datetime) or kind == pa.date32()
    return value
