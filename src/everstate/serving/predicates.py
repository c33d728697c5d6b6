"""Conditions and orders over an entity's fields, checked against its model.

A condition is written `field=value` with one of `=`, `!=`, `<`, `<=`, `>`, `>=`; nested fields
are joined by dots; the value `null` is no value. SQL is built of bound parameters only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.errors import InvalidQuery
from everstate.serving.moments import parse_moment

_CONDITION = re.compile(r"^\s*([\w.]+)\s*(<=|>=|!=|<|>|=)\s*(.*?)\s*$", re.DOTALL)
_OPERATORS = {
    "=": sql.SQL("IS NOT DISTINCT FROM"),
    "!=": sql.SQL("IS DISTINCT FROM"),
    "<": sql.SQL("<"),
    "<=": sql.SQL("<="),
    ">": sql.SQL(">"),
    ">=": sql.SQL(">="),
}


@dataclass(frozen=True, slots=True)
class Predicate:
    """One condition: ``path`` of the field, operator, and the value in the field's own type."""

    path: tuple[str, ...]
    operator: str
    value: Any
    cast: str
    """PostgreSQL type the field is compared as."""

    def compose(self) -> tuple[sql.Composable, list[Any]]:
        """SQL over the column `state`, and its parameters."""
        if self.value is not None and self.operator == "=":
            operator = sql.SQL("=")
        else:
            operator = _OPERATORS[self.operator]
        text = sql.SQL("{} {} %s::{}").format(_field(self.cast), operator, sql.SQL(self.cast))
        return text, [list(self.path), self.value]


@dataclass(frozen=True, slots=True)
class Order:
    """Order by one field; entities without a value come last."""

    path: tuple[str, ...]
    cast: str
    descending: bool

    def compose(self) -> tuple[sql.Composable, list[Any]]:
        """SQL over the column `state`, and its parameters."""
        direction = sql.SQL("DESC NULLS LAST" if self.descending else "ASC NULLS LAST")
        return sql.SQL("{} {}").format(_field(self.cast), direction), [list(self.path)]


def _field(cast: str) -> sql.Composable:
    return sql.SQL("(state #>> %s::text[])::{}").format(sql.SQL(cast))


def parse_predicate(text: str, entity_type: EntityType) -> Predicate:
    """Read a condition; raises InvalidQuery naming the field, with the nearest that there is."""
    match = _CONDITION.match(text)
    if match is None:
        raise InvalidQuery(
            f"condition {text!r} cannot be read.",
            advice="Write field=value, with one of = != < <= > >=.",
        )
    name, operator, written = match.groups()
    kind = _type_of(name, entity_type)
    cast, read = _readers(kind)
    if written == "null":
        if operator not in ("=", "!="):
            raise InvalidQuery(f"condition {text!r}: null can only be compared by = and !=.")
        return Predicate(tuple(name.split(".")), operator, None, cast)
    try:
        value = read(written)
    except (ValueError, ArithmeticError, InvalidQuery) as cause:
        raise InvalidQuery(
            f"condition {text!r}: {name} is {_said(kind)}, and {written!r} is none.",
            advice=_detail(cause),
        ) from cause
    return Predicate(tuple(name.split(".")), operator, value, cast)


def parse_order(text: str, entity_type: EntityType) -> Order:
    """Read an order: a field, with `-` before it for the largest first."""
    name = text.removeprefix("-")
    cast, _ = _readers(_type_of(name, entity_type))
    return Order(tuple(name.split(".")), cast, text.startswith("-"))


def _type_of(name: str, entity_type: EntityType) -> pa.DataType:
    """Type of a field by its dotted name; raises InvalidQuery with a suggestion."""
    kind: pa.DataType = pa.struct(list(entity_type.arrow_schema))
    walked = ""
    for part in name.split("."):
        fields: dict[str, pa.DataType] = (
            {field.name: field.type for field in kind} if isinstance(kind, pa.StructType) else {}
        )
        if part not in fields:
            near = difflib.get_close_matches(part, fields, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(fields)}."
            if not fields:
                hint = f"{walked} has no fields."
            raise InvalidQuery(f"{entity_type.name} has no field {name!r}.", advice=hint)
        kind = fields[part]
        walked = f"{walked}.{part}".removeprefix(".")
    if pa.types.is_nested(kind):
        raise InvalidQuery(
            f"{entity_type.name}: {name} holds {_said(kind)}; compare one of its fields."
        )
    return kind


def _readers(kind: pa.DataType) -> tuple[str, Callable[[str], Any]]:
    """PostgreSQL type of a field, and the reader of its written values."""
    if pa.types.is_integer(kind):
        return "bigint", int
    if pa.types.is_floating(kind):
        return "float8", float
    if pa.types.is_decimal(kind):
        return "numeric", Decimal
    if pa.types.is_boolean(kind):
        return "boolean", _boolean
    if pa.types.is_date(kind):
        return "date", date.fromisoformat
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            return "timestamp", datetime.fromisoformat
        return "timestamptz", parse_moment
    return "text", str


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("Write true or false.")
    return text.lower() == "true"


def _said(kind: pa.DataType) -> str:
    """A type in words for messages."""
    if pa.types.is_struct(kind):
        return "an object"
    if pa.types.is_nested(kind):
        return "a list or map"
    names = {
        "bigint": "a whole number",
        "float8": "a number",
        "numeric": "a decimal number",
        "boolean": "true or false",
        "date": "a date (2013-02-08)",
        "timestamp": "a local time",
        "timestamptz": "a time with its offset",
        "text": "text",
    }
    return names[_readers(kind)[0]]


def _detail(cause: Exception) -> str | None:
    told = isinstance(cause, InvalidQuery) or str(cause).startswith("Write")
    return str(cause) if told else None
