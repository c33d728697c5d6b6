"""Merges batches into the tables of views: `latest`, rows, sums, history.

Each write stages rows by COPY in a temporary table of this session (never shared, C11) and merges
them with one statement, in the order of the key (C17). All run inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from everstate.postgres import identifier
from everstate.views.batch import Batch
from everstate.views.control.deferring import Deferred
from everstate.views.images import cut_latest, text_of
from everstate.views.kinds.kind import identifiers
from everstate.views.rows import activity, added_rows, newest_rows
from everstate.views.stores.postgres import whole_keys
from everstate.views.stores.postgres.session import StoreSession
from everstate.views.stores.postgres.types import check_range, copied
from everstate.views.sums import sum_deltas
from everstate.views.tables import (
    HISTORY_COLUMNS,
    LATEST_COLUMNS,
    Core,
    KeptTable,
    Merge,
    PythonTable,
    Sum,
)

GATE_STAGE: Final = "stage_gate"
GATE_ROW: Final = """SELECT '' COLLATE "C" AS key, 0::bigint AS first_version, now() AS first_at"""
_TIMES: Final = ("as_of", "occurred_at", "recorded_at")
_CONSTANT: Final = ("generation", "partition")
# In two parts, each exact, because PostgreSQL multiplies intervals by floats.
_MOMENT: Final = (
    "'epoch'::timestamptz + {0} / 1000000 * interval '1 second' "
    "+ {0} % 1000000 * interval '1 microsecond'"
)
_COPY_ROWS: Final = 20_000
_LOCK_LIMIT: Final = b"SET lock_timeout = '5s'"
# The backslash first, because the other escapes contain one.
_ESCAPES: Final = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class WritePlace:
    """The generation and partition of a batch, and the schema that it is written to."""

    schema_name: str
    generation: int
    partition: int

    def table(self, name: str) -> str:
        """A table of the schema, as SQL."""
        return identifier(self.schema_name, name)


def stage_name(table: str) -> str:
    """Name of the temporary table that a table is staged in."""
    return f"stage_{table}"


def stage_of(name: str) -> str:
    """A staging table, as SQL: it exists only in this session, never shared (C11)."""
    return identifier("pg_temp", name)


def prepare_stage(session: StoreSession, name: str, row: str) -> None:
    """Create a temporary table once per session, with the columns of a query.

    Call it outside a transaction, so that the table stays. It waits at most 5 s for a lock.
    """
    if session.staged.get(name) == row:
        return
    create = f"CREATE TEMP TABLE {identifier(name)} ON COMMIT DELETE ROWS AS {row} WITH NO DATA"
    session.connection.execute(_LOCK_LIMIT)
    try:
        session.connection.execute(f"DROP TABLE IF EXISTS {stage_of(name)}".encode())
        session.connection.execute(create.encode())
    finally:
        session.connection.execute("RESET lock_timeout")
    session.staged[name] = row


def like(schema_name: str, table: str, *more: str) -> str:
    """Query with the columns of a table, and ``more`` columns."""
    return f"SELECT {', '.join(('*', *more))} FROM {identifier(schema_name, table)}"


def like_latest(schema_name: str, core: Core) -> str:
    """Query with the columns in which `latest` is staged.

    Times are microseconds since 1970, which PostgreSQL reads in a third of the time of a text.
    """
    columns = [
        f"{'0::bigint AS ' if name in _TIMES else ''}{identifier(name)}"
        for name in LATEST_COLUMNS
        if name not in _CONSTANT
    ]
    columns += ["0::bigint AS first_version", "0::bigint AS first_at"]
    return f"SELECT {', '.join(columns)} FROM {identifier(schema_name, core.table)}"


def copy_rows(
    session: StoreSession,
    table: str,
    columns: Mapping[str, pa.Array | pa.ChunkedArray],
) -> None:
    """COPY columns into a table; nested values are written as JSON text.

    It uses COPY's text format: compared to CSV, which doubles each quote of a JSON text, it is a
    sixth less work for PostgreSQL.
    """
    cells = []
    for values in columns.values():
        whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        cells.append(_cells(copied(whole)))
    rows = len(cells[0])
    if not rows:
        return
    statement = f"COPY {table} ({identifiers(columns)}) FROM STDIN"
    with session.connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
        for start in range(0, rows, _COPY_ROWS):
            copy.write(_lines([each.slice(start, _COPY_ROWS) for each in cells]))
            copy.write(b"\n")


def _cells(values: pa.Array) -> pa.Array:
    """Values as texts, escaped for COPY's text format."""
    cells = values if pa.types.is_string(values.type) else pc.cast(values, pa.string())
    if cells is values:
        written = text_of(values)
        for character, escaped in _ESCAPES.items():
            if character.encode() in written:
                cells = pc.replace_substring(cells, character, escaped)
    return pc.fill_null(cells, "\\N") if cells.null_count else cells


