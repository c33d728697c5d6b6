"""What one Spark task does with the planned changes of one partition: apply them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from everstate.errors import HeldOverflow, PositionMoved, ViewFailed, ViewStoreError
from everstate.log.positions import Range
from everstate.views.core import Applied, apply_range
from everstate.views.stores import view_store
from everstate.views.tables import Core, KeptTable
from everstate.views.trailing import trail_range

_TEXT: pa.DataType = pa.string()
_COUNT: pa.DataType = pa.int64()
_OUTCOME: Final = pa.schema(
    {
        "entity": _TEXT,
        "partition": pa.int32(),
        "applied": _COUNT,
        "duplicate": _COUNT,
        "held": _COUNT,
        "dead": _COUNT,
        "failures": _TEXT,
        "failure": _TEXT,
        "moved": pa.bool_(),
        "unjudged": pa.bool_(),
    }
)
OUTCOME_DDL: Final = (
    "entity string, partition int, applied long, duplicate long, held long, dead long, "
    "failures string, failure string, moved boolean, unjudged boolean"
)
UNJUDGED: Final = "unjudged"
"""Reason of a record that the rules of :func:`everstate.pipeline.parse.parse` have not seen."""


@dataclass(frozen=True)
class ApplyTask:
    """Applies one partition's range to a core, or to one trailing view; pickled to the executors.

    Holds the whole range of its partition in memory, which `pipeline.batch_changes_max` bounds.
    """

    dsn: str
    schema_name: str
    core: Core
    spans: Mapping[int, Range]
    view: KeptTable | None = None
    """The view that trails; ``None``: the core."""
    meets: frozenset[int] = frozenset()
    """Partitions in which the core stands still meanwhile (V7)."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One line of outcome per partition.

        ``failures``: riders that could not take the range, as JSON. ``failure``: the core, or the
        trailing view, cannot go on. ``moved``: another attempt was here, this one did nothing.
        ``unjudged``: there are records that are not plainly readable, and nothing was done.
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
            outcomes.append(self._outcome(partition, mine))
        yield pa.RecordBatch.from_pylist(outcomes, schema=_OUTCOME)

    def _outcome(self, partition: int, changes: pa.Table) -> dict[str, Any]:
        outcome: dict[str, Any] = {
            "moved": False,
            "unjudged": False,
            "entity": self.core.entity,
            "partition": partition,
            **dict.fromkeys(("applied", "duplicate", "held", "dead"), 0),
        }
        if pc.any(pc.equal(changes["reason"], UNJUDGED)).as_py():
            return {**outcome, "unjudged": True}
        try:
            done = self._apply(partition, changes)
        except PositionMoved:
            return {**outcome, "moved": True}
        except (HeldOverflow, ViewFailed, ViewStoreError) as error:
            return {**outcome, "failure": str(error)}
        failures = [(found.view, found.version, found.reason) for found in done.failures]
        return {
            **outcome,
            "applied": done.applied,
            "duplicate": done.duplicate,
            "held": done.held,
            "dead": done.dead,
            "failures": orjson.dumps(failures).decode() if failures else None,
        }

    def _apply(self, partition: int, changes: pa.Table) -> Applied:
        store, span = view_store(self.dsn, self.schema_name), self.spans[partition]
        if self.view is None:
            return apply_range(store, self.core, partition, span, changes)
        meets = partition in self.meets
        return trail_range(store, self.core, self.view, partition, span, changes, meets=meets)
