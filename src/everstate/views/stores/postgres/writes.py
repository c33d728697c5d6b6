"""How each kind of view is merged into its table: `latest`, rows, sums, history.

Each write stages rows by COPY in a temporary table of this session (never shared, C11) and merges
them with one statement, in the order of the key (C17). All run inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import sql

from everstate.views.batch import Batch
from everstate.views.images import cut
from everstate.views.stores.postgres.session import Session
from everstate.views.stores.postgres.types import copied
from everstate.views.sums import sum_deltas
from everstate.views.tables import (
    HISTORY_COLUMNS,
    LATEST_COLUMNS,
    Core,
    HistoryTable,
    KeptTable,
    RowTable,
    SumTable,
    planned_column,
)

GATE_STAGE: Final = "stage_gate"
_CSV: Final = pyarrow.csv.WriteOptions(include_header=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a batch comes from, and the schema that it goes to."""

    schema_name: str
    generation: int
    partition: int


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


def like(schema_name: str, table: str, *more: str) -> sql.Composed:
    """Columns of a staging table: those of the table, and some more."""
    parts = [sql.SQL("LIKE {}").format(sql.Identifier(schema_name, table))]
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


def _places(place: Place, changes: pa.Table) -> dict[str, pa.Array]:
    return {
        "generation": _constant(place.generation, changes.num_rows),
        "partition": _constant(place.partition, changes.num_rows),
        "offset": changes["offset"],
    }


def write_latest(session: Session, place: Place, core: Core, batch: Batch) -> None:
    """Put the newest change of each key into `latest`, which is the gate."""
    changes, as_of = batch.newest()
    # With a history all images are cut anyway; without one only the newest are.
    if any(isinstance(rider, HistoryTable) for rider in core.riders):
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
        **_places(place, changes),
        "provenance": images.provenance,
        "state": images.state,
    }
    stage = stage_of(stage_name(core.table))
    copy_rows(session, stage, columns)
    _upsert_newest(session, sql.Identifier(place.schema_name, core.table), stage, LATEST_COLUMNS)


def _upsert_newest(
    session: Session,
    table: sql.Identifier,
    stage: sql.Identifier,
    names: Sequence[str],
    condition: str = "",
) -> None:
    """Merge staged rows whose first two columns are key and version; the newest version wins."""
    session.connection.execute(
        sql.SQL(
            "INSERT INTO {table} AS kept ({names}) SELECT {names} FROM {stage} "
            + condition
            + " ORDER BY key ON CONFLICT (key) DO UPDATE SET ({rest}) = ROW({values}) "
            "WHERE kept.version < excluded.version"
        ).format(
            table=table,
            stage=stage,
            names=_names(names),
            rest=_names(names[1:]),
            values=sql.SQL(", ").join(sql.Identifier("excluded", name) for name in names[1:]),
        )
    )


def write_history(session: Session, place: Place, table: HistoryTable, batch: Batch) -> None:
    """Add every change to `history`, in the order of its indexes: a third less work there."""
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
        **_places(place, changes),
        "provenance": images.provenance,
        "transaction": images.transaction,
        "event": images.event,
        "state": images.state,
    }
    assert tuple(columns) == HISTORY_COLUMNS
    copy_rows(session, sql.Identifier(place.schema_name, table.name), columns)


def write_rows(session: Session, place: Place, table: RowTable, batch: Batch) -> None:
    """Put the newest row of each key into a view of rows; a key without one leaves it."""
    changes, _ = batch.newest()
    images = changes[planned_column(table, "current")].combine_chunks()
    columns: dict[str, pa.Array] = {"key": changes["key"], "version": changes["version"]}
    columns.update(zip(table.columns, images.flatten(), strict=True))
    columns["present"] = images.is_valid()
    stage = stage_of(stage_name(table.name))
    copy_rows(session, stage, columns)
    target = sql.Identifier(place.schema_name, table.name)
    session.connection.execute(
        sql.SQL(
            "DELETE FROM {} AS kept USING {} AS gone WHERE kept.key = gone.key AND NOT gone.present"
        ).format(target, stage)
    )
    names = ("key", "version", *table.columns)
    _upsert_newest(session, target, stage, names, "WHERE present")


def write_sums(session: Session, place: Place, table: SumTable, batch: Batch) -> None:
    """Add what the changes are worth to a view of sums, in this partition's shard (D6)."""
    deltas = sum_deltas(table, batch.changes)
    if not deltas.num_rows:
        return
    columns = {name: deltas[name] for name in deltas.column_names}
    columns["shard"] = _constant(place.partition, deltas.num_rows)
    stage = stage_of(stage_name(table.name))
    copy_rows(session, stage, columns)
    target = sql.Identifier(place.schema_name, table.name)
    sums = [name for name, _ in table.sums]
    added = [sql.SQL("{0} = kept.{0} + excluded.{0}").format(sql.Identifier(name)) for name in sums]
    groups = (*table.groups, "shard")
    session.connection.execute(
        sql.SQL(
            "INSERT INTO {table} AS kept ({names}) SELECT {names} FROM {stage} ORDER BY {groups} "
            "ON CONFLICT ({groups}) DO UPDATE SET {added}"
        ).format(
            table=target,
            names=_names((*groups, *sums)),
            stage=stage,
            groups=_names(groups),
            added=sql.SQL(", ").join(added),
        )
    )
    empty = [sql.SQL("{} = 0").format(sql.Identifier(name)) for name in sums]
    session.connection.execute(
        sql.SQL("DELETE FROM {} WHERE shard = %s AND {}").format(
            target, sql.SQL(" AND ").join(empty)
        ),
        (place.partition,),
    )


def write_view(session: Session, place: Place, table: KeptTable, batch: Batch) -> None:
    """Merge a batch into a view's table, as its kind says."""
    if table.kind == "row":
        write_rows(session, place, table, batch)
    elif table.kind == "linear":
        write_sums(session, place, table, batch)
    else:
        write_history(session, place, table, batch)


def prepare_view(session: Session, schema_name: str, table: KeptTable) -> None:
    """Make a view's staging table; outside a transaction."""
    if table.kind == "history":
        return  # its rows are copied straight into it
    more = ("present boolean",) if table.kind == "row" else ()
    prepare_stage(session, stage_name(table.name), like(schema_name, table.name, *more))
