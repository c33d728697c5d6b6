"""Applies deferred changes of a throttled view."""

from __future__ import annotations

from everstate.views.control import Control
from everstate.views.stores.postgres import writes
from everstate.views.stores.postgres.deferring import Deferred
from everstate.views.stores.postgres.session import session
from everstate.views.tables import Core, KeptTable


def take_part(
    dsn: str,
    schema_name: str,
    core: Core,
    table: KeptTable,
    partition: int,
    most: int,
    *,
    waits: bool = True,
) -> int | None:
    """Apply a view's oldest deferred changes of a partition in one commit; returns their number.

    At most ``most`` of them, which must be above 0, and those of one stored part.

    0: there is none, or the view's position is of another plan meanwhile. ``None``: the core is
    writing this partition just now, and ``waits`` is false. Raises Unavailable, psycopg's errors.
    """
    with session(dsn) as found:
        writes.prepare_view(found, schema_name, table)
        control = Control(found.connection, schema_name)
        with found.connection.transaction():
            at = control.core_position(core, partition, hold=True, waits=waits)
            if at is None and not waits:
                return None
            if not control.hold_view(table, core.generation, partition):
                return 0
            deferred = Deferred(control, table, core.generation, partition)
            part = deferred.oldest()
            if part is None:
                return 0
            number, stored = part
            batch = stored.first(most)
            place = writes.WritePlace(schema_name, core.generation, partition)
            writes.merge_view(found, place, table, batch)
            deferred.applied(number, stored.changes, batch.changes.num_rows)
        return int(batch.changes.num_rows)
