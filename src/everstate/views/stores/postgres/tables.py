"""Tables behind views, and the queries by which readers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.postgres import Connection
from everstate.views.kinds import (
    EXACT,
    By,
    Index,
    LatestPlan,
    Layout,
    TableColumn,
    ViewPlan,
    group_hash,
)
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
        return sql.Identifier(self._schema, name).as_string(None)

    def field(self, path: Sequence[str], kind: pa.DataType) -> str:
        """A typed field of a state."""
        return typed_field(path, kind).as_string(None)


def install(
    connection: Connection,
    schema_name: str,
    plan: ViewPlan,
    version: int,
    types: Mapping[str, pa.DataType],
) -> None:
    """Create the table of a version; idempotent.

    ``types``: Spark's type of each field of the plan's columns. Raises InvalidView when a type
    cannot be stored, or a sum would be over floats (C16).
    """
    layout, name = plan.layout(types), physical(plan.name, version)
    table = sql.Identifier(schema_name, name)
    columns = definitions(plan, layout)
    # Rows that are updated often get free room in their page, for updates in the same page.
    filled = sql.SQL(" WITH (fillfactor = 50)" if layout.is_rewritten else "")
    may_be_null = {c.name for c in layout.columns if c.type is not None and not c.required}
    has_nulls = not may_be_null.isdisjoint(layout.key)
    key = sql.SQL("UNIQUE NULLS NOT DISTINCT" if has_nulls else "PRIMARY KEY")
    beside = sql.SQL(" INCLUDE ({})").format(_names(layout.beside_key))
    connection.execute(
        sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, {} ({}){}){}").format(
            table,
            columns,
            key,
            _names(layout.key),
            beside if layout.beside_key else sql.SQL(""),
            filled,
        )
    )
    for index in layout.indexes:
        where = sql.SQL(f" WHERE {index.where}" if index.where else "")
        connection.execute(
            sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} USING {} ({}){}").format(
                sql.Identifier(f"{name}_{index.name}"),
                table,
                sql.SQL("gin" if index.of_words else "btree"),
                _indexed(index),
                where,
            )
        )


def definitions(plan: ViewPlan, layout: Layout) -> sql.Composed:
    """Definitions of a table's columns; raises InvalidView."""
    return sql.SQL(", ").join(_column(plan, column) for column in layout.columns)


def latest_readers(
    schema_name: str, entity_type: EntityType, shown: Sequence[str] = ()
) -> dict[str, str]:
    """Readers' queries over `latest`: live entities in typed columns, and `latest` itself.

    ``shown``: columns that readers see now. They keep their order, and others come after them, so
    that a name can be replaced without dropping it.
    """
    plan = LatestPlan.of(entity_type.name)
    table = sql.Identifier(schema_name, physical(plan.name))
    columns: dict[str, sql.Composable] = {
        column.name: typed_field((column.name,), column.type) for column in entity_type.arrow_schema
    }
    columns |= {f"_{n}": sql.Identifier(n) for n in ("key", "version", "as_of", "recorded_at")}
    names = [name for name in shown if name in columns]
    names += [name for name in columns if name not in names]
    typed = [sql.SQL("{} AS {}").format(columns[name], sql.Identifier(name)) for name in names]
    columns_shown = sql.SQL(", ").join(typed)
    live = sql.SQL("SELECT {} FROM {} WHERE state IS NOT NULL").format(columns_shown, table)
    return {
        entity_type.name: live.as_string(None),
        plan.name: plan.read(Readers(schema_name, 1)),
    }


def _column(plan: ViewPlan, column: TableColumn) -> sql.Composed:
    if column.words:
        return _words(column)
    if column.type is None:
        return sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(_OWN[column.name]))
    kind = "numeric" if column.type == EXACT else postgres_type(column.type)
    if kind is None:
        raise InvalidView(
            plan.name,
            f"{column.shown or column.name} is {column.type}, for which PostgreSQL has no type.",
            advice="CAST it to a text, a number or a time.",
        )
    if kind == "text":
        kind = 'text COLLATE "C"'
    required = " NOT NULL" if column.required else ""
    return sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(kind + required))


