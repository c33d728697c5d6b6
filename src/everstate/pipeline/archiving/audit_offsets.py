"""The part of the audit that runs in Spark's tasks: offsets of one piece of one partition.

A piece is a run of offsets that one task can hold in memory. The task compares its rows with the
ledger, finds missing and duplicate offsets, and checks the missing ones with its own readers of
the live log. So the driver gets a few numbers per piece, however many offsets there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from everstate.archive import record_parts
from everstate.archive.ordered import RECORD_COLUMNS
from everstate.closing import Closing
from everstate.config import Config
from everstate.log.client import READ_COMMITTED, READ_UNCOMMITTED
from everstate.log.consumer import Consumer
from everstate.log.record import Record
from everstate.pipeline.spark.outcomes import outcome_rows

PIECE_OFFSETS: Final = 1 << 17
SAMPLES_MAX: Final = 20
_NEAR_OFFSETS: Final = 10_000

_Offsets = npt.NDArray[np.int64]
OffsetRun = tuple[int, int]
"""Offsets ``[start, end)`` inside a committed range for which the archive has no record."""


@dataclass
class PieceResult:
    """What one task found; lists hold only the first few offsets."""

    generation: int
    partition: int
    piece: int
    rows: int = 0
    range_rows: list[int] = field(default_factory=list)
    twice: int = 0
    twice_at: list[int] = field(default_factory=list)
    extra: int = 0
    extra_at: list[int] = field(default_factory=list)
    marker_offsets: int = 0
    aborted_offsets: int = 0
    unproved_offsets: int = 0
    lost: int = 0
    lost_at: list[int] = field(default_factory=list)
    run_starts: list[int] = field(default_factory=list)
    run_ends: list[int] = field(default_factory=list)
    run_kinds: list[str] = field(default_factory=list)
    compared: int = 0
    differing: int = 0
    differing_at: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PieceCheck:
    """Checks the rows of one piece; Spark calls it once per group.

    In: rows of the archive (``offset`` set) and one row of the ledger's ranges in this piece
    (``starts``, ``ends``, and ``log_begin`` and ``log_end``: the offsets that the live log has,
    both 0 when there is no such log). Out: a :class:`PieceResult`, as an outcome.
    """

    config: Config
    topics: dict[int, str]
    against_log: bool

    def __call__(self, key: tuple[Any, ...], table: pa.Table) -> pa.Table:
        """Check one group."""
        generation, partition, piece = (value.as_py() for value in key)
        result = PieceResult(generation, partition, piece)
        ledger = table.select(["starts", "ends", "log_begin", "log_end"])
        expected = ledger.filter(table["offset"].is_null()).to_pylist()
        rows = table.filter(table["offset"].is_valid())
        offsets = np.sort(rows["offset"].to_numpy())
        starts = np.array(expected[0]["starts"] if expected else [], dtype=np.int64)
        ends = np.array(expected[0]["ends"] if expected else [], dtype=np.int64)
        unique = _count(result, offsets, starts, ends)
        runs = list(_runs(unique, starts, ends))
        log = (expected[0]["log_begin"], expected[0]["log_end"]) if expected else (0, 0)
        topic = self.topics[generation]
        with _Proofs(self.config, topic, partition) as proofs:
            proofs.prove(result, runs, log)
            if self.against_log:
                for start, end in _stretches(starts, ends):
                    span = (max(start, log[0]), min(end, log[1]))
                    _compare(result, rows, span, proofs.read(*span))
        return pa.Table.from_batches([outcome_rows([vars(result)])])


def _count(result: PieceResult, offsets: _Offsets, starts: _Offsets, ends: _Offsets) -> _Offsets:
    """Count rows: all, per range, duplicate, outside every range; returns the unique offsets."""
    result.rows = len(offsets)
    in_ranges = np.searchsorted(offsets, ends) - np.searchsorted(offsets, starts)
    result.range_rows = [int(rows) for rows in in_ranges]
    doubled = offsets[1:][np.diff(offsets) == 0]
    result.twice, result.twice_at = len(doubled), _first(doubled)
    if len(offsets) > int(in_ranges.sum()):
        at = np.searchsorted(starts, offsets, side="right") - 1
        inside = (at >= 0) & (offsets < ends[at]) if len(starts) else np.zeros(len(offsets), bool)
        outside = offsets[~inside]
        result.extra, result.extra_at = len(outside), _first(outside)
    return np.unique(offsets)


def _runs(unique: _Offsets, starts: _Offsets, ends: _Offsets) -> Iterator[OffsetRun]:
    for start, end in _stretches(starts, ends):
        here = unique[np.searchsorted(unique, start) : np.searchsorted(unique, end)]
        edges = np.concatenate(([start - 1], here, [end]))
        for at in np.flatnonzero(np.diff(edges) > 1):
            yield int(edges[at]) + 1, int(edges[at + 1])


def _stretches(starts: _Offsets, ends: _Offsets) -> Iterator[OffsetRun]:
    """The ranges, with adjacent ones merged."""
    begin = reached = None
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if reached is not None and start > reached:
            assert begin is not None, "set together"
            yield begin, reached
            begin = None
        begin = start if begin is None else begin
        reached = end
    if begin is not None and reached is not None:
        yield begin, reached


class _Proofs(Closing):
    """Looks up missing offsets in the live log, with readers that do not use the archive."""

    def __init__(self, config: Config, topic: str, partition: int) -> None:
        self._config, self._topic, self._partition = config, topic, partition
        self._logs: dict[str, Consumer] = {}

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def prove(self, result: PieceResult, runs: Sequence[OffsetRun], log: OffsetRun) -> None:
        """Sort the runs' offsets into lost, aborted, markers, and those that cannot be proved now.

        ``log``: the first and the end offset of the live log.
        """
        if not runs:
            return
        readable = []
        for start, end in runs:
            first, last = max(start, log[0]), min(end, log[1])
            if first < last:
                readable.append((first, last))
            for at, stop in ((start, min(end, log[0])), (max(start, log[1]), end)):
                if at < stop:
                    result.unproved_offsets += stop - at
                    _note_run(result, at, stop, "unproved")
        lost = self._served(readable, READ_COMMITTED)
        result.lost, result.lost_at = len(lost), sorted(lost)[:SAMPLES_MAX]
        aborted = self._served(readable, READ_UNCOMMITTED) - lost
        result.aborted_offsets += len(aborted)
        for start, end in readable:
            length = end - start
            here = sum(offset in aborted for offset in range(start, end)) if aborted else 0
            gone = sum(offset in lost for offset in range(start, end)) if lost else 0
            result.marker_offsets += length - here - gone
            _note_run(result, start, end, "lost" if gone else "aborted" if here else "marker")

    def read(self, start: int, end: int, isolation: str = READ_COMMITTED) -> Iterator[Record]:
        """Records of the live log in ``[start, end)``."""
        if isolation not in self._logs:
            self._logs[isolation] = Consumer(
                self._config, isolation=isolation, client_id="everstate-audit"
            )
        return self._logs[isolation].read(self._topic, self._partition, start, end)

    def _served(self, runs: Sequence[OffsetRun], isolation: str) -> set[int]:
        """Offsets of the runs at which this isolation serves a record."""
        found: set[int] = set()
        for near in _neighbours(runs):
            wanted = {offset for start, end in near for offset in range(start, end)}
            for record in self.read(near[0][0], near[-1][1], isolation):
                if record.offset in wanted:
                    found.add(record.offset)
        return found


def _neighbours(runs: Sequence[OffsetRun]) -> Iterator[list[OffsetRun]]:
    """Groups of runs close together, read at once: a seek costs like some thousand records."""
    near: list[OffsetRun] = []
    for run in runs:
        if near and run[0] - near[-1][1] > _NEAR_OFFSETS:
            yield near
            near = []
        near.append(run)
    if near:
        yield near


def _compare(result: PieceResult, rows: pa.Table, span: OffsetRun, log: Iterator[Record]) -> None:
    """Compare the archive's rows of a span with what the live log serves there, byte for byte.

    A row that the log does not serve counts as different: the log lost it, and was written since.
    """
    archived = {
        parts[1]: parts
        for batch in rows.select(list(RECORD_COLUMNS)).to_batches(10_000)
        for parts in record_parts(batch)
        if span[0] <= parts[1] < span[1]
    }
    different = []
    for record in log:
        result.compared += 1
        served = (
            *(record.partition, record.offset, record.timestamp_ms),
            *(record.key, record.value, record.headers, record.timestamp_type),
        )
        if archived.pop(record.offset, None) != served:
            different.append(record.offset)
    different += archived
    result.differing += len(different)
    room = SAMPLES_MAX - len(result.differing_at)
    result.differing_at += sorted(different)[:room]


def _note_run(result: PieceResult, start: int, end: int, kind: str) -> None:
    if len(result.run_starts) < SAMPLES_MAX or kind == "lost":
        result.run_starts.append(start)
        result.run_ends.append(end)
        result.run_kinds.append(kind)


def _first(offsets: _Offsets) -> list[int]:
    return [int(offset) for offset in offsets[:SAMPLES_MAX]]
