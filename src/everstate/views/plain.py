"""The fast path for a plain range: all its changes apply in their order, as nearly always.

Here the write itself is the version gate. Keys whose first change is version 1 are inserted, and
an existing row of such a key is an error; rows of all other keys are updated only where their
version is the previous one. When fewer rows than keys were written, or the range is not plain,
nothing is done, and the range is judged record by record (:mod:`everstate.views.core`). The stored
rows are the same on both paths: a property test compares them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from everstate.errors import PositionMoved
from everstate.log.positions import Range
from everstate.views.batch import Batch
from everstate.views.core import Again, Applied, CoreStore
from everstate.views.gate import Keys
from everstate.views.tables import Core


def apply_plain(
    store: CoreStore, core: Core, partition: int, given: Range, changes: pa.Table
) -> Applied | None:
    """Write one partition's range in one commit, if every change in it applies.

    ``None``: the range must be judged, and nothing was done. The reason is an unreadable record, a
    key whose versions are not consecutive or do not follow the stored one, a change of a key with
    held changes, or a row that the store refuses. Raises PositionMoved when the core is not at the
    range's start, and Unavailable when the store cannot be reached; nothing is changed then.
    Cost: array operations, and two statements for `latest`.
    """
    offsets = changes["offset"].to_numpy()
    ordered = bool(np.all(offsets[1:] > offsets[:-1]))
    within = not len(offsets) or (offsets[0] >= given.start and offsets[-1] < given.end)
    if not ordered or not within or changes["reason"].null_count < changes.num_rows:
        return None
    keys = Keys(changes)
    if not keys.dense().all():
        return None
    try:
        with store.transaction(core, partition) as opened:
            if not opened.take(given.start, given.end):
                raise PositionMoved(
                    f"{core.view} is not at offset {given.start:,} of partition {partition}.",
                    advice="Read the positions again.",
                )
            waiting = opened.held_keys()
            if waiting and any(code is not None for code in keys.codes_of(waiting)):
                return None
            if opened.unstorable(changes):
                return None
            batch = Batch(changes, {}, keys)
            floors = opened.write_next(batch)
            if floors is None:
                return None
            failures = opened.ride(core.riders, given.start, given.end, batch.after(floors))
            applied = Applied(applied=changes.num_rows, failures=tuple(failures))
            opened.count(applied)
            opened.commit(given.end)
            return applied
    except Again:
        return None
