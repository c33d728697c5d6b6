"""The rows that a batch of changes gives a view, by how its table merges them, for any store."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from everstate.views.batch import Batch
from everstate.views.tables import KeptTable, planned_column

_MOMENT: Final = pa.timestamp("us", tz="UTC")


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


def period_rows(table: KeptTable, batch: Batch) -> dict[str, pa.Array | pa.ChunkedArray]:
    """A row for each change; one after which the view does not show the entity is not `present`."""
    images = batch.changes[planned_column(table, "current")].combine_chunks()
    return {
        **{name: batch.changes[name] for name in ("key", "version")},
        **dict(zip(table.columns, images.flatten(), strict=True)),
        "valid_from": batch.changes["occurred_at"].cast(_MOMENT),
        "present": images.is_valid(),
    }


def activity(batch: Batch) -> pa.Array:
    """The newest time of the changes of each key, in the order of `batch.keys.lasts`.

    A change cannot occur after it was recorded, so its time is the earlier of the two times.
    """
    changes, keys = batch.changes, batch.keys
    moments = np.minimum(*(_whole(changes[name]) for name in ("occurred_at", "recorded_at")))
    latest = np.maximum.reduceat(moments[keys.order], keys.starts)
    return pa.array(latest).cast(_MOMENT)


def _whole(moments: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Microseconds since 1970; NumPy cannot compare Arrow's times with a zone."""
    found: npt.NDArray[np.int64] = moments.cast(_MOMENT).cast(pa.int64()).to_numpy()
    return found
