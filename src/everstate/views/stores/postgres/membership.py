"""Which views of an entity type a project keeps: what is new, what left, what came back (C15).

A view that was left out has missed changes. It goes out of the main group when a project without
it is prepared, and one that comes back is emptied and begins at the log's first changes again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from psycopg import sql

from everstate.views import control
from everstate.views.control import Connection, ViewRow
from everstate.views.stores.postgres.group import gate_copy, main_group, own_group, physical
from everstate.views.stores.postgres.quarantine import (
    locked_positions,
    next_epoch,
    set_view,
    start_alone,
)

log = logging.getLogger(__name__)

_LEFT: Final = "no app that was started since declares it"


def register_views(
    connection: Connection,
    schema_name: str,
    entity: str,
    wanted: Sequence[ViewRow],
    begin: Mapping[int, int],
) -> None:
    """Make the registered views of an entity type those of a project; one transaction.

    Opens the main group at ``begin`` when it is new. Beside kept changes, a view that is new or
    comes back starts alone at ``begin`` (C15); registered views that are not ``wanted`` leave.
    A change of the set moves the epoch on, so that a plan of the old set applies nothing more.
    Raises InvalidView for a name that is registered with another meaning.
    """
    main = main_group(entity)
    with connection.transaction():
        control.lock_installing(connection)
        known = {
            row.name: row for row in control.views(connection, schema_name) if row.entity == entity
        }
        control.init_positions(connection, schema_name, main, entity, begin)
        begun = any(offset > 0 for _, _, offset in locked_positions(connection, schema_name, main))
        gone = [row for row in known.values() if row.name not in {w.name for w in wanted}]
        changed = False
        for row in gone:
            if row.status != control.LEFT:
                _leave(connection, schema_name, row)
                changed = True
        for row in wanted:
            found = known.get(row.name)
            control.register_view(connection, schema_name, row)
            if found is not None and found.status != control.LEFT:
                continue
            changed = True
            if found is not None:
                _empty(connection, schema_name, row)
                set_view(connection, schema_name, row.name, main, "live", None)
            if begun and row.name != f"{entity}_latest":
                start_alone(connection, schema_name, entity, row.name, begin)
                log.info("view %s is new: it catches up alone, then joins", row.name)
        if changed:
            next_epoch(connection, schema_name, main)


def _leave(connection: Connection, schema_name: str, row: ViewRow) -> None:
    own = own_group(row.entity, row.name)
    for table in ("position", "counters", "held"):
        connection.execute(
            sql.SQL("DELETE FROM {} WHERE view_group = %s").format(
                sql.Identifier(schema_name, table)
            ),
            (own,),
        )
    gate = sql.Identifier(schema_name, gate_copy(row.name))
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(gate))
    set_view(connection, schema_name, row.name, own, control.LEFT, _LEFT)
    log.warning("view %s is not declared any more: it is not kept from here on", row.name)


def _empty(connection: Connection, schema_name: str, row: ViewRow) -> None:
    table = sql.Identifier(schema_name, physical(row.name, row.version))
    connection.execute(sql.SQL("TRUNCATE {}").format(table))
