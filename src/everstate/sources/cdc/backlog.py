"""What was read of a capture's raw topics and is not published yet.

A queue for each partition, behind the gate of source transactions. In memory only: after a restart
it is read again, from the positions that :meth:`Backlog.needed_from` told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Any, Final

from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.gate import Place, ReadUntil, Told, TransactionGate
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
_AHEAD_MAX: Final = 40_000
"""Rows that wait for others, or ends without their rows, before only what lags is read."""
_BEGUN_BYTES_MAX: Final = 262_144
SourceRows = list[tuple[RawPlace, CleanRow | RefusedRow]]
"""Rows in the order in which they are taken, each with its place in the raw topics."""


@dataclass(slots=True)
class _Queue:
    """What was read of one partition, by record: its offset and its rows."""

    read_to: int
    records: deque[tuple[int, list[CleanRow | RefusedRow]]] = field(default_factory=deque)
    order: tuple[int, ...] = ()
    """Greatest place in the source's log so far: rows without one of their own follow it."""


@dataclass(slots=True)
class _Reached:
    """Until when all that was written to some partitions has been read."""

    places: frozenset[Place]
    until_s: float = -inf
    asked_s: float = -inf
    ends: dict[Place, int] | None = None

    def ask(self, ends: Mapping[Place, int], now_s: float) -> None:
        """They end here now: a mark to be reached, and then the next one."""
        if self.ends is None:
            self.ends = {place: ends[place] for place in self.places}
            self.asked_s = now_s

    def look(self, queues: Mapping[Place, _Queue]) -> None:
        """Find out whether the mark was reached."""
        if self.ends is not None:
            if all(queues[place].read_to >= end for place, end in self.ends.items()):
                self.until_s, self.ends = self.asked_s, None


class Backlog:
    """The queues of one capture: :meth:`add`, ask what is :meth:`ready`, :meth:`forget` that.

    Takes time as an argument (seconds, of one clock) and does no input or output.
    """

    def __init__(
        self,
        capture: Capture,
        topics: Mapping[str, str],
        begins: Mapping[Place, int],
        begun: Mapping[str, Told] | None = None,
    ) -> None:
        """``topics``: raw topic → its name's last part. ``begins``: first offset to be read.

        ``begun``: what :meth:`begun` was when these offsets were noted.
        """
        self.gate = TransactionGate(capture.transaction_wait_s, begun)
        self._is_grouped = capture.transactions
        self._has_ends = TRANSACTIONS in topics.values()
        self._prefixes = {t.provenance.message_prefix for t in capture.tables.values()}
        self._queues = {place: _Queue(offset) for place, offset in begins.items()}
        ends = frozenset(place for place in begins if topics[place[0]] == TRANSACTIONS)
        notes = frozenset(place for place in begins if topics[place[0]] == MESSAGES)
        self._single = ends | notes
        self._tables = frozenset(begins) - self._single
        self._has_notes = bool(notes)
        self._ends: Mapping[Place, int] = {}
        self._reached = _Reached(self._tables), _Reached(ends), _Reached(notes)

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
            if place in self._single:
                told = self.gate.needed_from(place)
                first = first if told is None else min(first, told)
            needed[place] = first
        return needed

    def begun(self) -> dict[str, Told]:
        """What was told of transactions that are partly gone; to be noted with the positions."""
        return self.gate.begun(_BEGUN_BYTES_MAX)

    def ends_at(self, ends: Mapping[Place, int], now_s: float) -> None:
        """Take over where the raw topics end now."""
        self._ends = ends
        for reached in self._reached:
            reached.ask(ends, now_s)
            reached.look(self._queues)

    def wanted(self, records_max: int) -> frozenset[Place]:
        """Partitions to be read next, so that none runs far ahead of the others.

        None of them: ``records_max`` wait, and nothing more can be read to let them go.
        """
        waiting, are_ends_ahead = self.waiting, self.gate.ends_ahead(_AHEAD_MAX)
        if waiting >= min(records_max, _AHEAD_MAX) and not are_ends_ahead:
            if self._behind(self._single):
                return self._single
        if waiting >= records_max:
            return frozenset()
        tables = self._tables
        if waiting >= _AHEAD_MAX:
            # Long queues wait for what is in the short ones.
            share = waiting / len(tables)
            short = {place for place in tables if len(self._queues[place].records) <= share}
            tables = self._behind(short) or tables
        if are_ends_ahead and self._behind(tables):
            return tables
        return tables | self._single

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
        for reached in self._reached:
            reached.look(self._queues)

    def ready(self, rows_max: int, *, is_full: bool) -> dict[Place, int]:
        """How many records of each partition may go on; about ``rows_max`` rows.

        ``is_full``: nothing more can be read; then transactions are not waited for.
        """
        taken: dict[Place, int] = {}
        left, until = rows_max, self._until()
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
                    if not self._are_ready(rows, until):
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

    def forget(self, taken: Mapping[Place, int]) -> None:
        """Give up so many records of each partition, which go on."""
        for place, count in taken.items():
            records = self._queues[place].records
            for _ in range(count):
                _, rows = records.popleft()
                if self._is_grouped:
                    for row in rows:
                        if row.transaction is not None:
                            self.gate.gone(row.transaction)
        self.gate.settle(self._until())

    def _until(self) -> ReadUntil:
        rows, ends, notes = (reached.until_s for reached in self._reached)
        return ReadUntil(rows, ends, notes if self._has_notes else inf)

    def _are_ready(self, rows: Sequence[CleanRow | RefusedRow], until: ReadUntil) -> bool:
        is_ready = self.gate.is_ready
        return all(row.transaction is None or is_ready(row.transaction, until) for row in rows)

    def _behind(self, places: Iterable[Place]) -> frozenset[Place]:
        """Those of which more is there than was read."""
        return frozenset(
            place for place in places if self._queues[place].read_to < self._ends.get(place, 0)
        )
