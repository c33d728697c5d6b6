"""Conditions and orders over an entity's fields, checked against its model.

A condition is written `field=value` with one of `=`, `!=`, `<`, `<=`, `>`, `>=`; nested fields
are joined by dots; the value `null` means no value, and a value in double quotes is a JSON string.
Blanks at the end of a text are part of it. Values are always bound parameters in SQL.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.changes.quoting import unquoted
from everstate.errors import InvalidQuery
from everstate.serving.moments import parse_moment

_CONDITION = re.compile(r"^\s*([\w.]+)\s*(<=|>=|!=|<|>|=)\s*(.*)$", re.DOTALL)
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
    """PostgreSQL type that the field is compared as."""

    def compose(self) -> tuple[sql.Composable, list[Any]]:
        """SQL over the column `state`, and its parameters."""
        operator = compared(self.operator, self.value)
        field, parameters = _field(self.path, self.cast)
        text = sql.SQL("{} {} %s::{}").format(field, operator, sql.SQL(self.cast))
        return text, [*parameters, self.value]


@dataclass(frozen=True, slots=True)
class Order:
    """Order by one field; entities without a value are last."""

    path: tuple[str, ...]
    cast: str
    descending: bool

    def compose(self) -> tuple[sql.Composable, list[Any]]:
        """SQL over the column `state`, and its parameters."""
        direction = sql.SQL("DESC NULLS LAST" if self.descending else "ASC NULLS LAST")
        field, parameters = _field(self.path, self.cast)
        return sql.SQL("{} {}").format(field, direction), parameters


def _field(path: tuple[str, ...], cast: str) -> tuple[sql.Composable, list[Any]]:
    """A field of a state, and the statement's parameters; NULL where its value does not fit."""
    if cast == "text":
        return sql.SQL("(state #>> %s::text[])"), [list(path)]
    text = "(state #>> %s::text[])"
    guarded = sql.SQL(f"CASE WHEN pg_input_is_valid({text}, {{}}) THEN {text}::{{}} END").format(
        sql.Literal(cast), sql.SQL(cast)
    )
    return guarded, [list(path), list(path)]


def parse_condition(text: str) -> tuple[str, str, str]:
    """Field, operator and written value of a condition; raises InvalidQuery."""
    match = _CONDITION.match(text)
    if match is None:
        raise InvalidQuery(
            f"condition {text!r} cannot be read.",
            advice="Write field=value, with one of = != < <= > >=.",
        )
    name, operator, written = match.groups()
    if written == "null" and operator not in ("=", "!="):
        raise InvalidQuery(f"condition {text!r}: null can only be compared by = and !=.")
    return name, operator, written


def read_value(text: str, name: str, cast: str, written: str) -> Any:
    """The value of a condition in the type that its field is compared as; ``None`` for `null`.

    Raises InvalidQuery, naming the condition.
    """
    meant = unquoted(written)
    if meant is None:
        return None
    try:
        if cast in _NUMBERS and ("_" in meant or not meant.isascii()):
            raise ValueError("Write digits.")
        return PARSERS[cast](meant if cast == "text" else meant.strip())
    except (ValueError, ArithmeticError, InvalidQuery) as cause:
        raise InvalidQuery(
            f"condition {text!r}: {name} is {SAID[cast]}, and {written!r} is none.",
            advice=_detail(cause),
        ) from cause


def compared(operator: str, value: Any) -> sql.SQL:
    """SQL of an operator; a comparison with a value can use an index."""
    if value is not None and operator == "=":
        return sql.SQL("=")
    return _OPERATORS[operator]


def parse_predicate(text: str, entity_type: EntityType) -> Predicate:
    """Parse a condition; raises InvalidQuery with the unknown field and the nearest known ones."""
    name, operator, written = parse_condition(text)
    cast = _cast_of(_type_of(name, entity_type))
    return Predicate(tuple(name.split(".")), operator, read_value(text, name, cast, written), cast)


def parse_order(text: str, entity_type: EntityType) -> Order:
    """Parse an order: a field, with `-` before it for the largest first."""
    name = text.removeprefix("-")
    cast = _cast_of(_type_of(name, entity_type))
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


def _cast_of(kind: pa.DataType) -> str:
    """PostgreSQL type that a field is compared as."""
    if pa.types.is_integer(kind):
        return "bigint"
    if pa.types.is_floating(kind):
        return "float8"
    if pa.types.is_decimal(kind):
        return "numeric"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    return "text"


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
    return SAID[_cast_of(kind)]


def _detail(cause: Exception) -> str | None:
    told = isinstance(cause, InvalidQuery) or str(cause).startswith("Write")
    return str(cause) if told else None


_NUMBERS: Final = frozenset({"bigint", "float8", "numeric"})
PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "bigint": int,
    "float8": float,
    "numeric": Decimal,
    "boolean": _boolean,
    "date": date.fromisoformat,
    "timestamp": datetime.fromisoformat,
    "timestamptz": parse_moment,
    "uuid": UUID,
    "text": str,
}
"""PostgreSQL type that a field is compared as → the parser of its values."""
SAID: Final[Mapping[str, str]] = {
    "bigint": "a whole number",
    "float8": "a number",
    "numeric": "a decimal number",
    "boolean": "true or false",
    "date": "a date (2013-02-08)",
    "timestamp": "a local time",
    "timestamptz": "a time with its offset",
    "uuid": "a UUID",
    "text": "text",
}
"""The same types in words, for messages."""
