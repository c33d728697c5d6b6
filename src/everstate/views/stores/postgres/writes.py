"""What one view group writes of a batch of changes that passed the gate.

Each write stages rows by COPY in a temporary table of this session (never shared, C11) and merges
them with one statement, in the order of the key (C17). All run inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import sql

from everstate.views.stores.postgres.gate import Keys
from everstate.views.stores.postgres.group import (
    GATE_COLUMNS,
    HISTORY_COLUMNS,
    LATEST_COLUMNS,
    GroupPlan,
    LinearTable,
    RowTable,
    planned_column,
)
from everstate.views.stores.postgres.images import Images, cut
from everstate.views.stores.postgres.session import Session
from everstate.views.stores.postgres.types import copied

GATE_STAGE: Final = "stage_gate"
_CSV: Final = pyarrow.csv.WriteOptions(include_header=False)
_INT64_MAX: Final = 2**63 - 1
_DECIMAL128_DIGITS: Final = 38
_BATCH_DIGITS: Final = 10
"""A batch has fewer changes than a number of so many digits."""
_COUNTED: Final = pc.ScalarAggregateOptions(skip_nulls=True, min_count=0)


class Batch:
    """Changes that apply, with what the tables need of them; versions of a key in order."""

    def __init__(self, changes: pa.Table, floors: Mapping[str, datetime]) -> None:
        self.changes = changes
        self.floors = floors

    @cached_property
    def keys(self) -> Keys:
        """The changes by key."""
        return Keys(self.changes)

    @cached_property
    def as_of(self) -> pa.Array:
        """As-of time of each change."""
        return self.keys.running_as_of(self.floors)

    @cached_property
    def images(self) -> Images:
        """JSON texts of each change."""
        return cut(self.changes["raw_value"].to_pylist())

    @cached_property
    def lasts(self) -> pa.Array:
        """Row of the newest change of each key."""
        return pa.array(self.keys.lasts)

    def first(self, count: int) -> Batch:
        """The first ``count`` changes alone."""
        return Batch(self.changes.slice(0, count), self.floors)

    def newest(self) -> tuple[pa.Table, pa.Array]:
        """The newest change of each key, and its as-of time."""
        return self.changes.take(self.lasts), self.as_of.take(self.lasts)


def stage_name(table: str) -> str:
    """Name of the temporary table that a table is staged in."""
    return f"stage_{table}"


def stage_of(name: str) -> sql.Identifier:
    """Where a staging table lives: in this session alone, never shared (C11)."""
    return sql.Identifier("pg_temp", name)


def prepare_stage(session: Session, name: str, columns: sql.Composed) -> None:
    """Make a temporary table once a session; outside a transaction, so that it stays."""
    connection = session.connection
    wanted = columns.as_string(connection)
    if session.staged.get(name) == wanted:
        return
    stage = stage_of(name)
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(stage))
    create = sql.SQL("CREATE TEMP TABLE {} ({}) ON COMMIT DELETE ROWS")
    connection.execute(create.format(sql.Identifier(name), columns))
    session.staged[name] = wanted


def like(group: GroupPlan, table: str, *more: str) -> sql.Composed:
    """Columns of a staging table: those of the table, and some more."""
    parts = [sql.SQL("LIKE {}").format(sql.Identifier(group.schema_name, table))]
    parts += [sql.SQL(column).format() for column in more]
    return sql.SQL(", ").join(parts)


def copy_rows(
    session: Session,
    table: sql.Identifier,
    columns: Mapping[str, pa.Array | pa.ChunkedArray],
) -> None:
    """COPY columns into a table as CSV; nested values go as JSON text."""
    arrays = []
    for values in columns.values():
        whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        arrays.append(copied(whole))
    rows = pa.Table.from_arrays(arrays, names=list(columns))
    if not rows.num_rows:
        return
    buffer = pa.BufferOutputStream()
    pyarrow.csv.write_csv(rows, buffer, _CSV)
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(table, _names(columns))
    with session.connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(memoryview(buffer.getvalue()))


def _names(names: Sequence[str] | Mapping[str, Any]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)


def _constant(value: int, rows: int) -> pa.Array:
    return pa.array(np.full(rows, value, dtype=np.int64))


def _places(group: GroupPlan, partition: int, changes: pa.Table) -> dict[str, pa.Array]:
    return {
        "generation": _constant(group.generation, changes.num_rows),
        "partition": _constant(partition, changes.num_rows),
        "offset": changes["offset"],
    }


def write_latest(session: Session, group: GroupPlan, partition: int, batch: Batch) -> None:
    """Put the newest change of each key into `latest`, which is the gate."""
    changes, as_of = batch.newest()
    # With a history all images are cut anyway; without one only the newest are.
    if group.history_table is not None:
        images = batch.images.take(batch.lasts)
    else:
        images = cut(changes["raw_value"].to_pylist())
    columns = {
        "key": changes["key"],
        "version": changes["version"],
        "change_id": changes["id"],
        "kind": changes["kind"],
        "as_of": as_of,
        "occurred_at": changes["occurred_at"],
        "recorded_at": changes["recorded_at"],
        **_places(group, partition, changes),
        "provenance": images.provenance,
        "state": images.state,
    }
    _merge_newest(session, group, group.gate_table, columns, LATEST_COLUMNS)


def write_gate(session: Session, group: GroupPlan, partition: int, batch: Batch) -> None:
    """Move the group's own copy of the gate."""
    changes, as_of = batch.newest()
    columns = {
        "key": changes["key"],
        "version": changes["version"],
        "change_id": changes["id"],
        "as_of": as_of,
    }
    _merge_newest(session, group, group.gate_table, columns, GATE_COLUMNS)


