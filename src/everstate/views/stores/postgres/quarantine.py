"""A view that leaves its group, or joins it, with its own gate and positions (C13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

from everstate.errors import UnknownView, ViewStoreError
from everstate.views import control
from everstate.views.stores.postgres.group import (
    GATE_COLUMNS,
    columns_ddl,
    gate_copy,
    main_group,
    own_group,
    physical,
)

Connection = psycopg.Connection[Any]


def quarantine(
    connection: Connection, schema_name: str, entity: str, view: str, reason: str
) -> str:
    """Take a view out of the main group, at the group's own position; returns its new group.

    Gate, positions, counters and waiting changes are copied in one transaction while the
    position rows are locked, so that no task commits in between. The epoch moves on: a task with
    the old plan changes nothing any more. A view that is alone already keeps its place, and only
    the reason is noted. Cost: a copy of the gate, one row a key.
    """
    group = own_group(entity, view)
    with connection.transaction():
        row = _locked_view(connection, schema_name, view)
        set_view(connection, schema_name, view, group, "quarantined", reason)
        if row == group:
            return group
        main = main_group(entity)
        locked_positions(connection, schema_name, main)
        _make_gate(connection, schema_name, view)
        names = sql.SQL(", ").join(sql.Identifier(name) for name in GATE_COLUMNS)
        connection.execute(
            sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(
                sql.Identifier(schema_name, gate_copy(view)),
                names,
                names,
                sql.Identifier(schema_name, physical(f"{entity}_latest")),
            )
        )
        for table, columns in (
            ("position", "entity, generation, partition, next_offset, epoch"),
            ("counters", "generation, partition, applied, duplicate, held, dead"),
            (
                "held",
                'generation, partition, key, version, "offset", change_id, row, held_at',
            ),
        ):
            connection.execute(
                sql.SQL(
                    f"INSERT INTO {{0}} (view_group, {columns}) "
                    f"SELECT %s, {columns} FROM {{0}} WHERE view_group = %s"
                ).format(sql.Identifier(schema_name, table)),
                (group, main),
            )
        next_epoch(connection, schema_name, main)
    return group


def start_alone(
    connection: Connection,
    schema_name: str,
    entity: str,
    view: str,
    offsets: Mapping[int, int],
    generation: int = 1,
) -> str:
    """Open a group for a view that begins at the log's first changes (C15); returns its name.

    ``offsets`` are where version 1 of every key is still ahead. The view catches up alone and
    joins the main group with :func:`rejoin`. Idempotent.
    """
    group = own_group(entity, view)
    with connection.transaction():
        _locked_view(connection, schema_name, view)
        set_view(connection, schema_name, view, group, "building", None)
        _make_gate(connection, schema_name, view)
        control.init_positions(connection, schema_name, group, entity, offsets, generation)
    return group


def rejoin(connection: Connection, schema_name: str, entity: str, view: str) -> bool:
    """Put a view back into the main group when both are at one position; whether it was done.

    Both groups' position rows are locked and compared; while changes wait behind a gap in either
    group, the view stays alone. Cheap when the positions differ.
    """
    group, main = own_group(entity, view), main_group(entity)
    with connection.transaction():
        if _locked_view(connection, schema_name, view) != group:
            return True
        mine = locked_positions(connection, schema_name, group)
        theirs = locked_positions(connection, schema_name, main)
        # What waits has the row deltas of its own group's views only.
        waiting = _waits(connection, schema_name, group) or _waits(connection, schema_name, main)
        if mine != theirs or waiting:
            return False
        for table in ("position", "counters", "held"):
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE view_group = %s").format(
                    sql.Identifier(schema_name, table)
                ),
                (group,),
            )
        connection.execute(
            sql.SQL("DROP TABLE {}").format(sql.Identifier(schema_name, gate_copy(view)))
        )
        set_view(connection, schema_name, view, main, "live", None)
        next_epoch(connection, schema_name, main)
    return True


def _make_gate(connection: Connection, schema_name: str, view: str) -> None:
    connection.execute(
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} ({}, PRIMARY KEY (key)) WITH (fillfactor = 80)"
        ).format(sql.Identifier(schema_name, gate_copy(view)), columns_ddl(GATE_COLUMNS))
    )


def _locked_view(connection: Connection, schema_name: str, view: str) -> str:
    query = sql.SQL("SELECT view_group, entity FROM {} WHERE name = %s FOR UPDATE")
    row = connection.execute(query.format(sql.Identifier(schema_name, "view")), (view,)).fetchone()
    if row is None:
        raise UnknownView(view)
    if view == f"{row[1]}_latest":
        raise ViewStoreError(f"{view} belongs to every view of {row[1]} and is never kept alone.")
    return str(row[0])


def set_view(
    connection: Connection,
    schema_name: str,
    view: str,
    group: str,
    status: str,
    reason: str | None,
) -> None:
    """Note a view's group and status."""
    connection.execute(
        sql.SQL(
            "UPDATE {} SET view_group = %s, status = %s, reason = %s, changed_at = now() "
            "WHERE name = %s"
        ).format(sql.Identifier(schema_name, "view")),
        (group, status, reason, view),
    )


def locked_positions(
    connection: Connection, schema_name: str, group: str
) -> list[tuple[int, int, int]]:
    """Positions of a group, locked against its tasks until the transaction ends."""
    query = sql.SQL(
        "SELECT generation, partition, next_offset FROM {} WHERE view_group = %s "
        "ORDER BY generation, partition FOR UPDATE"
    ).format(sql.Identifier(schema_name, "position"))
    return connection.execute(query, (group,)).fetchall()


def _waits(connection: Connection, schema_name: str, group: str) -> bool:
    query = sql.SQL("SELECT 1 FROM {} WHERE view_group = %s LIMIT 1").format(
        sql.Identifier(schema_name, "held")
    )
    return connection.execute(query, (group,)).fetchone() is not None


def next_epoch(connection: Connection, schema_name: str, group: str) -> None:
    """Move a group's epoch on: plans that were made before change nothing any more."""
    connection.execute(
        sql.SQL("UPDATE {} SET epoch = epoch + 1 WHERE view_group = %s").format(
            sql.Identifier(schema_name, "position")
        ),
        (group,),
    )
