"""What one Spark task does with the planned changes of one partition: apply them to its group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from everstate.errors import HeldOverflow, PositionMoved, ViewFailed, ViewStoreError
from everstate.log.positions import Range
from everstate.views.stores.postgres.apply import apply_range
from everstate.views.stores.postgres.group import GroupPlan

_TEXT: pa.DataType = pa.string()
_COUNT: pa.DataType = pa.int64()
_OUTCOME: Final = pa.schema(
    {
        "entity": _TEXT,
        "view_group": _TEXT,
        "partition": pa.int32(),
        "applied": _COUNT,
        "duplicate": _COUNT,
        "held": _COUNT,
        "dead": _COUNT,
        "failed_view": _TEXT,
        "failure": _TEXT,
        "moved": pa.bool_(),
        "unjudged": pa.bool_(),
    }
)
OUTCOME_DDL: Final = (
    "entity string, view_group string, partition int, applied long, duplicate long, held long, "
    "dead long, failed_view string, failure string, moved boolean, unjudged boolean"
)
UNJUDGED: Final = "unjudged"
"""Reason of a record that the rules of :func:`everstate.pipeline.parse.parse` have not seen."""


@dataclass(frozen=True)
class ApplyTask:
    """Applies one partition's range to a view group; pickled to the executors.

    Holds the whole range of its partition in memory, which `pipeline.batch_changes_max` bounds.
    """

    dsn: str
    group: GroupPlan
    spans: Mapping[int, Range]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One line of outcome per partition.

        ``failed_view`` and ``failure``: a view that cannot take a change. ``failure`` alone: the
        group cannot go on. ``moved``: another attempt was here, this one did nothing. ``unjudged``:
        there are records that are not plainly readable, and nothing was done.
        """
        filled = [batch for batch in batches if batch.num_rows]
        if not filled:
            return
        changes = pa.Table.from_batches(filled)
        partitions = pc.unique(changes["partition"]).to_pylist()
        outcomes = []
        for partition in partitions:
            mine = changes
            if len(partitions) > 1:
                mine = changes.filter(pc.equal(changes["partition"], partition))
            outcomes.append(self._apply(partition, mine))
        yield pa.RecordBatch.from_pylist(outcomes, schema=_OUTCOME)

    def _apply(self, partition: int, changes: pa.Table) -> dict[str, str | int | None]:
        group = self.group
        outcome: dict[str, str | int | None] = {
            "moved": False,
            "unjudged": False,
            "entity": group.entity,
            "view_group": group.view_group,
            "partition": partition,
            **dict.fromkeys(("applied", "duplicate", "held", "dead"), 0),
        }
        if pc.any(pc.equal(changes["reason"], UNJUDGED)).as_py():
            return {**outcome, "unjudged": True}
        try:
            done = apply_range(self.dsn, group, partition, self.spans[partition], changes)
        except PositionMoved:
            return {**outcome, "moved": True}
        except ViewFailed as error:
            return {**outcome, "failed_view": error.view, "failure": str(error)}
        except (HeldOverflow, ViewStoreError) as error:
            return {**outcome, "failure": str(error)}
        return {
            **outcome,
            "applied": done.applied,
            "duplicate": done.duplicate,
            "held": done.held,
            "dead": done.dead,
        }