def _lines(cells: Sequence[pa.Array]) -> memoryview:
    """Rows in COPY's text format, without the last line break."""
    lines = pc.binary_join_element_wise(*cells, "\t")
    whole = pa.ListArray.from_arrays(pa.array([0, len(lines)], pa.int32()), lines)
    return memoryview(pc.binary_join(whole, "\n").buffers()[2])


def merge(session: StoreSession, query: str) -> psycopg.Cursor[Any]:
    """Run a query over a staging table.

    It is not prepared, so that it is planned each time: a plan for small tables would be reused
    for large ones.
    """
    return session.connection.execute(query.encode(), prepare=False)


def _constant(value: int, rows: int) -> pa.Array:
    return pa.array(np.full(rows, value, dtype=np.int64))


def _places(place: WritePlace, changes: pa.Table) -> dict[str, pa.Array]:
    return {
        "generation": _constant(place.generation, changes.num_rows),
        "partition": _constant(place.partition, changes.num_rows),
        "offset": changes["offset"],
    }


def _stage_latest(session: StoreSession, core: Core, batch: Batch) -> str:
    """Stage the newest change of each key, in the order of the keys."""
    changes, keys = batch.changes, batch.keys
    # With a history all images are extracted anyway; without one only the newest images are.
    if any(rider.merge == "history" for rider in core.riders):
        provenance = batch.newest(batch.images.provenance)
        state = batch.newest(batch.images.state)
    else:
        provenance, state = cut_latest(batch.newest(changes["raw_value"]))
    columns = {
        "key": keys.names,
        "version": batch.newest(changes["version"]),
        "change_id": batch.newest(changes["id"]),
        "kind": batch.newest(changes["kind"]),
        "as_of": batch.newest(batch.as_of),
        "occurred_at": batch.newest(changes["occurred_at"]),
        "recorded_at": batch.newest(changes["recorded_at"]),
        "offset": batch.newest(changes["offset"]),
        "provenance": provenance,
        "state": state,
        "first_version": pa.array(keys.versions[keys.firsts]),
        "first_at": pa.array(keys.occurred[keys.firsts]),
    }
    for name in _TIMES:
        check_range(columns[name])
        columns[name] = columns[name].cast(pa.int64())
    stage = stage_of(stage_name(core.table))
    copy_rows(session, stage, columns)
    return stage


def _latest_row(place: WritePlace) -> dict[str, str]:
    """Expression of each column of a row of `latest`, from the staged columns."""
    row: dict[str, str] = {}
    for name in LATEST_COLUMNS:
        if name in _CONSTANT:
            row[name] = f"{getattr(place, name)}::int"
        else:
            form = _MOMENT if name in _TIMES else "{0}"
            row[name] = form.format(identifier("staged", name))
    return row


def write_latest(session: StoreSession, place: WritePlace, core: Core, batch: Batch) -> None:
    """Put the newest change of each key into `latest`, which is the gate."""
    stage = _stage_latest(session, core, batch)
    row = ", ".join(_latest_row(place).values())
    _upsert_newest(session, place.table(core.table), stage, LATEST_COLUMNS, row)


