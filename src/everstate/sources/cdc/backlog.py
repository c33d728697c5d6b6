"""What was read of a capture's raw topics and is not published yet.

A queue for each partition, behind the gate of source transactions. In memory only: after a restart
it is read again, from the positions that :meth:`Backlog.needed_from` told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Any, Final

from everstate.errors import LogError
from everstate.sources.cdc.declaration import Capture, Translation
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
    read_order: tuple[int, ...] = ()
    """The same of all that was read, what waits included."""
    read_at: deque[tuple[int, float]] = field(default_factory=deque)
    """Until which offset it was read when."""

    def known_to(self, until_s: float) -> int:
        """Offset up to which records were read by a moment."""
        while len(self.read_at) > 1 and self.read_at[1][1] <= until_s:
            self.read_at.popleft()
        return self.read_at[0][0] if self.read_at and self.read_at[0][1] <= until_s else 0


@dataclass(slots=True)
class _Head:
    """The first record of a partition that has not been taken."""

    order: tuple[int, ...]
    number: int
    place: Place
    limit: tuple[int, ...] | None
    """Place in the source's log up to which rows may go on; ``None``: all."""
    asked_to: int
    """Offset up to which that limit holds: what was read later may have parents behind it."""
    known_to: int
    """Offset up to which they may go on, too."""
    rest: Iterator[tuple[int, list[CleanRow | RefusedRow]]]
    offset: int = 0
    rows: list[CleanRow | RefusedRow] = field(default_factory=list)

    def __lt__(self, other: _Head) -> bool:
        return (self.order, self.number) < (other.order, other.number)

    def advance(self) -> bool:
        """Go on to the next record; ``False``: there is none."""
        self.offset, self.rows = next(self.rest, (0, []))
        for row in self.rows:
            if isinstance(row, CleanRow) and row.order > self.order:
                self.order = row.order
        return bool(self.rows)

    @property
    def is_early(self) -> bool:
        """Whether not as much has been read of the tables with its parents."""
        is_within = self.limit is None or self.order <= self.limit
        return self.offset >= (self.asked_to if is_within else self.known_to)


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
        self._asked_to: Mapping[Place, int] = {}
        """What had been read when these ends were asked for."""
        self._reached = _Reached(self._tables), _Reached(ends), _Reached(notes)
        self._before = _parents(capture, topics, self._tables)
        """Partition → those of which as much must have been read before its rows go on."""

    @property
    def is_ordered(self) -> bool:
        """Whether rows follow those of other tables, so that it must be known where these end."""
        return bool(self._before)

    @property
    def rows_until_s(self) -> float:
        """Moment up to which all rows that the capture wrote have been read."""
        return self._reached[0].until_s

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
        self._ends, self._asked_to = ends, self.read_to()
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
            return self._awaited()
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
        self,
        place: Place,
        records: Iterable[tuple[int, list[Parsed]]],
        start: int,
        end: int,
        now_s: float,
    ) -> None:
        """Take over all records of one partition from ``start`` up to ``end``, in order.

        Those that are known are passed over. Raises LogError when what was read begins behind
        what is known: the position must never pass over records that nobody saw.
        """
        queue = self._queues[place]
        if start > queue.read_to:
            raise LogError(
                f"{place[0]}[{place[1]}]: records from offset {start:,} were read, and those from "
                f"{queue.read_to:,} were not. Nothing was passed over.",
                advice="Start the capture again: it reads from its position.",
            )
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
                    if isinstance(one, CleanRow) and one.order > queue.read_order:
                        queue.read_order = one.order
                    if self._is_grouped and one.transaction is not None:
                        index = one.index if isinstance(one, CleanRow) else None
                        self.gate.row(one.transaction, index, now_s)
            if rows:
                queue.records.append((offset, rows))
        queue.read_to = max(queue.read_to, end)
        if place in self._before:
            queue.read_at.append((queue.read_to, now_s))
        for reached in self._reached:
            reached.look(self._queues)

    def ready(self, rows_max: int, *, is_full: bool = False) -> dict[Place, int]:
        """How many records of each partition may go on; about ``rows_max`` rows.

        ``is_full``: nothing more can be read; then transactions are not waited for.
        """
        if self.is_ordered:
            return self._ready_in_order(rows_max, is_full=is_full)
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

    def _ready_in_order(self, rows_max: int, *, is_full: bool) -> dict[Place, int]:
        """The same, where parents go first: over all partitions in the order of the source's log.

        A row goes on when as much was read of all tables that may have its parents: up to its
        place in the source's log, or up to the moment when it was read itself; and when none of
        their rows before it has to wait.
        """
        until = self._until()
        is_gated = self._has_ends and not is_full
        heads: list[_Head] = []
        for number, (place, queue) in enumerate(self._queues.items()):
            if queue.records:
                asked_to = self._asked_to.get(place, 0) if place in self._before else queue.read_to
                head = _Head(
                    queue.order,
                    number,
                    place,
                    self._limit(place),
                    asked_to,
                    queue.known_to(until.rows_s),
                    iter(queue.records),
                )
                head.advance()
                heads.append(head)
        heapify(heads)
        taken: dict[Place, int] = {}
        stopped: set[Place] = set()
        """Where rows wait that were written before those that come next."""
        left = rows_max
        while heads and left > 0:
            head = heads[0]
            is_early = head.is_early or not stopped.isdisjoint(self._before.get(head.place, ()))
            if is_early or (is_gated and not self._are_ready(head.rows, until)):
                stopped.add(head.place)
                heappop(heads)
                continue
            taken[head.place] = taken.get(head.place, 0) + 1
            left -= len(head.rows)
            if head.advance():
                heapreplace(heads, head)
            else:
                heappop(heads)
        return taken

    def _limit(self, place: Place) -> tuple[int, ...] | None:
        """Place in the source's log up to which tables with parents were read; ``None``: all."""
        behind = self._behind(self._before.get(place, ()))
        return min((self._queues[one].read_order for one in behind), default=None)

    def _awaited(self) -> frozenset[Place]:
        """Partitions without which nothing that waits could go on."""
        parents = frozenset(one for before in self._before.values() for one in before)
        behind = self._behind(parents)
        first = min((self._queues[one].read_order for one in behind), default=None)
        return frozenset(
            one
            for one in behind
            if self._queues[one].read_order == first and not self._queues[one].records
        )

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

    def forget(self, taken: Mapping[Place, int]) -> Counter[str]:
        """Give up so many records of each partition, which go on; out: their rows by table."""
        gone: Counter[str] = Counter()
        for place, count in taken.items():
            records = self._queues[place].records
            for _ in range(count):
                _, rows = records.popleft()
                for row in rows:
                    gone[row.table] += 1
                    if self._is_grouped and row.transaction is not None:
                        self.gate.gone(row.transaction)
        self.gate.settle(self._until())
        return gone

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


def _parents(
    capture: Capture, topics: Mapping[str, str], places: Iterable[Place]
) -> dict[Place, frozenset[Place]]:
    """Partition → those of all tables that its rows may wait for, directly or not."""
    waits: dict[str, set[str]] = {}
    for table in capture.tables.values():
        entities = waits.setdefault(table.entity, set())
        if capture.parents_first:
            entities.update(table.parents.values())
        for one in table.translations.values():
            if isinstance(one, Translation) and one.missing == "wait":
                entities.add(one.entity)
    for _ in waits:
        for entities in waits.values():
            entities.update(*(waits.get(one, ()) for one in list(entities)))
    tables = capture.by_topic()
    entity_of = {place: capture.tables[tables[topics[place[0]]]].entity for place in places}
    found = {
        place: frozenset(one for one, other in entity_of.items() if other in waits[entity])
        for place, entity in entity_of.items()
    }
    return {place: before for place, before in found.items() if before}