def _words(column: TableColumn) -> sql.Composed:
    """A column with the words of other columns; those of earlier columns weigh more.

    The texts are truncated, because PostgreSQL refuses a row with more than a megabyte of words.
    """
    chars = _SEARCHED_CHARS // len(column.words)
    parts = [
        sql.SQL("setweight(to_tsvector({}::regconfig, left(coalesce({}, ''), {})), {})").format(
            sql.Literal(column.language),
            sql.Identifier(name),
            sql.Literal(chars),
            sql.Literal(_WEIGHTS[min(place, len(_WEIGHTS) - 1)]),
        )
        for place, name in enumerate(column.words)
    ]
    return sql.SQL("{} tsvector GENERATED ALWAYS AS ({}) STORED").format(
        sql.Identifier(column.name), sql.SQL(" || ").join(parts)
    )


def typed_field(path: Sequence[str], kind: pa.DataType) -> sql.Composed:
    """A typed field extracted from the column `state`; NULL where its value is not of the type."""
    cast = postgres_type(kind)
    place = sql.SQL("(state #> {})").format(sql.Literal(list(path)))
    if cast == "jsonb":
        return place
    text = sql.SQL("(state #>> {})").format(sql.Literal(list(path)))
    if len(path) == 1:
        text = sql.SQL("(state ->> {})").format(sql.Literal(path[0]))
    if cast in (None, "text"):
        return text
    value = sql.SQL("{}::{}").format(text, sql.SQL(cast))
    if cast == "timestamptz":
        # A time without an offset is in UTC, as Spark reads it, whatever the reader's zone is.
        value = sql.SQL(
            "CASE WHEN {0} ~ {1} THEN {0}::timestamp AT TIME ZONE 'UTC' ELSE {0}::timestamptz END"
        ).format(text, sql.Literal(_NO_OFFSET))
    # A model's type may be narrower than what was written: a cast would fail for every reader, or
    # round the value.
    fits = sql.SQL("pg_input_is_valid({}, {})").format(text, sql.Literal(cast))
    if (of_json := _JSON_TYPES.get(cast)) is not None:
        fits = sql.SQL("jsonb_typeof({}) = {} AND {}").format(place, sql.Literal(of_json), fits)
    if (exact := _exact(text, cast)) is not None:
        # Of AND, PostgreSQL may look at any side first.
        value = sql.SQL("CASE WHEN {} THEN {} END").format(exact, value)
    guarded = sql.SQL("CASE WHEN {} THEN {} END").format(fits, value)
    # A CASE loses the digits of a numeric, and a view's column cannot change its type.
    return sql.SQL("({})::{}").format(guarded, sql.SQL(cast)) if "(" in cast else guarded


def _exact(text: sql.Composable, cast: str) -> sql.Composable | None:
    """Whether a text that PostgreSQL takes for a type has a value of it, as Spark reads it."""
    if cast.startswith("numeric"):
        shaped = sql.SQL("{0} ~ {1} AND {0}::numeric = {0}::{2}")
        return shaped.format(text, sql.Literal(_NUMBER), sql.SQL(cast))
    if cast == "date":
        return sql.SQL("{} ~ {}").format(text, sql.Literal(_DATE))
    if cast.startswith("timestamp"):
        shaped = sql.SQL("{0} ~ {1} AND {0} !~ {2}")
        return shaped.format(text, sql.Literal(_TIME), sql.Literal(_FINER))
    return None


def _indexed(index: Index) -> sql.Composed:
    """The columns of an index: a group's hash, plain columns, and columns with an order."""
    parts: list[sql.Composable] = []
    if index.group:
        parts.append(sql.SQL(group_hash(index.group)))
    for column in index.columns:
        parts.append(sql.SQL(column.sql) if isinstance(column, By) else sql.Identifier(column))
    return sql.SQL(", ").join(parts)


def _names(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