def write_next(
    session: StoreSession, place: WritePlace, core: Core, batch: Batch
) -> dict[str, datetime] | None:
    """Put the newest change of each key into `latest`, if its first one follows the stored version.

    ``None``: the first change of some key does not follow. Else the stored as-of times of keys with
    an older change, if a history rides. Raises UniqueViolation when a key whose first change is
    version 1 exists already.
    """
    row, stage = _latest_row(place), _stage_latest(session, core, batch)
    table = place.table(core.table)
    first = batch.keys.versions[batch.keys.firsts]
    created = int(np.count_nonzero(first == 1))
    if created:
        names, values = identifiers(row), ", ".join(row.values())
        new = f"SELECT {values} FROM {stage} AS staged WHERE first_version = 1"
        merge(session, f"INSERT INTO {table} ({names}) {new}")
    left = len(first) - created
    if not left:
        return {}
    # The as-of time never decreases, also where no history needs the stored one.
    row["as_of"] = f"greatest(kept.as_of, {row['as_of']})"
    del row["key"]
    follows = "kept.key = staged.key AND first_version > 1 AND kept.version = first_version - 1"
    update = (
        f"UPDATE {table} AS kept SET ({identifiers(row)}) = ROW({', '.join(row.values())}) "
        f"FROM {stage} AS staged WHERE {follows}"
    )
    if not any(rider.merge == "history" for rider in core.riders):
        return {} if merge(session, update).rowcount == left else None
    in_time = f"{update} AND kept.as_of <= {_MOMENT.format('first_at')}"
    left -= merge(session, in_time).rowcount
    if not left:
        return {}
    # The remaining keys are late, or do not follow.
    asked = f"SELECT kept.key, kept.as_of FROM {table} AS kept JOIN {stage} AS staged ON {follows}"
    late = dict(merge(session, asked).fetchall())
    return late if merge(session, update).rowcount == left else None


def _upsert_newest(
    session: StoreSession,
    table: str,
    stage: str,
    names: Sequence[str],
    row: str,
    condition: str = "",
    greatest: Sequence[str] = (),
) -> None:
    """Merge staged rows whose first two columns are key and version; the newest version wins.

    ``greatest``: columns of which the greatest value stays.
    """
    rest = [name for name in names[1:] if name not in greatest]
    also = "".join(f", {name} = greatest(kept.{name}, excluded.{name})" for name in greatest)
    values = ", ".join(identifier("excluded", name) for name in rest)
    merge(
        session,
        f"INSERT INTO {table} AS kept ({identifiers(names)}) SELECT {row} FROM {stage} AS staged "
        f"{condition} ORDER BY key ON CONFLICT (key) DO UPDATE "
        f"SET ({identifiers(rest)}) = ROW({values}){also} WHERE kept.version < excluded.version",
    )


