"""Tables behind views, and the queries by which readers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

import pyarrow as pa

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.postgres import identifier, literal
from everstate.views.kinds import LatestPlan, ViewPlan
from everstate.views.kinds.kind import EXACT, By, Index, TableColumn, group_hash, identifiers
from everstate.views.stores.postgres.types import postgres_type
from everstate.views.tables import physical

_NO_OFFSET: Final = "^[0-9-]+([T ][0-9:.]*)?$"

# PostgreSQL also takes words such as 'now' and 'NaN', numbers such as 0x1F, and years BC.
_NUMBER: Final = "^[-+]?[0-9]*[.]?[0-9]*([eE][-+]?[0-9]+)?$"
_DATE: Final = "^[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}$"
_TIME: Final = "^[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([T ][^BbJj]*)?$"
_FINER: Final = "[.][0-9]{6}[0-9]*[1-9]"
"""Parts of a microsecond, which PostgreSQL rounds."""
_JSON_TYPES: Final = {"boolean": "boolean", "bigint": "number", "double precision": "number"}
"""PostgreSQL's types that only one type of JSON has values of."""

_SEARCHED_CHARS: Final = 120_000
"""How many characters of a row's texts are searched, over all of its columns."""
_WEIGHTS: Final = "ABCD"

_OWN: Final = {
    "key": 'text COLLATE "C" NOT NULL',
    "version": "bigint NOT NULL",
    "change_id": "uuid NOT NULL",
    "kind": "text NOT NULL",
    "as_of": "timestamptz NOT NULL",
    "occurred_at": "timestamptz NOT NULL",
    "recorded_at": "timestamptz NOT NULL",
    "schema_version": "int NOT NULL",
    "generation": "int NOT NULL",
    "partition": "int NOT NULL",
    "offset": "bigint NOT NULL",
    # As text: only readers parse it, and text is written in a quarter of the time.
    "provenance": "text NOT NULL",
    "transaction": "jsonb",
    "event": "jsonb",
    "state": "jsonb",
    "shard": "int NOT NULL",
    "activity": "timestamptz NOT NULL",
    "present": "boolean NOT NULL",
}
"""Columns that are the same in every view's table."""


class Readers:
    """Names of views and fields of states; see :class:`everstate.views.kinds.kind.Names`."""

    def __init__(self, schema_name: str, version: int) -> None:
        self._schema, self._version = schema_name, version

    def table(self, name: str) -> str:
        """A version's own table."""
        return self.view(physical(name, self._version))

    def view(self, name: str) -> str:
        """The relation that readers see under a name."""
        return identifier(self._schema, name)

    def field(self, path: Sequence[Sequence[str]], kind: pa.DataType) -> str:
        """A typed field of a state."""
        return typed_field(path, kind)


def table_statements(
    schema_name: str, plan: ViewPlan, version: int, types: Mapping[str, pa.DataType]
) -> list[str]:
    """Statements that create the table of a version with its indexes; idempotent.

    ``types``: Spark's type of each field of the plan's columns. Raises InvalidView when a type
    cannot be stored, or a sum would be over floats (C16).
    """
    layout, name = plan.layout(types), physical(plan.name, version)
    table = identifier(schema_name, name)
    columns = ", ".join(_column(plan, column) for column in layout.columns)
    # Rows that are updated often get free room in their page, for updates in the same page.
    filled = " WITH (fillfactor = 50)" if layout.is_rewritten else ""
    may_be_null = {c.name for c in layout.columns if c.type is not None and not c.required}
    has_nulls = not may_be_null.isdisjoint(layout.key)
    key = "UNIQUE NULLS NOT DISTINCT" if has_nulls else "PRIMARY KEY"
    key += f" ({identifiers(layout.key)})"
    key += f" INCLUDE ({identifiers(layout.beside_key)})" if layout.beside_key else ""
    statements = [f"CREATE TABLE IF NOT EXISTS {table} ({columns}, {key}){filled}"]
    for index in layout.indexes:
        how = "gin" if index.of_words else "btree"
        where = f" WHERE {index.where}" if index.where else ""
        statements.append(
            f"CREATE INDEX IF NOT EXISTS {identifier(f'{name}_{index.name}')} ON {table} "
            f"USING {how} ({_indexed(index)}){where}"
        )
    return statements


def latest_readers(
    schema_name: str, entity_type: EntityType, shown: Sequence[str] = ()
) -> dict[str, str]:
    """Readers' queries over `latest`: live entities in typed columns, and `latest` itself.

    ``shown``: columns that readers see now. They keep their order, and others come after them, so
    that a name can be replaced without dropping it.
    """
    plan = LatestPlan.of(entity_type.name)
    columns = {
        column.name: typed_field(entity_type.names_to([column.name]), column.type)
        for column in entity_type.arrow_schema
    }
    columns |= {f"_{n}": identifier(n) for n in ("key", "version", "as_of", "recorded_at")}
    names = [name for name in shown if name in columns]
    names += [name for name in columns if name not in names]
    typed = ", ".join(f"{columns[name]} AS {identifier(name)}" for name in names)
    table = identifier(schema_name, physical(plan.name))
    return {
        entity_type.name: f"SELECT {typed} FROM {table} WHERE state IS NOT NULL",
        plan.name: plan.read(Readers(schema_name, 1)),
    }


