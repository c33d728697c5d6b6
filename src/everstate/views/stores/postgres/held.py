"""Changes behind a version gap, kept with the position until the gap fills (C14)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
from psycopg import sql

from everstate.errors import HeldOverflow
from everstate.views.stores.postgres.gate import HeldRow
from everstate.views.stores.postgres.group import GroupPlan
from everstate.views.stores.postgres.session import Session

_PLACE = "view_group = %s AND generation = %s AND partition = %s"


def held_keys(session: Session, group: GroupPlan, partition: int) -> set[str]:
    """Keys of this partition that have changes waiting."""
    query = sql.SQL("SELECT DISTINCT key FROM {} WHERE " + _PLACE).format(_table(group))
    rows = session.connection.execute(query, (group.view_group, group.generation, partition))
    return {key for (key,) in rows}


def read_held(
    session: Session, group: GroupPlan, partition: int, keys: Iterable[str]
) -> dict[str, dict[int, HeldRow]]:
    """Waiting changes of some keys."""
    query = sql.SQL(
        "SELECT key, version, change_id::text, row FROM {} WHERE " + _PLACE + " AND key = ANY(%s)"
    ).format(_table(group))
    found: dict[str, dict[int, HeldRow]] = {}
    place = (group.view_group, group.generation, partition, list(keys))
    for key, version, change_id, row in session.connection.execute(query, place):
        found.setdefault(key, {})[version] = HeldRow(change_id, unpacked(row))
    return found


def held_at(
    session: Session, group: GroupPlan, partition: int, offsets: Iterable[int]
) -> list[tuple[tuple[str, int], pa.Table]]:
    """Waiting changes that were read at some offsets: key and version, and the planned change."""
    query = sql.SQL(
        "SELECT key, version, row FROM {} WHERE " + _PLACE + ' AND "offset" = ANY(%s)'
    ).format(_table(group))
    place = (group.view_group, group.generation, partition, list(offsets))
    rows = session.connection.execute(query, place)
    return [((key, version), unpacked(row)) for key, version, row in rows]


def hold(
    session: Session, group: GroupPlan, partition: int, changes: pa.Table, rows: Sequence[int]
) -> None:
    """Let changes wait; raises HeldOverflow when the group would have more than it may."""
    if not rows:
        return
    table = _table(group)
    values = []
    for row in rows:
        change = changes.slice(row, 1)
        key, version, offset, change_id = (
            change[name][0].as_py() for name in ("key", "version", "offset", "id")
        )
        place = (group.view_group, group.generation, partition)
        values.append((*place, key, version, offset, change_id, packed(change)))
    with session.connection.cursor() as cursor:
        cursor.executemany(
            sql.SQL(
                "INSERT INTO {} (view_group, generation, partition, key, version, "
                '"offset", change_id, row) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)'
            ).format(table),
            values,
        )
    query = sql.SQL("SELECT count(*) FROM {} WHERE view_group = %s").format(table)
    counted = session.connection.execute(query, (group.view_group,)).fetchone()
    if counted is not None and counted[0] > group.held_max:
        raise HeldOverflow(group.view_group, counted[0], group.held_max)


def let_go(
    session: Session, group: GroupPlan, partition: int, versions: Sequence[tuple[str, int]]
) -> None:
    """Forget changes that no longer wait."""
    if not versions:
        return
    query = sql.SQL(
        "DELETE FROM {} AS held USING unnest(%s::text[], %s::bigint[]) AS gone(key, version) "
        "WHERE " + _PLACE + " AND held.key = gone.key AND held.version = gone.version"
    ).format(_table(group))
    place = (group.view_group, group.generation, partition)
    names, numbers = [key for key, _ in versions], [version for _, version in versions]
    session.connection.execute(query, (names, numbers, *place))


def bury(
    session: Session,
    group: GroupPlan,
    partition: int,
    changes: pa.Table,
    reasons: Sequence[tuple[int, str]],
) -> None:
    """Note records that cannot be read or applied; each place in the log once (law 7)."""
    if not reasons:
        return
    values = []
    for row, reason in reasons:
        record = changes.slice(row, 1)
        fields = record.select(["offset", "key", "raw_key", "raw_value", "raw_headers"])
        fields = fields.to_pylist()[0]
        if fields["raw_key"] is None and fields["key"] is not None:
            # The pipeline leaves the key's bytes out where the key could be read.
            fields["raw_key"] = fields["key"].encode()
        headers = fields["raw_headers"] or []
        values.append(
            (
                group.topic,
                group.generation,
                partition,
                fields["offset"],
                group.entity,
                group.view_group,
                reason,
                fields["raw_key"],
                fields["raw_value"],
                [header["key"] for header in headers],
                [header["value"] for header in headers],
            )
        )
    with session.connection.cursor() as cursor:
        cursor.executemany(
            sql.SQL(
                'INSERT INTO {} (topic, generation, partition, "offset", entity, view_group, '
                "reason, raw_key, raw_value, header_names, header_values) "
                "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s::bytea[]) "
                "ON CONFLICT DO NOTHING"
            ).format(sql.Identifier(group.schema_name, "dead")),
            values,
        )


def packed(change: pa.Table) -> bytes:
    """One planned change as Arrow IPC."""
    sink = pa.BufferOutputStream()
    # A slice would carry the buffers of the whole batch.
    own = change.take(pa.array([0])).combine_chunks()
    with pa.ipc.new_stream(sink, own.schema) as writer:
        writer.write_table(own)
    return bytes(sink.getvalue())


def unpacked(row: bytes) -> pa.Table:
    """The planned change that :func:`packed` made bytes of."""
    with pa.ipc.open_stream(row) as reader:
        return reader.read_all()


def _table(group: GroupPlan) -> sql.Identifier:
    return sql.Identifier(group.schema_name, "held")
