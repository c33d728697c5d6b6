"""The time at which each entity of a batch was last active."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from everstate.views.batch import Batch

_MOMENT: Final = pa.timestamp("us", tz="UTC")


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
