"""Follows the accepted changes of an entity type, from the archive and the log, without Spark."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final, TypeAlias

from everstate.changes import Change, ChangeCodec
from everstate.changes.codec import decode_wire
from everstate.changes.tokens import LogPosition, Partition, Spot, Token, parse_since
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import CorruptRecord, InvalidChange, InvalidToken, UnknownEntity
from everstate.log.positions import Range
from everstate.log.record import Record
from everstate.serving.judged import CoreNotes
from everstate.serving.places import check_log
from everstate.views.in_effect import in_effect
from everstate.views.project import Project
from everstate.views.source import GENERATION, RecordSource, Run
from everstate.views.trailing import Exceptions

Since: TypeAlias = str
"""A token, ``"beginning"``, ``"now"``, or a time, see :func:`parse_since`."""
BEGINNING: Final = "beginning"
NOW: Final = "now"

_PAUSE_S_MIN: Final = 0.005
_PAUSE_S_MAX: Final = 0.2
_IDLE_S: Final = 1.0
_WAITING_MAX: Final = 5_000
"""Most records of a partition that wait for the core; with fewer, more are read."""
_WAITING_BYTES_MAX: Final = 2**24
"""Most bytes of their values."""


@dataclass(frozen=True)
class Delivery:
    """One change, and the position of the stream after it."""

    record: Record
    """The record of the log, byte-exact."""
    partition: Partition = field(repr=False)
    spot: Spot = field(repr=False)
    """How far the stream has read that partition after this change."""
    stream: ChangeStream = field(repr=False)
    others: Mapping[Partition, Spot] = field(repr=False)
    """How far the stream had read the other partitions."""

    @property
    def entity(self) -> str:
        """The entity type."""
        return self.stream.entity

    @cached_property
    def change(self) -> Change[dict[str, Any]]:
        """The change; raises CorruptRecord when the record is no change (only with ``raw``)."""
        record = self.record
        if record.value is None:
            raise CorruptRecord(record.topic, record.partition, record.offset, "it is a tombstone")
        try:
            return self.stream.codec.decode(record.value)
        except InvalidChange as cause:
            place = (record.topic, record.partition, record.offset)
            raise CorruptRecord(*place, cause.reason) from cause

    @property
    def spots(self) -> dict[Partition, Spot]:
        """How far the stream has read every partition after this change."""
        return {**self.others, self.partition: self.spot}

    @property
    def token(self) -> str:
        """The token from which the stream continues after this change."""
        return self.stream.token(self.spots)


@dataclass(frozen=True, slots=True)
class ChangeStream:
    """Values that all deliveries of a stream share."""

    entity: str
    mark: bytes
    codec: ChangeCodec
    others: Mapping[str, LogPosition] = field(default_factory=dict)
    """How far the other entity types of a merged stream were read."""

    def token(self, spots: Mapping[Partition, Spot]) -> str:
        """The token of spots in this log, and of the others."""
        return str(Token({**self.others, self.entity: LogPosition(self.mark, spots)}))


class Changes(Closing):
    """Iterates over accepted changes of one entity type, past and new ones, from a position on.

    In each partition changes are in the order in which they take effect, so that the versions of a
    key are dense; after a token none is missing and none comes twice. A change is delivered when
    the core has accepted it. Changes that the log no longer has are read from the archive. The
    iterator waits, without a busy loop, until there is a change; with ``until`` it ends there.
    ``raw``: deliver all records of the log instead, unjudged, up to its stable end.

    Iterate once, in one thread; :meth:`close` may be called from another thread and ends the
    iteration. Memory is bounded. Raises InvalidToken, DataLoss when neither log nor archive has the
    position, LogIdentityChanged, and Unavailable when a server does not answer: then begin again
    from the last token.
    """

    def __init__(
        self,
        config: Config,
        project: Project,
        entity: str,
        *,
        since: Since,
        until: Since | None = None,
        raw: bool = False,
    ) -> None:
        if entity not in project.entities:
            raise UnknownEntity(entity, tuple(project.entities))
        self._raw = raw
        self._notes = CoreNotes(config, entity)
        self._source = RecordSource(config, entity)
        self._stopped, self._pause_s = threading.Event(), _PAUSE_S_MIN
        self._has_begun = False
        with ExitStack() as unfinished:
            unfinished.callback(self._source.close)
            codec = ChangeCodec(project.entities[entity])
            self._stream = ChangeStream(entity, self._source.mark, codec)
            self._spots = self._resolved(since)
            self._until = None if until is None else self._resolved(until)
            self._runs: dict[int, deque[Run]] = {p: deque() for p in self._source.partitions}
            unfinished.pop_all()

    def close(self) -> None:
        """End the iteration; a waiting one ends within a second."""
        self._stopped.set()
        if not self._has_begun:
            self._source.close()

    @property
    def token(self) -> str:
        """The position of the stream: after the change that it delivered last."""
        return self._stream.token(self._spots)

    @property
    def mark(self) -> bytes:
        """Which log it reads, see :func:`~everstate.changes.tokens.log_mark`."""
        return self._stream.mark

    @property
    def spots(self) -> dict[Partition, Spot]:
        """How far the stream has read each partition."""
        return dict(self._spots)

    def __iter__(self) -> Iterator[Delivery]:
        with self.reading():
            while (unfinished := self.unfinished()) and not self._stopped.is_set():
                for delivery in self.read(_IDLE_S, unfinished):
                    yield delivery
                    if self._stopped.is_set():
                        return

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Begin, so that :meth:`read` may be called inside; the thread that iterates does this."""
        self._has_begun = True
        try:
            starts = {p: self._spots[_of(p)].next_offset for p in self.unfinished()}
            ends = (
                {} if self._until is None else {p: self._until[_of(p)].covered_by for p in starts}
            )
            self._source.begin(starts, ends)
            yield
        finally:
            self._source.close()

    def seek(self, spots: Mapping[int, Spot]) -> None:
        """Go on with these partitions at these spots, by :meth:`read`; errors as of iterating."""
        self._source.close()
        self._spots = {_of(partition): spot for partition, spot in spots.items()}
        self._runs = {partition: deque() for partition in spots}
        self._source.begin({p: spot.next_offset for p, spot in spots.items()}, {})

    def read(self, wait_s: float, partitions: Iterable[int]) -> Iterator[Delivery]:
        """The next deliveries, to be taken all; waits up to ``wait_s`` for a record."""
        is_waiting = any(self._runs.values())
        room = [p for p in partitions if has_room(_sizes(self._runs[p]))]
        for run in self._source.poll(0.0 if is_waiting else wait_s, room):
            self._runs[run.partition].append(run)
        has_come = False
        for delivery in self._given() if self._raw else self._accepted():
            has_come = True
            yield delivery
        if has_come or not is_waiting:
            self._pause_s = _PAUSE_S_MIN
        else:
            # There are records that the core has not judged yet.
            self._stopped.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)

    def _given(self) -> Iterator[Delivery]:
        """Deliver all records that were read, unjudged."""
        for partition, runs in self._runs.items():
            while runs:
                run = runs.popleft()
                found = [(Spot(record.offset + 1), record) for record in run.records]
                yield from self._deliver(partition, found, run.end)

    def _accepted(self) -> Iterator[Delivery]:
        """Deliver the changes that the core has accepted among the records that were read."""
        wanted = {}
        for partition, runs in self._runs.items():
            if runs:
                span = Range(self._spots[_of(partition)].next_offset, runs[-1].end)
                wanted[partition] = self._ended(partition, span)
        if not wanted:
            return
        for partition, judged in self._notes.judged(wanted).items():
            span = wanted[partition]
            span = Range(span.start, min(span.end, judged.position))
            if len(span):
                found = self._in_effect(partition, span, judged.exceptions)
                yield from self._deliver(partition, found, span.end)

    def _in_effect(
        self, partition: int, span: Range, exceptions: Exceptions
    ) -> Sequence[tuple[Spot, Record]]:
        """The changes that take effect in a range and were not delivered yet."""
        records = _taken(self._runs[partition], span.end)
        before = [offset for offset in exceptions.released if offset < span.start]
        records += self._source.fetch(partition, before)
        offsets = [record.offset for record in records]
        since = self._spots[_of(partition)]
        return in_effect(records, offsets, since, span.end, exceptions, version_of)

    def _deliver(
        self, partition: int, found: Sequence[tuple[Spot, Record]], end: int
    ) -> Iterator[Delivery]:
        at = _of(partition)
        until = None if self._until is None else self._until[at]
        others = dict(self._spots)
        for spot, record in found:
            if until is not None and spot > until:
                break
            self._spots[at] = spot
            yield Delivery(record, at, spot, self._stream, others)
        self._spots[at] = Spot(end) if until is None else min(Spot(end), until)

    @property
    def reads_archive(self) -> bool:
        """Whether the next changes come from the archive, partition by partition."""
        return self._source.reads_archive

    def present(self) -> dict[Partition, Spot]:
        """Where a stream would begin now."""
        return self._resolved(NOW)

    def unfinished(self) -> list[int]:
        """Partitions that have not reached ``until``."""
        if self._until is None:
            return list(self._source.partitions)
        return [p for p in self._source.partitions if self._spots[_of(p)] < self._until[_of(p)]]

    def _ended(self, partition: int, span: Range) -> Range:
        """A range, cut at ``until``."""
        if self._until is None:
            return span
        return Range(span.start, min(span.end, self._until[_of(partition)].covered_by))

    def _resolved(self, since: Since) -> dict[Partition, Spot]:
        """The spots of a token, of a time, of the beginning, or of now."""
        partitions, token = self._source.partitions, parse_since(since)
        if since == BEGINNING:
            return {_of(p): Spot(0) for p in partitions}
        if since == NOW and self._raw:
            return {_of(p): Spot(end) for p, end in self._source.ends().items()}
        # Also when only its check is needed: the views must be kept from this log.
        core = None if self._raw else self._notes.position(self._source.mark)
        if core is not None and since == NOW:
            return dict(core.spots)
        if isinstance(token, datetime):
            return {_of(p): Spot(at) for p, at in self._source.since(token).items()}
        assert token is not None, "neither the beginning nor now"
        entity = self._stream.entity
        position = token.positions.get(entity)
        if position is None:
            raise InvalidToken(
                f"it has no position of {entity}",
                advice="A token of a write says what to wait for: snapshot(view, wait_for=token) "
                "gives one to continue from.",
            )
        check_log(entity, position, self._source.mark)
        if set(position.spots) != {_of(p) for p in partitions}:
            raise InvalidToken(f"it has not the partitions of {self._source.topic}")
        return dict(position.spots)


def _of(partition: int) -> Partition:
    return (GENERATION, partition)


def has_room(sizes: Sequence[int]) -> bool:
    """Whether more records of a partition may be read beside those of these sizes, which wait."""
    return len(sizes) < _WAITING_MAX and sum(sizes) < _WAITING_BYTES_MAX


def _sizes(runs: Iterable[Run]) -> list[int]:
    return [len(record.value or b"") for run in runs for record in run.records]


def _taken(runs: deque[Run], end: int) -> list[Record]:
    """Remove and return the waiting records before an offset."""
    taken: list[Record] = []
    while runs and runs[0].start < end:
        run = runs.popleft()
        if run.end <= end:
            taken += run.records
            continue
        mine = [record for record in run.records if record.offset < end]
        taken += mine
        runs.appendleft(Run(run.partition, end, run.end, run.records[len(mine) :]))
        break
    return taken


def version_of(record: Record) -> int:
    """The version of an accepted change."""
    assert record.value is not None, "a tombstone is no change"
    return decode_wire(record.value).version
