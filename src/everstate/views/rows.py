"""The rows that a batch of changes gives a view, by how its table merges them, for any store."""

from __future__ import annotations

import pyarrow as pa

from everstate.views.batch import Batch
from everstate.views.tables import KeptTable, planned_column


def newest_rows(table: KeptTable, batch: Batch) -> dict[str, pa.Array]:
    """The newest row of each key; one that the view does not show is not `present`."""
    images = batch.newest(batch.changes[planned_column(table, "current")])
    return {
        "key": batch.keys.names,
        "version": batch.newest(batch.changes["version"]),
        **dict(zip(table.columns, images.flatten(), strict=True)),
        "present": images.is_valid(),
    }


def added_rows(table: KeptTable, batch: Batch) -> dict[str, pa.Array | pa.ChunkedArray]:
    """A row for each change for which the view's WHERE holds."""
    images = batch.changes[planned_column(table, "change")].combine_chunks()
    present = images.is_valid()
    fields = dict(zip(table.columns, images.filter(present).flatten(), strict=True))
    own = {name: batch.changes[name].filter(present) for name in ("key", "version")}
    return {**own, **fields}
