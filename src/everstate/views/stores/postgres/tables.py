"""Tables behind views, and the queries that readers see of them (D5, D6, D7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import sql

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.views.outputs import refuse_sum_type
from everstate.views.plan import LinearPlan, RowPlan, ViewPlan
from everstate.views.stores.postgres.types import postgres_type
from everstate.views.tables import (
    HISTORY_COLUMNS,
    LATEST_COLUMNS,
    history_of,
    latest_of,
    physical,
)

Connection = psycopg.Connection[Any]
Types = Mapping[str, pa.DataType]
_NO_OFFSET: Final = "^[0-9-]+([T ][0-9:.]*)?$"


_TYPES: Final = {
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
    "provenance": "jsonb NOT NULL",
    "transaction": "jsonb",
    "event": "jsonb",
    "state": "jsonb",
}


def store_columns(names: Sequence[str]) -> sql.Composed:
    """Column definitions of the store's own columns."""
    parts = [sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(_TYPES[n])) for n in names]
    return sql.SQL(", ").join(parts)


def install_latest(connection: Connection, schema_name: str, entity: str) -> None:
    """Make the table of `latest`; idempotent."""
    # Rows of latest are rewritten again and again: room in the page keeps the updates in place.
    connection.execute(
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY (key)) WITH (fillfactor = 50)"
        ).format(
            sql.Identifier(schema_name, physical(latest_of(entity))), store_columns(LATEST_COLUMNS)
        )
    )


def install_history(connection: Connection, schema_name: str, entity: str, version: int) -> None:
    """Make the table of a version of `history`; idempotent."""
    name = physical(history_of(entity), version)
    table = sql.Identifier(schema_name, name)
    connection.execute(
        sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY (key, version))").format(
            table, store_columns(HISTORY_COLUMNS)
        )
    )
    connection.execute(
        sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} (key, as_of, version)").format(
            sql.Identifier(f"{name}_as_of"), table
        )
    )


def entity_readers(schema_name: str, entity_type: EntityType) -> dict[str, sql.Composed]:
    """What readers see of `latest`: live entities in typed columns, and `latest` itself."""
    latest = sql.Identifier(schema_name, physical(latest_of(entity_type.name)))
    typed: list[sql.Composable] = [
        sql.SQL("{} AS {}").format(_field(column), sql.Identifier(column.name))
        for column in entity_type.arrow_schema
    ]
    typed += [sql.SQL(f"{n} AS _{n}") for n in ("key", "version", "as_of", "recorded_at")]
    return {
        entity_type.name: sql.SQL("SELECT {} FROM {} WHERE state IS NOT NULL").format(
            sql.SQL(", ").join(typed), latest
        ),
        latest_of(entity_type.name): sql.SQL("SELECT * FROM {}").format(latest),
    }


def history_reader(schema_name: str, entity: str, version: int) -> sql.Composed:
    """What readers see of a version of `history`."""
    return sql.SQL("SELECT * FROM {}").format(
        sql.Identifier(schema_name, physical(history_of(entity), version))
    )


def _field(column: pa.Field) -> sql.Composed:
    """A typed column cut out of the state."""
    kind = postgres_type(column.type)
    if kind == "jsonb":
        return sql.SQL("(state -> {})").format(sql.Literal(column.name))
    text = sql.SQL("(state ->> {})").format(sql.Literal(column.name))
    if kind == "timestamptz":
        # A time without an offset is of UTC, as Spark reads it, whatever the reader's zone is.
        return sql.SQL(
            "CASE WHEN {0} ~ {1} THEN {0}::timestamp AT TIME ZONE 'UTC' ELSE {0}::timestamptz END"
        ).format(text, sql.Literal(_NO_OFFSET))
    return sql.SQL("{}::{}").format(text, sql.SQL(kind or "text"))


def install(
    connection: Connection,
    schema_name: str,
    plan: ViewPlan,
    column_types: Types,
    version: int = 1,
) -> None:
    """Make the table of a version of a view; idempotent.

    ``column_types`` gives Spark's analysed type of each field in ``plan.types_needed``. Raises
    InvalidView when a type cannot be stored, or a sum would be over floats (C16).
    """
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


def summed(schema_name: str, plan: LinearPlan, version: int = 1) -> sql.Composed:
    """Query of a linear view's groups and accumulators, summed over shards.

    Columns in the order of the plan; without groups there is one row always.
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
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} ({}, {}, PRIMARY KEY (key)) WITH (fillfactor = 50)"
        ).format(table, store_columns(("key", "version")), sql.SQL(", ").join(columns))
    )


def row_reader(schema_name: str, plan: RowPlan, version: int) -> sql.Composed:
    """What readers see of a view of rows."""
    shown: list[sql.Composable] = [
        sql.SQL("{} AS {}").format(sql.Identifier(c.name), sql.Identifier(c.output or c.name))
        for c in plan.row
    ]
    shown += [sql.SQL("key AS _key"), sql.SQL("version AS _version")]
    table = sql.Identifier(schema_name, physical(plan.name, version))
    return sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(shown), table)


def reader(schema_name: str, plan: ViewPlan, version: int) -> sql.Composed:
    """What readers see of a version of a view."""
    if isinstance(plan, LinearPlan):
        return linear_reader(schema_name, plan, version)
    return row_reader(schema_name, plan, version)


def kept(schema_name: str, plan: ViewPlan, version: int) -> sql.Composed:
    """Query of what a version's table holds, in the columns of its batch."""
    if isinstance(plan, LinearPlan):
        return summed(schema_name, plan, version)
    return kept_rows(schema_name, plan, version)


def drop_table(connection: Connection, schema_name: str, name: str, version: int) -> None:
    """Drop the table of a version that no reader sees."""
    table = sql.Identifier(schema_name, physical(name, version))
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))


def empty_table(connection: Connection, schema_name: str, name: str, version: int) -> None:
    """Empty the table of a version that no reader sees."""
    table = sql.Identifier(schema_name, physical(name, version))
    connection.execute(sql.SQL("TRUNCATE {}").format(table))