def _merge_newest(
    session: Session,
    group: GroupPlan,
    table: str,
    columns: Mapping[str, pa.Array],
    names: Sequence[str],
) -> None:
    stage = stage_of(stage_name(table))
    copy_rows(session, stage, columns)
    target = sql.Identifier(group.schema_name, table)
    session.connection.execute(
        sql.SQL(
            "INSERT INTO {table} AS kept ({names}) SELECT {names} FROM {stage} ORDER BY key "
            "ON CONFLICT (key) DO UPDATE SET ({rest}) = ROW({values}) "
            "WHERE kept.version < excluded.version"
        ).format(
            table=target,
            stage=stage,
            names=_names(names),
            rest=_names(names[1:]),
            values=sql.SQL(", ").join(sql.Identifier("excluded", name) for name in names[1:]),
        )
    )


def write_history(session: Session, group: GroupPlan, partition: int, batch: Batch) -> None:
    """Add every change to `history`, in the order of its indexes: a third less work there."""
    assert group.history_table is not None
    order = pc.sort_indices(
        batch.changes.select(["key", "version"]),
        sort_keys=[("key", "ascending"), ("version", "ascending")],
    )
    plain = ("key", "version", "id", "kind", "occurred_at", "recorded_at", "schema_version")
    changes = batch.changes.select([*plain, "offset"]).take(order)
    images = batch.images.take(order)
    columns = {
        "key": changes["key"],
        "version": changes["version"],
        "change_id": changes["id"],
        "kind": changes["kind"],
        "as_of": batch.as_of.take(order),
        "occurred_at": changes["occurred_at"],
        "recorded_at": changes["recorded_at"],
        "schema_version": changes["schema_version"],
        **_places(group, partition, changes),
        "provenance": images.provenance,
        "transaction": images.transaction,
        "event": images.event,
        "state": images.state,
    }
    assert tuple(columns) == HISTORY_COLUMNS
    copy_rows(session, sql.Identifier(group.schema_name, group.history_table), columns)


def write_row_view(session: Session, group: GroupPlan, view: RowTable, batch: Batch) -> None:
    """Put the newest row of each key into a row view; a key without one leaves it."""
    changes, _ = batch.newest()
    images = changes[planned_column(view.view, "current")].combine_chunks()
    columns: dict[str, pa.Array] = {"key": changes["key"], "version": changes["version"]}
    columns.update(zip(view.columns, images.flatten(), strict=True))
    columns["present"] = images.is_valid()
    stage = stage_of(stage_name(view.table))
    copy_rows(session, stage, columns)
    table = sql.Identifier(group.schema_name, view.table)
    names = ("key", "version", *view.columns)
    session.connection.execute(
        sql.SQL(
            "DELETE FROM {} AS kept USING {} AS gone WHERE kept.key = gone.key AND NOT gone.present"
        ).format(table, stage)
    )
    session.connection.execute(
        sql.SQL(
            "INSERT INTO {table} AS kept ({names}) SELECT {names} FROM {stage} WHERE present "
            "ORDER BY key ON CONFLICT (key) DO UPDATE SET ({rest}) = ROW({values}) "
            "WHERE kept.version < excluded.version"
        ).format(
            table=table,
            stage=stage,
            names=_names(names),
            rest=_names(names[1:]),
            values=sql.SQL(", ").join(sql.Identifier("excluded", name) for name in names[1:]),
        )
    )


