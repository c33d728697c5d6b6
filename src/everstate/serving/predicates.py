"""Conditions and orders over the fields of an entity type, and over the columns of a view.

A condition is written `field=value` with one of `=`, `!=`, `<`, `<=`, `>`, `>=`; nested fields
are joined by dots; the value `null` means no value, and a value in double quotes is a JSON string.
Blanks at the end of a text are part of it; a text that begins with one is written in quotes. Whole
numbers may have any size, also where the field has 64 bits. Values are bound parameters in SQL.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from everstate.changes import EntityType
from everstate.changes.arrow import arrow_type
from everstate.changes.fields import FieldTree, FieldType, tree_of
from everstate.changes.quoting import unquoted
from everstate.changes.written import FORMS, written_value
from everstate.errors import InvalidQuery
from everstate.views.stores.postgres.tables import typed_field

_CONDITION = re.compile(r"^\s*([\w.]+)\s*(<=|>=|!=|<|>|=)(\s*)(.*)$", re.DOTALL)
_OPERATORS = {
    "=": "IS NOT DISTINCT FROM",
    "!=": "IS DISTINCT FROM",
    **{operator: operator for operator in ("<", "<=", ">", ">=")},
}
_JSON: Final = pa.struct([])
"""Type of a field that is read as JSON."""


@dataclass(frozen=True, slots=True)
class Term:
    """What is compared: a field of a state, or a column of a view; in an order, nulls are last."""

    name: str
    text: str
    """SQL of its value."""
    cast: str
    """The type in SQL that it is compared as."""
    type: str | None = None
    """The type in SQL that it has, as far as it is known."""
    read_as: str = "text"
    """The type as which a condition's text is read, see :func:`written_value`."""
    is_nullable: bool = True
    is_descending: bool = False

    @property
    def compared(self) -> str:
        """SQL of its value in that type; an index on a value of the type can serve it."""
        if self.type == self.cast:
            # The cast of a number with a scale would keep an index from serving an order.
            return self.text
        return f"{self.text}::{self.cast}"

    @property
    def order(self) -> str:
        """The term in an ORDER BY; an index in the same order can serve it."""
        nulls = " NULLS LAST" if self.is_nullable else ""
        return f"{self.compared} {'DESC' if self.is_descending else 'ASC'}{nulls}"

    def after(self, value: Any) -> tuple[str, list[Any]]:
        """Condition of rows whose value comes after one."""
        if value is None:
            return "false", []
        text = f"{self.compared} {'<' if self.is_descending else '>'} %s::{self.cast}"
        if self.is_nullable:
            text = f"({text} OR {self.compared} IS NULL)"
        return text, [value]

    def same(self, value: Any) -> tuple[str, list[Any]]:
        """Condition of rows with the same value."""
        if value is None:
            return f"{self.compared} IS NULL", []
        return f"{self.compared} = %s::{self.cast}", [value]


FindTerm = Callable[[str], Term]
"""Finds a field or a column by its name; raises InvalidQuery, with the nearest known names."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a field or column, and its value."""

    term: Term
    operator: str
    value: Any

    def compose(self) -> tuple[str, list[Any]]:
        """SQL, and its parameters; a comparison with a value can use an index."""
        is_plain = self.operator == "=" and self.value is not None
        operator = "=" if is_plain else _OPERATORS[self.operator]
        return f"{self.term.compared} {operator} %s::{self.term.cast}", [self.value]


def _field(path: Sequence[Sequence[str]], tree: FieldTree, cast: str) -> str:
    """A field of a state; NULL where its value does not fit.

    Numbers have all the digits that were written: a typed column may hold fewer.
    """
    if cast != "numeric":
        return typed_field(path, arrow_type(tree))
    place, text = (typed_field(path, each) for each in (_JSON, pa.string()))
    whens = f"WHEN jsonb_typeof({place}) = 'number' THEN {text}::numeric"
    if tree.type == "decimal":
        # Of AND, PostgreSQL may look at any side first, so each is safe for every text.
        whens += (
            f" WHEN jsonb_typeof({place}) = 'string' AND {text} ~ '{_NUMBER}' "
            f"AND pg_input_is_valid({text}, 'numeric') THEN {text}::numeric"
        )
    return f"CASE {whens} END"


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
        return written_value(cast, meant if cast == "text" else meant.strip())
    except (ValueError, InvalidQuery) as cause:
        raise InvalidQuery(
            f"condition {text!r}: {name} is {FORMS[cast][0]}, and {written!r} is none.",
            advice=str(cause),
        ) from cause


def condition(text: str, find: FindTerm) -> Condition:
    """Parse a condition; raises InvalidQuery."""
    name, operator, written = parse_condition(text)
    term = find(name)
    value = read_value(text, name, term.read_as, written)
    if term.cast == "bigint" and value is not None and value.bit_length() > _BITS:
        term = replace(term, cast="numeric")
    return Condition(term, operator, value)


def order_term(text: str, find: FindTerm) -> Term:
    """Parse a part of an order: a name, with `-` before it for the largest first."""
    return replace(find(text.removeprefix("-")), is_descending=text.startswith("-"))


def hint_of(name: str, known: Collection[str]) -> str:
    """An advice for a name that is not known."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."


def field_of(entity_type: EntityType, name: str) -> Term:
    """A field of an entity type by its dotted name; raises InvalidQuery with a suggestion."""
    tree, walked = tree_of(entity_type.model), ""
    for part in name.split("."):
        fields = {each.written: each.tree for each in tree.columns}
        if part not in fields:
            hint = hint_of(part, fields) if fields else f"{walked} has no fields."
            raise InvalidQuery(f"{entity_type.name} has no field {name!r}.", advice=hint)
        tree, walked = fields[part], f"{walked}.{part}".removeprefix(".")
    read_as = _READ_AS.get(tree.type)
    if read_as is None:
        what = "an object" if tree.type == "struct" else "a list or map"
        raise InvalidQuery(f"{entity_type.name}: {name} holds {what}; compare one of its fields.")
    if not tree.is_zoned:
        read_as = "timestamp"
    cast = "numeric" if read_as == "whole" else read_as
    text = _field(entity_type.names_to(name.split(".")), tree, cast)
    return Term(name, text, cast, read_as=read_as)


_READ_AS: Final[Mapping[FieldType | None, str]] = {
    "integer": "whole",
    "float": "numeric",
    "decimal": "numeric",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamptz",
    "text": "text",
}
"""How the text of a condition on a field is read, see :func:`written_value`."""
_BITS: Final = 63
"""A column of whole numbers has so many; a larger value is compared as a numeric."""
_NUMBER: Final = "^[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$"