def write_history(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Append every change to `history`, in the order of its index: a fifth less work for it."""
    order = pa.array(batch.keys.order)
    plain = ("key", "version", "id", "kind", "occurred_at", "recorded_at", "schema_version")
    changes = batch.changes.select([*plain, "offset"]).take(order)
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
        **batch.images.take(order)._asdict(),
    }
    assert tuple(columns) == HISTORY_COLUMNS
    copy_rows(session, place.table(table.name), columns)


def write_rows(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Put the newest row of each key into a view of rows; delete the row of a key without one."""
    columns = newest_rows(table, batch)
    stage = stage_of(stage_name(table.name))
    copy_rows(session, stage, columns)
    target = place.table(table.name)
    if columns["present"].false_count:
        gone = "WHERE kept.key = gone.key AND NOT gone.present"
        merge(session, f"DELETE FROM {target} AS kept USING {stage} AS gone {gone}")
    names = ("key", "version", *table.columns)
    _upsert_newest(session, target, stage, names, identifiers(names), "WHERE present")


def write_whole_keys(
    session: StoreSession, place: WritePlace, table: PythonTable, batch: Batch
) -> None:
    """Replace all rows of the keys in a batch."""
    rows = whole_keys.rows_of(session, place.schema_name, table, batch)
    target, keys = place.table(table.name), (batch.keys.names.to_pylist(),)
    session.connection.execute(f"DELETE FROM {target} WHERE key = ANY(%s)".encode(), keys)
    copy_rows(session, target, {name: rows[name] for name in rows.column_names})


def write_cache(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Put the newest state of each key into a view of rows that expire, and delete expired ones.

    Expired at the time of the partition's newest change: readers compare with the newest change of
    all partitions, which is never older. The newest row stays, because its time is the present.
    """
    columns = newest_rows(table, batch)
    columns["shard"] = _constant(place.partition, len(batch.keys))
    columns["activity"] = activity(batch)
    stage = stage_of(stage_name(table.name))
    copy_rows(session, stage, columns)
    target, names = place.table(table.name), tuple(columns)
    _upsert_newest(session, target, stage, names, identifiers(names), greatest=("activity",))
    shard = (place.partition, place.partition, table.lifetime_us)
    session.connection.execute(_EXPIRED.format(table=target).encode(), shard)


def write_changes(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Append a row for each change for which the view's WHERE holds."""
    rows = added_rows(table, batch)
    copy_rows(session, place.table(table.name), rows)


_EXPIRED: Final = (
    "DELETE FROM {table} WHERE shard = %s AND activity <= "
    "(SELECT max(activity) FROM {table} WHERE shard = %s) - %s * INTERVAL '1 microsecond'"
)
_TOGETHER: Final[Mapping[Sum, str]] = {
    "count": "{0} = kept.{0} + excluded.{0}",
    "sum": "{0} = kept.{0} + excluded.{0}",
    "max": "{0} = greatest(kept.{0}, excluded.{0})",
    "min": "{0} = least(kept.{0}, excluded.{0})",
}
"""How a stored sum is combined with another one; nulls are ignored."""


def write_sums(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Add the row deltas of the changes to a view of sums, in this partition's shard."""
    deltas = sum_deltas(table, batch.changes)
    if not deltas.num_rows:
        return
    columns = {name: deltas[name] for name in deltas.column_names}
    columns["shard"] = _constant(place.partition, deltas.num_rows)
    stage = stage_of(stage_name(table.name))
    copy_rows(session, stage, columns)
    target = place.table(table.name)
    sums = [name for name, _ in table.sums]
    added = ", ".join(_TOGETHER[kind].format(identifier(name)) for name, kind in table.sums)
    groups = (*table.groups, "shard")
    names, grouped = identifiers((*groups, *sums)), identifiers(groups)
    merge(
        session,
        f"INSERT INTO {target} AS kept ({names}) SELECT {names} FROM {stage} ORDER BY {grouped} "
        f"ON CONFLICT ({grouped}) DO UPDATE SET {added}",
    )
    if table.images[0] != "original":
        return  # changes are never subtracted, so no count becomes 0
    empty = " AND ".join(f"{identifier(name)} = 0" for name in sums)
    delete = f"DELETE FROM {target} WHERE shard = %s AND {empty}"
    session.connection.execute(delete.encode(), (place.partition,))


_MERGES: Final[Mapping[Merge, Callable[[StoreSession, WritePlace, Any, Batch], None]]] = {
    "row": write_rows,
    "cache": write_cache,
    "keys": write_whole_keys,
    "sum": write_sums,
    "append": write_changes,
    "history": write_history,
}


def write_view(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Merge the changes that a view takes into its table; store throttled ones as deferred."""
    if table.has_rules:
        batch = deferred_of(session, place, table).pass_on(batch)
    if batch.changes.num_rows:
        merge_view(session, place, table, batch)


def deferred_of(session: StoreSession, place: WritePlace, table: KeptTable) -> Deferred:
    """The deferred changes of a view in a partition."""
    at = (place.generation, place.partition)
    return Deferred(session.connection, place.schema_name, table, *at)


def merge_view(session: StoreSession, place: WritePlace, table: KeptTable, batch: Batch) -> None:
    """Merge a batch into a view's table."""
    _MERGES[table.merge](session, place, table, batch)


def prepare_view(session: StoreSession, schema_name: str, table: KeptTable) -> None:
    """Create a view's staging table, if it has one; call it outside a transaction."""
    if table.merge in ("row", "cache", "sum"):  # others are copied directly into the table
        # A view of rows that expire has the column itself.
        more = ("true AS present",) if table.merge == "row" else ()
        prepare_stage(session, stage_name(table.name), like(schema_name, table.name, *more))