def write_linear_view(
    session: Session, group: GroupPlan, partition: int, view: LinearTable, batch: Batch
) -> None:
    """Add what the changes are worth to a linear view, in this partition's shard (D6)."""
    deltas = linear_deltas(view, batch.changes)
    if not deltas.num_rows:
        return
    columns = {name: deltas[name] for name in deltas.column_names}
    columns["shard"] = _constant(partition, deltas.num_rows)
    stage = stage_of(stage_name(view.table))
    copy_rows(session, stage, columns)
    table = sql.Identifier(group.schema_name, view.table)
    sums = [name for name, _ in view.sums]
    added = [sql.SQL("{0} = kept.{0} + excluded.{0}").format(sql.Identifier(name)) for name in sums]
    place = (*view.groups, "shard")
    session.connection.execute(
        sql.SQL(
            "INSERT INTO {table} AS kept ({names}) SELECT {names} FROM {stage} ORDER BY {place} "
            "ON CONFLICT ({place}) DO UPDATE SET {added}"
        ).format(
            table=table,
            names=_names((*place, *sums)),
            stage=stage,
            place=_names(place),
            added=sql.SQL(", ").join(added),
        )
    )
    empty = [sql.SQL("{} = 0").format(sql.Identifier(name)) for name in sums]
    session.connection.execute(
        sql.SQL("DELETE FROM {} WHERE shard = %s AND {}").format(
            table, sql.SQL(" AND ").join(empty)
        ),
        (partition,),
    )


def linear_deltas(view: LinearTable, changes: pa.Table) -> pa.Table:
    """Sums per group of what the changes take away (`original`) and add (`current`).

    Out: groups, then sums; counts as int64, sums as int64 or decimal without overflow. Groups
    that nothing happens to are left out.
    """
    parts = [
        _worth(view, changes[planned_column(view.view, "original")], -1),
        _worth(view, changes[planned_column(view.view, "current")], 1),
    ]
    rows = pa.concat_tables(parts).combine_chunks()
    names = [name for name, _ in view.sums]
    for name, kind in view.sums:
        if kind == "sum":
            place = rows.column_names.index(name)
            rows = rows.set_column(place, name, _wide(rows[name]))
    # `use_threads` off: one task has one core, and the sums of a batch are small.
    found = rows.group_by(list(view.groups), use_threads=False).aggregate(
        [(name, "sum", _COUNTED) for name in names]
    )
    found = found.rename_columns([name.removesuffix("_sum") for name in found.column_names])
    changed = pa.array(np.zeros(found.num_rows, dtype=np.bool_))
    for name in names:
        changed = pc.or_(changed, pc.not_equal(found[name], pa.scalar(0, found[name].type)))
    return found.select([*view.groups, *names]).filter(changed)


def _worth(view: LinearTable, images: pa.ChunkedArray, sign: int) -> pa.Table:
    """Groups and signed inputs of the images that the view has a part in."""
    present = images.combine_chunks()
    present = present.filter(present.is_valid())
    fields = dict(zip([field.name for field in present.type], present.flatten(), strict=True))
    columns: dict[str, pa.Array] = {}
    for name in view.groups:
        values = fields[name]
        columns[name] = copied(values) if pa.types.is_nested(values.type) else values
    for name, kind in view.sums:
        values = fields.get(name, None)
        if values is None:
            values = pa.array(np.ones(len(present), dtype=np.int64))
        if kind == "count" or pa.types.is_integer(values.type):
            values = values.cast(pa.int64())
        columns[name] = values if sign > 0 else pc.negate(values)
    return pa.Table.from_pydict(columns)


def _wide(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """A type in which the sum of these values cannot overflow."""
    kind = values.type
    if pa.types.is_decimal(kind):
        if kind.precision <= _DECIMAL128_DIGITS - _BATCH_DIGITS:
            return values.cast(pa.decimal128(_DECIMAL128_DIGITS, kind.scale))
        return values.cast(pa.decimal256(76, kind.scale))
    bounds = pc.min_max(values).as_py()
    largest = max(abs(bounds["min"] or 0), abs(bounds["max"] or 0))
    if largest * max(1, len(values)) > _INT64_MAX:
        return values.cast(pa.decimal256(76, 0))
    return values
