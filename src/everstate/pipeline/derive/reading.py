"""Changes of an entity type from the archive and the log: accepted ones, or all of the raw log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Final, TypeAlias

import msgspec

from everstate.changes import ChangeCodec
from everstate.changes.derived import Message, read_message
from everstate.errors import InvalidChange, ViewFailed
from everstate.log.positions import Range
from everstate.log.record import Record
from everstate.pipeline.spark.progress import Progress, progress
from everstate.views.control import Control
from everstate.views.in_effect import by_effect
from everstate.views.source import RecordSource, Run
from everstate.views.tables import Core

READ_MAX: Final = 10_000
"""Most records that are read ahead of the published ones."""
_WAITING_BYTES: Final = 64 << 20
"""Nothing is read on while records of so many bytes wait; one more request may be read."""
_RECORD_BYTES: Final = 500
"""About what a record takes in memory besides its value."""
_POLL_S: Final = 0.1


AcceptedChange: TypeAlias = tuple[Record, Message]
"""An accepted change: its record in the log, and the message in it."""


class AcceptedReader:
    """Reads one changelog from a vector on; records not judged by the core wait in memory.

    It reads in a thread, which nobody waits for: an archive that compaction has mixed is sorted
    before its first record is read.
    """

    def __init__(
        self,
        source: RecordSource,
        vector: Mapping[int, int],
        trimmed: Mapping[int, Collection[int]],
    ) -> None:
        """``trimmed``: by partition, what :meth:`Control.trimmed` has of all before the vector."""
        self.vector = dict(vector)
        """Offset of the next record to take, by partition."""
        self.read = dict(vector)
        """Offset of the next record to read, by partition."""
        self._waiting: dict[int, deque[Record]] = {partition: deque() for partition in vector}
        self._trimmed: dict[int, dict[int, Record]] = {partition: {} for partition in vector}
        """Changes that are released later, by partition and offset: those whose bytes the control
        tables have no more, at most as many as the core may hold."""
        self._source = source
        self._begun, self._first = time.monotonic(), sum(vector.values())
        self._reading: Future[list[Run]] | None = _aside(partial(self._begin, vector, trimmed))

    def close(self) -> Future[list[Run]] | None:
        """Close the connections, as soon as nothing is being read; returns what is being read."""
        if self._reading is None:
            self._source.close()
        else:
            self._reading.add_done_callback(lambda _: self._source.close())
        return self._reading

    @property
    def waiting(self) -> int:
        """Number of records that were read and not taken yet."""
        return sum(map(len, self._waiting.values()))

    def read_on(self) -> Future[list[Run]] | None:
        """Begin to read on, if there is room; returns what is being read, for :meth:`gather`."""
        room = READ_MAX - self.waiting
        is_full = room <= 0 or sum(map(_size, self._waiting.values())) >= _WAITING_BYTES
        if self._reading is None and not is_full:
            self._reading = _aside(partial(self._source.poll, _POLL_S, self.vector, room))
        return self._reading

    def gather(self) -> None:
        """Let what was read wait for :meth:`take`; does nothing while it is being read.

        Raises DataLoss when neither log nor archive has the next records.
        """
        if self._reading is not None and self._reading.done():
            runs, self._reading = self._reading.result(), None
            for run in runs:
                self._waiting[run.partition] += run.records
                self.read[run.partition] = run.end

    def _begin(
        self, vector: Mapping[int, int], trimmed: Mapping[int, Collection[int]]
    ) -> list[Run]:
        self._source.begin(vector, {})
        for partition, offsets in trimmed.items():
            for record in self._source.fetch(partition, offsets):
                self._trimmed[partition][record.offset] = record
        return []

    def take(
        self, control: Control, core: Core, upto: Mapping[int, int], most: int = READ_MAX
    ) -> list[AcceptedChange]:
        """The accepted changes below ``upto`` among those read, in the order of their effect.

        ``upto`` is the core's position or below it; ``most``: of so many records in a partition.
        Call it inside the snapshot in which that position was read: exceptions are complete up to
        it (V1). Changes that were taken are not returned again.
        """
        found: list[AcceptedChange] = []
        message_of = partial(_message, core)

        def version_of(record: Record) -> int:
            return message_of(record).version

        for partition, start in list(self.vector.items()):
            waiting = self._waiting[partition]
            end = self.read[partition] if len(waiting) <= most else waiting[most].offset
            span = Range(start, min(upto.get(partition, 0), end))
            if not span:
                continue
            exceptions = control.exceptions(core, partition, span.start, span.end)
            read = []
            while waiting and waiting[0].offset < span.end:
                read.append(waiting.popleft())
            trimmed, released = self._trimmed[partition], []
            if exceptions.released:
                place = (core, partition, span.start, span.end)
                for offset, key, value in control.released_changes(*place, known=trimmed):
                    record = Record(core.topic, partition, offset, 0, key, value, ())
                    released.append(record)
                for offset in exceptions.released.keys() & trimmed.keys():
                    released.append(trimmed.pop(offset))
            if exceptions.held - exceptions.released.keys():
                later = control.trimmed(core, partition, span.start, span.end)
                trimmed.update((record.offset, record) for record in read if record.offset in later)
            records = read + released
            offsets = [record.offset for record in records]
            placed = by_effect(records, offsets, span, exceptions, version_of)
            found += [(record, message_of(record)) for _, record in placed]
            self.vector[partition] = span.end
        return found

    def progress(self, upto: Mapping[int, int]) -> Progress:
        """How much of what lies before ``upto`` was taken; the rate is that of this reader."""
        done, changes = sum(self.vector.values()) - self._first, sum(upto.values()) - self._first
        seconds = time.monotonic() - self._begun
        found = progress("building", done / max(1, changes), seconds, changes)
        return replace(found, share=min(1.0, (done + self._first) / max(1, sum(upto.values()))))


class UnjudgedReader(AcceptedReader):
    """Takes every change that was read, whatever the core will say of it."""

    def __init__(self, source: RecordSource, vector: Mapping[int, int], codec: ChangeCodec) -> None:
        super().__init__(source, vector, {})
        self._codec = codec

    def take(
        self, control: Control, core: Core, upto: Mapping[int, int], most: int = READ_MAX
    ) -> list[AcceptedChange]:
        """All changes that were read; what is no change is left out: the core dead-letters it."""
        found: list[AcceptedChange] = []
        for partition, waiting in self._waiting.items():
            for record in waiting:
                with suppress(InvalidChange):
                    change = self._codec.decode(record.value or b"")
                    states = (change.current, change.original)
                    if all(isinstance(state, dict | None) for state in states):
                        found.append((record, _message(core, record)))
            waiting.clear()
            self.vector[partition] = self.read[partition]
        return found


def _aside(read: Callable[[], list[Run]]) -> Future[list[Run]]:
    """Call a function in a thread of its own, which does not keep the process from ending."""
    reading: Future[list[Run]] = Future()

    def fulfil() -> None:
        try:
            reading.set_result(read())
        except BaseException as error:  # `result` raises it in the caller's thread
            reading.set_exception(error)

    Thread(target=fulfil, name="read-aside", daemon=True).start()
    return reading


def _size(records: Iterable[Record]) -> int:
    """About how much memory some records take, in bytes."""
    return sum(_RECORD_BYTES + len(record.value or b"") for record in records)


def _message(core: Core, record: Record) -> Message:
    try:
        return read_message(record.value or b"")
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise ViewFailed(
            core.entity,
            f"a change that the core accepted cannot be read ({cause})",
            offset=record.offset,
        ) from cause
