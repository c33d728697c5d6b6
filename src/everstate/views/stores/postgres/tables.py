"""Tables and readers' views of entity types and of SQL views (D5, D6, D7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.views import control
from everstate.views.outputs import refuse_sum_type
from everstate.views.plan import LinearPlan, RowPlan, ViewPlan
from everstate.views.stores.postgres.group import (
    HISTORY_COLUMNS,
    LATEST_COLUMNS,
    columns_ddl,
    physical,
)
from everstate.views.stores.postgres.types import postgres_type

Connection = psycopg.Connection[Any]
Types = Mapping[str, pa.DataType]


def install_entity(connection: Connection, schema_name: str, entity_type: EntityType) -> None:
    """Make `latest` and `history` of an entity type and their readers' views; idempotent.

    Readers see `<entity>` (live entities in typed columns), `<entity>_latest` and
    `<entity>_history`.
    """
    with connection.transaction():
        control.lock_installing(connection)
        _install_entity(connection, schema_name, entity_type)


def _install_entity(connection: Connection, schema_name: str, entity_type: EntityType) -> None:
    entity = entity_type.name
    latest = sql.Identifier(schema_name, physical(f"{entity}_latest"))
    history = sql.Identifier(schema_name, physical(f"{entity}_history"))
    # Rows of latest are rewritten again and again: room in the page keeps the updates in place.
    connection.execute(
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY (key)) WITH (fillfactor = 80)"
        ).format(latest, columns_ddl(LATEST_COLUMNS))
    )
    connection.execute(
        sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY (key, version))").format(
            history, columns_ddl(HISTORY_COLUMNS)
        )
    )
    connection.execute(
        sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} (key, as_of, version)").format(
            sql.Identifier(f"{entity}_history__v1_as_of"), history
        )
    )
    typed: list[sql.Composable] = [
        sql.SQL("{} AS {}").format(_field(column), sql.Identifier(column.name))
        for column in entity_type.arrow_schema
    ]
    typed += [sql.SQL(f"{n} AS _{n}") for n in ("key", "version", "as_of", "recorded_at")]
    readers = {
        entity: sql.SQL("SELECT {} FROM {} WHERE state IS NOT NULL").format(
            sql.SQL(", ").join(typed), latest
        ),
        f"{entity}_latest": sql.SQL("SELECT * FROM {}").format(latest),
        f"{entity}_history": sql.SQL("SELECT * FROM {}").format(history),
    }
    for name, query in readers.items():
        _replace_reader(connection, schema_name, name, query)


def _field(column: pa.Field) -> sql.Composed:
    """A typed column cut out of the state."""
    kind = postgres_type(column.type)
    if kind == "jsonb":
        return sql.SQL("(state -> {})").format(sql.Literal(column.name))
    return sql.SQL("(state ->> {})::{}").format(
        sql.Literal(column.name),
        sql.SQL(kind or "text"),
    )


def _replace_reader(
    connection: Connection, schema_name: str, name: str, query: sql.Composed
) -> None:
    """Point a reader's name to a query; a view whose columns changed is made anew."""
    reader = sql.Identifier(schema_name, name)
    with connection.transaction():
        try:
            with connection.transaction():
                connection.execute(sql.SQL("CREATE OR REPLACE VIEW {} AS {}").format(reader, query))
        except psycopg.errors.InvalidTableDefinition:
            connection.execute(sql.SQL("DROP VIEW {}").format(reader))
            connection.execute(sql.SQL("CREATE VIEW {} AS {}").format(reader, query))


def install(
    connection: Connection,
    schema_name: str,
    plan: ViewPlan,
    column_types: Types,
    version: int = 1,
) -> None:
    """Make a view's table and its reader's view; idempotent.

    ``column_types`` gives Spark's analysed type of each field in ``plan.types_needed``. Raises
    InvalidView when a type cannot be stored, or a sum would be over floats (C16).
    """
    with connection.transaction():
        control.lock_installing(connection)
        if isinstance(plan, LinearPlan):
            _install_linear(connection, schema_name, plan, column_types, version)
        else:
            _install_row(connection, schema_name, plan, column_types, version)


