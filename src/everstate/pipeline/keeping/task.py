"""The Spark task that applies the planned changes of a partition to the views' database."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from everstate.errors import HeldOverflow, PositionMoved, StoreSilent, ViewFailed, ViewStoreError
from everstate.log.positions import Range
from everstate.pipeline.spark.outcomes import outcome_rows
from everstate.pipeline.spark.plain_bytes import plain_bytes
from everstate.views.core import Applied, Failure, apply_range
from everstate.views.plain import apply_plain
from everstate.views.stores import PostgresViewStore
from everstate.views.tables import Core, KeptTable, packed_column, planned_columns
from everstate.views.trailing import TrailingStore, trail_range

UNCOMPUTED: Final = "its SQL cannot be computed for this change"
UNJUDGED: Final = "unjudged"
"""Reason of a record that :func:`~everstate.pipeline.spark.parse.parse` has not checked by its
rules."""


@dataclass(frozen=True)
class ApplyTask:
    """Applies one partition's range to a core, or to one trailing view; pickled to the executors.

    Holds the whole range of its partition in memory; `keeping.batches` bounds it.
    """

    dsn: str
    schema_name: str
    core: Core
    spans: Mapping[int, Range]
    view: KeptTable | None = None
    """The view that trails; ``None``: the core."""
    store: TrailingStore | None = None
    """The store of that view."""
    meets: frozenset[int] = frozenset()
    """Partitions in which the core is locked meanwhile, so that the view meets it (V7)."""
    judged: bool = True
    """Whether all rules have checked the records; if not, only plain ranges are applied."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One outcome row per partition.

        ``failures``: riders that could not apply the range, as JSON. ``failure``: why the core, or
        the trailing view, cannot proceed. ``moved``: another attempt moved the position first, and
        this one did nothing. ``unjudged``: the range is not plain, and nothing was done.
        ``bytes``: the memory that the changes take.
        """
        _freeze_once()
        filled, odd = [], set[int]()
        for batch in batches:
            if batch.num_rows and not self.judged and not plain_bytes(batch):
                odd.update(pc.unique(batch["partition"]).to_pylist())
            if batch.num_rows:
                filled.append(batch)
        if not filled:
            return
        changes = pa.Table.from_batches(filled)
        partitions = pc.unique(changes["partition"]).to_pylist()
        outcomes = list[dict[str, Any]]()
        for partition in partitions:
            if outcomes and outcomes[-1]["silent"]:  # it would hold Spark's slot as long again
                outcomes.append({**outcomes[-1], "partition": partition})
                continue
            mine = changes
            if len(partitions) > 1:
                mine = changes.filter(pc.equal(changes["partition"], partition))
            outcomes.append(self._outcome(partition, mine, odd=partition in odd))
        yield outcome_rows(outcomes)

    def _outcome(self, partition: int, changes: pa.Table, *, odd: bool) -> dict[str, Any]:
        outcome: dict[str, Any] = {
            "moved": False,
            "unjudged": False,
            "silent": False,
            "entity": self.core.entity,
            "partition": partition,
            "bytes": changes.nbytes,
            **dict.fromkeys(("applied", "duplicate", "held", "dead"), 0),
            "failures": [],
            "failure": None,
        }
        try:
            done = None if odd else self._apply(partition, changes)
        except PositionMoved:
            return {**outcome, "moved": True}
        except (HeldOverflow, ViewFailed, ViewStoreError) as error:
            is_silent = isinstance(error, StoreSilent)
            return {**outcome, "failure": str(error), "silent": is_silent}
        if done is None:
            return {**outcome, "unjudged": True}
        failures = [(found.view, found.version, found.reason) for found in done.failures]
        return {
            **outcome,
            "applied": done.applied,
            "duplicate": done.duplicate,
            "held": done.held,
            "dead": done.dead,
            "failures": failures,
        }

    def _apply(self, partition: int, changes: pa.Table) -> Applied | None:
        span = self.spans[partition]
        if self.view is not None and self.store is not None:
            columns = dict(zip(changes.column_names, changes.columns, strict=True))
            _unpack(self.view, columns)
            changes, meets = pa.table(columns), partition in self.meets
            given = (self.core, self.view, partition, span, changes)
            return trail_range(self.store, *given, meets=meets)
        store = PostgresViewStore(self.dsn, self.schema_name)
        core, changes, failures = without_failed(self.core, changes)
        apply = apply_range if self.judged else apply_plain
        applied = apply(store, core, partition, span, changes)
        return applied and replace(applied, failures=(*applied.failures, *failures))


def without_failed(core: Core, changes: pa.Table) -> tuple[Core, pa.Table, list[Failure]]:
    """The columns of the riders, unpacked; a rider whose SQL failed on a change does not ride.

    ``changes`` were planned with ``caught``. Cost: some array operations for each rider.
    """
    columns = dict(zip(changes.column_names, changes.columns, strict=True))
    riders, failures = [], []
    for rider in core.riders:
        try:
            _unpack(rider, columns)
        except ViewFailed as cause:
            failures.append(Failure(rider.view, rider.version, str(cause)))
        else:
            riders.append(rider)
    return replace(core, riders=tuple(riders)), pa.table(columns), failures


def _unpack(view: KeptTable, columns: dict[str, pa.ChunkedArray]) -> None:
    """Put a view's columns in the place of its packed one.

    Raises ViewFailed, with the first change on which the view's SQL fails.
    """
    names = planned_columns(view)
    if not names:
        return
    packed = columns.pop(packed_column(view))
    if packed.null_count:
        row = pc.index(packed.is_null(), True).as_py()
        change = {name: columns[name][row].as_py() for name in ("offset", "key")}
        raise ViewFailed(view.view, UNCOMPUTED, **change)
    columns |= {name: pc.struct_field(packed, [place]) for place, name in enumerate(names)}


@cache
def _freeze_once() -> None:
    """Exclude imported modules from garbage collection.

    Spark's worker collects after every task; traversing all modules again was a sixth of its time.
    """
    gc.collect()
    gc.freeze()
