"""Rows that expire: their last activity, deleted rows, and the removal of expired rows."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from psycopg import sql

from everstate.views.activity import activity
from everstate.views.batch import Batch
from everstate.views.stores.postgres.session import StoreSession
from everstate.views.tables import RowTable, planned_column

_MERGED: Final = (
    "INSERT INTO {table} AS kept ({names}) SELECT {names} FROM {stage} ORDER BY key "
    "ON CONFLICT (key) DO UPDATE SET ({rest}) = ROW({values}), "
    "activity = greatest(kept.activity, excluded.activity) WHERE kept.version < excluded.version"
)
_EXPIRED: Final = (
    "DELETE FROM {table} WHERE shard = %s AND activity <= "
    "(SELECT max(activity) FROM {table} WHERE shard = %s) - %s * INTERVAL '1 microsecond'"
)


def columns_of(table: RowTable, batch: Batch, partition: int) -> dict[str, pa.Array]:
    """The rows of a batch: the newest state of each key, and its latest activity."""
    newest = batch.changes.take(pa.array(batch.keys.lasts))
    images = newest[planned_column(table, "current")].combine_chunks()
    return {
        "key": newest["key"],
        "version": newest["version"],
        "shard": pa.array(np.full(newest.num_rows, partition, dtype=np.int64)),
        "activity": activity(batch),
        "present": images.is_valid(),
        **dict(zip(table.columns, images.flatten(), strict=True)),
    }


def merge_rows(
    session: StoreSession, table: sql.Identifier, stage: sql.Identifier, names: list[str]
) -> None:
    """Merge staged rows: the newest version wins, and so does the latest activity."""
    rest = [name for name in names if name not in ("key", "activity")]
    session.connection.execute(
        sql.SQL(_MERGED).format(
            table=table,
            stage=stage,
            names=sql.SQL(", ").join(map(sql.Identifier, names)),
            rest=sql.SQL(", ").join(map(sql.Identifier, rest)),
            values=sql.SQL(", ").join(sql.Identifier("excluded", name) for name in rest),
        )
    )


def remove_expired(
    session: StoreSession, table: sql.Identifier, lifetime_us: int, partition: int
) -> None:
    """Delete a partition's rows that are expired at the time of its newest change.

    Readers compare with the newest change of all partitions, which is never older. The newest row
    stays, because its time is the present.
    """
    statement = sql.SQL(_EXPIRED).format(table=table)
    session.connection.execute(statement, (partition, partition, lifetime_us))
