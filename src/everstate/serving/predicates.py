"""Conditions and orders over an entity's fields, checked against its model.

A condition is written `field=value` with one of `=`, `!=`, `<`, `<=`, `>`, `>=`; nested fields
are joined by dots; the value `null` means no value, and a value in double quotes is a JSON string.
Blanks at the end of a text are part of it; a text that begins with one is written in quotes. Whole
numbers may have any size, also where the field has 64 bits. Values are bound parameters in SQL.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.changes.quoting import unquoted
from everstate.changes.written import written_value
from everstate.errors import InvalidQuery
from everstate.serving.moments import parse_moment
from everstate.views.stores.postgres.tables import typed_field

_CONDITION = re.compile(r"^\s*([\w.]+)\s*(<=|>=|!=|<|>|=)(\s*)(.*)$", re.DOTALL)
_OPERATORS = {
    "=": sql.SQL("IS NOT DISTINCT FROM"),
    "!=": sql.SQL("IS DISTINCT FROM"),
    "<": sql.SQL("<"),
    "<=": sql.SQL("<="),
    ">": sql.SQL(">"),
    ">=": sql.SQL(">="),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a field of a state, or on a column of a view, and its value."""

    name: str
    """Of the field or column."""
    compared: sql.Composable
    cast: str
    """The type in which both sides are compared."""
    operator: str
    value: Any

    def compose(self) -> tuple[sql.Composable, list[Any]]:
        """SQL, and its parameters; a comparison with a value can use an index."""
        is_plain = self.operator == "=" and self.value is not None
        operator = sql.SQL("=") if is_plain else _OPERATORS[self.operator]
        text = sql.SQL("{} {} %s::{}").format(self.compared, operator, sql.SQL(self.cast))
        return text, [self.value]


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a total order: SQL of a value, the type that it is compared as; nulls are last."""

    text: sql.Composable
    cast: str
    is_descending: bool = False
    is_nullable: bool = True
    name: str = ""
    """Of the field of an entity."""

    @property
    def order(self) -> sql.Composable:
        """The term in an ORDER BY; an index in the same order can serve it."""
        if not self.is_nullable:
            return sql.SQL("{} {}").format(
                self.text, sql.SQL("DESC" if self.is_descending else "ASC")
            )
        way = sql.SQL("DESC NULLS LAST" if self.is_descending else "ASC NULLS LAST")
        return sql.SQL("{} {}").format(self.text, way)

    def after(self, value: Any) -> tuple[sql.Composable, list[Any]]:
        """Condition of rows whose value comes after one."""
        if value is None:
            return sql.SQL("false"), []
        way = sql.SQL("<" if self.is_descending else ">")
        text = sql.SQL("{} {} %s::{}").format(self.text, way, sql.SQL(self.cast))
        if self.is_nullable:
            text = sql.SQL("({} OR {} IS NULL)").format(text, self.text)
        return text, [value]

    def same(self, value: Any) -> tuple[sql.Composable, list[Any]]:
        """Condition of rows with the same value."""
        if value is None:
            return sql.SQL("{} IS NULL").format(self.text), []
        return sql.SQL("{} = %s::{}").format(self.text, sql.SQL(self.cast)), [value]


def _field(name: str, kind: pa.DataType) -> sql.Composable:
    """A field of a state; NULL where its value does not fit.

    Numbers have all the digits that were written: a typed column may hold fewer.
    """
    path = name.split(".")
    if _compared_as(kind) != "numeric":
        return typed_field(path, kind)
    place, text = (
        sql.SQL("(state {} {})").format(sql.SQL(how), sql.Literal(path)) for how in ("#>", "#>>")
    )
    whens = sql.SQL("WHEN jsonb_typeof({0}) = 'number' THEN {1}::numeric").format(place, text)
    if pa.types.is_decimal(kind):
        # Of AND, PostgreSQL may look at any side first, so each is safe for every text.
        whens = sql.SQL(
            "{0} WHEN jsonb_typeof({1}) = 'string' AND {2} ~ {3} "
            "AND pg_input_is_valid({2}, 'numeric') THEN {2}::numeric"
        ).format(whens, place, text, sql.Literal(_NUMBER))
    return sql.SQL("CASE {} END").format(whens)


def parse_condition(text: str) -> tuple[str, str, str]:
    """Field, operator and written value of a condition; raises InvalidQuery.

    Blanks before a value without quotes are part of the written value.
    """
    match = _CONDITION.match(text)
    if match is None:
        raise InvalidQuery(
            f"condition {text!r} cannot be read.",
            advice="Write field=value, with one of = != < <= > >=.",
        )
    name, operator, blanks, written = match.groups()
    if unquoted(written) == written:
        written = blanks + written
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
    if cast == "text" and meant == written and meant[:1].isspace():
        raise InvalidQuery(
            f"condition {text!r}: the value begins with a blank.",
            advice=f"Write {name}={meant.strip()}, or {name}={json.dumps(meant)} with the blank.",
        )
    try:
        return exact_value(cast, meant if cast == "text" else meant.strip())
    except (ValueError, InvalidQuery) as cause:
        raise InvalidQuery(
            f"condition {text!r}: {name} is {SAID[cast]}, and {written!r} is none.",
            advice=str(cause),
        ) from cause


def exact_value(cast: str, text: str) -> Any:
    """The value of a text in the type that it is compared as; blanks are part of the text.

    For conditions, keys of rows and cursors. Raises ValueError or InvalidQuery, which say what can
    be written.
    """
    if cast != "timestamptz":
        return written_value(cast, text)
    if text != text.strip():
        raise ValueError("Write no blanks around a time.")
    return parse_moment(text)


def parse_predicate(text: str, entity_type: EntityType) -> Condition:
    """Parse a condition; raises InvalidQuery with the unknown field and the nearest known ones."""
    name, operator, written = parse_condition(text)
    kind = _type_of(name, entity_type)
    value, cast = read_value(text, name, _cast_of(kind), written), _compared_as(kind)
    return Condition(name, _field(name, kind), cast, operator, value)


def parse_order(text: str, entity_type: EntityType) -> Term:
    """Parse an order: a field, with `-` before it for the largest first."""
    name = text.removeprefix("-")
    kind = _type_of(name, entity_type)
    return Term(_field(name, kind), _compared_as(kind), text.startswith("-"), name=name)


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
    """How a field is compared; see :func:`exact_value`."""
    if pa.types.is_integer(kind):
        return "whole"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numeric"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    return "text"


def _compared_as(kind: pa.DataType) -> str:
    """The type in SQL as which a field is compared: numbers with all their digits."""
    cast = _cast_of(kind)
    return "numeric" if cast == "whole" else cast


def _said(kind: pa.DataType) -> str:
    """A type in words for messages."""
    if pa.types.is_struct(kind):
        return "an object"
    if pa.types.is_nested(kind):
        return "a list or map"
    return SAID[_cast_of(kind)]


_NUMBER: Final = "^[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$"
SAID: Final[Mapping[str, str]] = {
    "whole": "a whole number",
    "bigint": "a whole number",
    "float8": "a float",
    "numeric": "a decimal number",
    "boolean": "true or false",
    "date": "a date (2013-02-08)",
    "timestamp": "a local time",
    "timestamptz": "a time with its offset",
    "uuid": "a UUID",
    "text": "text",
}
"""The types that values are compared as in words, for messages."""