def _column(plan: ViewPlan, column: TableColumn) -> str:
    if column.words:
        return _words(column)
    name = identifier(column.name)
    if column.type is None:
        return f"{name} {_OWN[column.name]}"
    kind = "numeric" if column.type == EXACT else postgres_type(column.type)
    if kind is None:
        raise InvalidView(
            plan.name,
            f"{column.shown or column.name} is {column.type}, for which PostgreSQL has no type.",
            advice="CAST it to a text, a number or a time.",
        )
    collated = ' COLLATE "C"' if kind == "text" else ""
    return f"{name} {kind}{collated}{' NOT NULL' if column.required else ''}"


def _words(column: TableColumn) -> str:
    """A column with the words of other columns; those of earlier columns weigh more.

    The texts are truncated, because PostgreSQL refuses a row with more than a megabyte of words.
    """
    chars = _SEARCHED_CHARS // len(column.words)
    parts = [
        f"setweight(to_tsvector({literal(column.language)}::regconfig, "
        f"left(coalesce({identifier(name)}, ''), {chars})), "
        f"{literal(_WEIGHTS[min(place, len(_WEIGHTS) - 1)])})"
        for place, name in enumerate(column.words)
    ]
    return f"{identifier(column.name)} tsvector GENERATED ALWAYS AS ({' || '.join(parts)}) STORED"


def typed_field(path: Sequence[Sequence[str]], kind: pa.DataType) -> str:
    """A typed field extracted from the column `state`; NULL where its value is not of the type.

    ``path``: the names of each field on the way to it, today's first. A field with different values
    under its names is NULL too. Objects and lists are JSON as it was written.
    """
    cast = postgres_type(kind)
    names = [each[0] for each in path]
    place = f"(state #> {literal(names)})"
    text = f"(state ->> {literal(names[0])})" if len(path) == 1 else f"(state #>> {literal(names)})"
    if any(len(each) > 1 for each in path):
        place = reduce(_named, path, "state")
        text = f"({place} #>> '{{}}')"
    if cast == "jsonb":
        return place
    if cast in (None, "text"):
        return text
    value = f"{text}::{cast}"
    if cast == "timestamptz":
        # A time without an offset is in UTC, as Spark reads it, whatever the reader's zone is.
        value = (
            f"CASE WHEN {text} ~ {literal(_NO_OFFSET)} "
            f"THEN {text}::timestamp AT TIME ZONE 'UTC' ELSE {text}::timestamptz END"
        )
    # A model's type may be narrower than what was written: a cast would fail for every reader, or
    # round the value.
    fits = f"pg_input_is_valid({text}, {literal(cast)})"
    if (of_json := _JSON_TYPES.get(cast)) is not None:
        fits = f"jsonb_typeof({place}) = {literal(of_json)} AND {fits}"
    if (exact := _exact(text, cast)) is not None:
        # Of AND, PostgreSQL may look at any side first.
        value = f"CASE WHEN {exact} THEN {value} END"
    guarded = f"CASE WHEN {fits} THEN {value} END"
    # A CASE loses the digits of a numeric, and a view's column cannot change its type.
    return f"({guarded})::{cast}" if "(" in cast else guarded


def _named(place: str, names: Sequence[str]) -> str:
    """The value of an object's field; NULL where its names have different values."""
    values = [f"nullif({place} -> {literal(each)}, 'null')" for each in names]
    first = f"coalesce({', '.join(values)})"
    clash = " OR ".join(f"{each} <> {first}" for each in values)
    return f"(CASE WHEN NOT coalesce({clash}, false) THEN {first} END)"


def _exact(text: str, cast: str) -> str | None:
    """Whether a text that PostgreSQL takes for a type has a value of it, as Spark reads it."""
    if cast.startswith("numeric"):
        return f"{text} ~ {literal(_NUMBER)} AND {text}::numeric = {text}::{cast}"
    if cast == "date":
        return f"{text} ~ {literal(_DATE)}"
    if cast.startswith("timestamp"):
        return f"{text} ~ {literal(_TIME)} AND {text} !~ {literal(_FINER)}"
    return None


def _indexed(index: Index) -> str:
    """The columns of an index: a group's hash, plain columns, and columns with an order."""
    parts = [group_hash(index.group)] if index.group else []
    parts += [c.sql if isinstance(c, By) else identifier(c) for c in index.columns]
    return ", ".join(parts)
