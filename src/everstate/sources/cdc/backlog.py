"""What was read of a capture's raw topics and is not published yet.

A queue for each partition, behind the gate of source transactions. In memory only: after a restart
it is read again, from the positions that :meth:`Backlog.needed_from` told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.gate import Place, TransactionGate
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import (
    MESSAGES,
    TRANSACTIONS,
    EndedTransaction,
    NotedProvenance,
    Parsed,
    RefusedRow,
)
from everstate.sources.cdc.versioning import RawPlace

SINGLE: Final = (TRANSACTIONS, MESSAGES)
"""Raw topics of one partition, which tell about rows and have none themselves."""
_BATCH_ROWS_MAX: Final = 20_000
SourceRows = list[tuple[RawPlace, CleanRow | RefusedRow]]
"""Rows in the order in which they are taken, each with its place in the raw topics."""


@dataclass(slots=True)
class _Queue:
    """What was read of one partition, by record: its offset and its rows."""

    read_to: int
    records: deque[tuple[int, list[CleanRow | RefusedRow]]] = field(default_factory=deque)
    order: tuple[int, ...] = ()
    """Greatest place in the source's log so far: rows without one of their own follow it."""


class Backlog:
    """The queues of one capture: :meth:`add`, ask what is :meth:`ready`, :meth:`forget` that.

    Takes time as an argument (seconds, of one clock) and does no input or output.
    """

    def __init__(
        self, capture: Capture, topics: Mapping[str, str], begins: Mapping[Place, int]
    ) -> None:
        """``topics``: raw topic → its name's last part. ``begins``: first offset to be read."""
        self.gate = TransactionGate(capture.transaction_wait_s)
        self._is_grouped = capture.transactions
        self._has_ends = TRANSACTIONS in topics.values()
        self._prefixes = {t.provenance.message_prefix for t in capture.tables.values()}
        self._single = {topic for topic, part in topics.items() if part in SINGLE}
        self._queues = {place: _Queue(offset) for place, offset in begins.items()}

    @property
    def waiting(self) -> int:
        """Records with rows, those of open transactions included."""
        return sum(len(queue.records) for queue in self._queues.values())

    def read_to(self) -> dict[Place, int]:
        """Next offset to be read of each partition."""
        return {place: queue.read_to for place, queue in self._queues.items()}

    def needed_from(self) -> dict[Place, int]:
        """First offset of each partition that would have to be read again now."""
        needed = {}
        for place, queue in self._queues.items():
            first = queue.records[0][0] if queue.records else queue.read_to
            if place[0] in self._single:
                told = self.gate.needed_from(place)
                first = first if told is None else min(first, told)
            needed[place] = first
        return needed

    def add(
        self, place: Place, records: Iterable[tuple[int, list[Parsed]]], end: int, now_s: float
    ) -> None:
        """Take over records of one partition, in order; those that are known are passed over."""
        queue = self._queues[place]
        for offset, parsed in records:
            if offset < queue.read_to:
                continue
            rows: list[CleanRow | RefusedRow] = []
            for one in parsed:
                if isinstance(one, EndedTransaction):
                    self.gate.end(one.id, one.count, one.expected, place, offset, now_s)
                elif isinstance(one, NotedProvenance):
                    if one.prefix in self._prefixes:
                        self.gate.note(one.transaction, one.fields, place, offset, now_s)
                else:
                    rows.append(one)
                    if self._is_grouped and one.transaction is not None:
                        index = one.index if isinstance(one, CleanRow) else None
                        self.gate.row(one.transaction, index, now_s)
            if rows:
                queue.records.append((offset, rows))
        queue.read_to = max(queue.read_to, end)

    def ready(self, now_s: float, *, is_full: bool) -> dict[Place, int]:
        """How many records of each partition may go on.

        ``is_full``: so much waits that nothing more can; then transactions are not waited for.
        """
        taken: dict[Place, int] = {}
        left = _BATCH_ROWS_MAX
        is_gated = self._has_ends and not is_full
        filled = {place: queue for place, queue in self._queues.items() if queue.records}
        for number, (place, queue) in enumerate(filled.items()):
            # A fair part for each, so that none runs ahead of the others in the source's log.
            share, count = left // (len(filled) - number), 0
            ready = None
            for _, rows in queue.records:
                if share <= 0:
                    break
                # Rows of one transaction are neighbours, and mostly asked for once.
                if is_gated and (rows[0].transaction != ready or len(rows) > 1):
                    if not self._are_ready(rows, now_s):
                        break
                    ready = rows[0].transaction
                count += 1
                share -= len(rows)
                left -= len(rows)
            if count:
                taken[place] = count
        return taken

    def in_source_order(self, taken: Mapping[Place, int]) -> SourceRows:
        """Rows of so many records of each partition, in the order of the source's log.

        The order within a partition stays: what comes behind a later place is a re-read, or has
        no place of its own, and must not overtake its neighbours.
        """
        found: list[tuple[Any, RawPlace, CleanRow | RefusedRow]] = []
        for (topic, partition), count in taken.items():
            queue = self._queues[topic, partition]
            order = queue.order
            for offset, rows in islice(queue.records, count):
                place = RawPlace(topic, partition, offset)
                for row in rows:
                    if isinstance(row, CleanRow) and row.order > order:
                        order = row.order
                    found.append((order, place, row))
            queue.order = order
        found.sort(key=itemgetter(0))
        return [(place, row) for _, place, row in found]

    def forget(self, taken: Mapping[Place, int], now_s: float) -> None:
        """Give up so many records of each partition, which go on."""
        for place, count in taken.items():
            records = self._queues[place].records
            for _ in range(count):
                _, rows = records.popleft()
                if self._is_grouped:
                    for row in rows:
                        if row.transaction is not None:
                            self.gate.gone(row.transaction)
        self.gate.settle(now_s)

    def _are_ready(self, rows: Sequence[CleanRow | RefusedRow], now_s: float) -> bool:
        return all(
            row.transaction is None or self.gate.is_ready(row.transaction, now_s) for row in rows
        )