def _column(plan: ViewPlan, name: str, shown: str, types: Types) -> sql.Composed:
    kind = postgres_type(types[name])
    if kind is None:
        raise InvalidView(
            plan.name,
            f"{shown} is {types[name]}, which the store has no type for.",
            advice="Cast it to text, a number or a time.",
        )
    if kind == "text":
        kind = 'text COLLATE "C"'
    return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))


def _install_linear(
    connection: Connection, schema_name: str, plan: LinearPlan, types: Types, version: int
) -> None:
    for accumulator in plan.accumulators:
        if accumulator.kind == "sum":
            refuse_sum_type(plan.name, f"the sum {accumulator.spark_sql}", types[accumulator.name])
    table = sql.Identifier(schema_name, physical(plan.name, version))
    groups = [_column(plan, c.name, c.spark_sql, types) for c in plan.group]
    sums = [
        sql.SQL("{} {} NOT NULL").format(
            sql.Identifier(a.name), sql.SQL("bigint" if a.kind == "count" else "numeric")
        )
        for a in plan.accumulators
    ]
    key = sql.SQL(", ").join([*(sql.Identifier(c.name) for c in plan.group), sql.SQL("shard")])
    connection.execute(
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} ({}, UNIQUE NULLS NOT DISTINCT ({})) "
            "WITH (fillfactor = 50)"
        ).format(table, sql.SQL(", ").join([*groups, sql.SQL("shard int NOT NULL"), *sums]), key)
    )
    connection.execute(
        sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} (shard) WHERE n = 0").format(
            sql.Identifier(f"{physical(plan.name, version)}_empty"), table
        )
    )
    _replace_reader(connection, schema_name, plan.name, linear_reader(schema_name, plan, version))


def summed(schema_name: str, plan: LinearPlan, version: int = 1) -> sql.Composed:
    """Query of a linear view's groups and accumulators, summed over shards.

    Columns in the order of ``plan.batch_sql``; without groups there is one row always.
    """
    groups = [sql.Identifier(column.name) for column in plan.group]
    sums = [
        sql.SQL("coalesce(sum({0}), 0)::{1} AS {0}").format(
            sql.Identifier(a.name), sql.SQL("bigint" if a.kind == "count" else "numeric")
        )
        for a in plan.accumulators
    ]
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join([*groups, *sums]),
        sql.Identifier(schema_name, physical(plan.name, version)),
    )
    if groups:
        listed = sql.SQL(", ").join(groups)
        query += sql.SQL(" GROUP BY {} HAVING sum(n) <> 0").format(listed)
    return query


def linear_reader(schema_name: str, plan: LinearPlan, version: int = 1) -> sql.Composed:
    """Query of what readers see of a linear view."""
    outputs = [
        sql.SQL("{} AS {}").format(
            sql.SQL(output.postgres_sql),
            sql.Identifier(output.name),
        )
        for output in plan.outputs
    ]
    return sql.SQL("SELECT {} FROM ({}) AS kept").format(
        sql.SQL(", ").join(outputs), summed(schema_name, plan, version)
    )


def kept_rows(schema_name: str, plan: RowPlan, version: int = 1) -> sql.Composed:
    """Query of a row view's keys and rows, columns in the order of ``plan.batch_sql``."""
    columns = [sql.Identifier(name) for name in ("key", *(c.name for c in plan.row))]
    return sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(columns), sql.Identifier(schema_name, physical(plan.name, version))
    )


def _install_row(
    connection: Connection, schema_name: str, plan: RowPlan, types: Types, version: int
) -> None:
    table = sql.Identifier(schema_name, physical(plan.name, version))
    columns = [_column(plan, c.name, c.output or c.name, types) for c in plan.row]
    connection.execute(
        sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, {}, PRIMARY KEY (key))").format(
            table, columns_ddl(("key", "version")), sql.SQL(", ").join(columns)
        )
    )
    shown: list[sql.Composable] = [
        sql.SQL("{} AS {}").format(sql.Identifier(c.name), sql.Identifier(c.output or c.name))
        for c in plan.row
    ]
    shown += [sql.SQL("key AS _key"), sql.SQL("version AS _version")]
    query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(shown), table)
    _replace_reader(connection, schema_name, plan.name, query)
