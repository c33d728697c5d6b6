"""Accepted changes of an entity type from the live log, up to the core's position."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from everstate.changes.derived import Derivation, Message, read_message
from everstate.errors import ViewFailed
from everstate.log.positions import Offsets, Range, check_ends
from everstate.log.record import Record
from everstate.log.topics import Topics
from everstate.views.control import Control
from everstate.views.tables import Core
from everstate.views.trailing import Exceptions, is_accepted

READ_MAX: Final = 10_000
"""Most records that are read ahead of the published ones."""


@dataclass(frozen=True, slots=True)
class AcceptedChange:
    """One accepted change: the place of its record, and its message."""

    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    message: Message


class Following(Protocol):
    """Follows the partitions of one changelog, as :class:`everstate.log.consumer.Follower` does."""

    def poll(self, records_max: int, wait_s: float) -> list[Record]:
        """Records that are available, after waiting ``wait_s`` at most."""

    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """The ranges read since the last call: first and next offset of each partition."""

    def close(self) -> None:
        """Close the connection."""


class RecordedExceptions(Protocol):
    """The core's exceptions, in one snapshot with its position; the control tables have them."""

    def exceptions(self, core: Core, partition: int, start: int, end: int) -> Exceptions:
        """The exceptions that the core recorded for a range."""

    def released_changes(
        self, core: Core, partition: int, start: int, end: int
    ) -> list[tuple[int, bytes, bytes]]:
        """Offset, key and message of changes held before a range and released in it."""


class AcceptedReader:
    """Reads one changelog from a vector on; records not judged by the core wait in memory."""

    def __init__(self, follower: Following, vector: Mapping[int, int]) -> None:
        """``follower`` begins at the vector."""
        self.vector = dict(vector)
        """Offset of the next record to take, by partition."""
        self.read = dict(vector)
        """Offset of the next record to read, by partition."""
        self._waiting: dict[int, deque[Record]] = {partition: deque() for partition in vector}
        self._follower = follower

    def close(self) -> None:
        """Close the connection."""
        self._follower.close()

    @property
    def waiting(self) -> int:
        """Number of records that were read and not taken yet."""
        return sum(map(len, self._waiting.values()))

    def poll(self, wait_s: float) -> None:
        """Read on, if there is room; raises DataLoss when the log lost the next records."""
        room = READ_MAX - self.waiting
        if room <= 0:
            return
        for record in self._follower.poll(room, 0.0 if self.waiting else wait_s):
            self._waiting[record.partition].append(record)
        for (_, partition), (_, end) in self._follower.spans().items():
            self.read[partition] = end

    def ready(self, judged: Mapping[int, int]) -> dict[int, Range]:
        """The ranges that can be taken, when ``judged`` is the core's position."""
        found = {}
        for partition, start in self.vector.items():
            end = min(judged.get(partition, 0), self.read[partition])
            if end > start:
                found[partition] = Range(start, end)
        return found

    def take(
        self, control: RecordedExceptions, core: Core, spans: Mapping[int, Range]
    ) -> list[AcceptedChange]:
        """The accepted changes of some ranges, versions of a key in order.

        Call it inside the snapshot in which the core's position was read: exceptions are complete
        up to it (V1). Changes that were taken are not returned again.
        """
        found: list[AcceptedChange] = []
        for partition, span in spans.items():
            records = []
            waiting = self._waiting[partition]
            while waiting and waiting[0].offset < span.end:
                records.append(waiting.popleft())
            exceptions = control.exceptions(core, partition, span.start, span.end)
            offsets = np.array([record.offset for record in records], np.int64)
            changes = []
            for place in np.flatnonzero(is_accepted(offsets, span, exceptions)):
                one = records[place]
                message = _message(core, one.offset, one.value or b"")
                at = (partition, one.offset, one.timestamp_ms)
                changes.append(AcceptedChange(*at, one.key, message))
            if exceptions.released:
                released = control.released_changes(core, partition, span.start, span.end)
                for offset, key, value in released:
                    message = _message(core, offset, value)
                    changes.append(AcceptedChange(partition, offset, None, key, message))
                changes.sort(key=lambda change: change.message.version)
            found += changes
            self.vector[partition] = span.end
        return found


def check_source(
    control: Control,
    topics: Topics,
    offsets: Offsets,
    derivation: Derivation,
    vectors: Sequence[Mapping[int, int]],
) -> None:
    """Raise unless a derived topic's positions in its changelog are still true (C8).

    Raises LogIdentityChanged and TopicResized when the changelog is another one, and LogTruncated
    when it lost records that the derived topic or the core has read.
    """
    source = topics.names.changes(derivation.entity)
    control.check_topic_identity(derivation.entity, source, topics.identity(source))
    read = [*vectors, control.core_vector(derivation.entity)]
    # The ends are read after the positions: no position may be beyond its end.
    ends = {partition: end for (_, partition), end in offsets.stable_ends([source]).items()}
    for vector in read:
        check_ends(f"derived topic {derivation.name}", source, vector, ends)


def _message(core: Core, offset: int, value: bytes) -> Message:
    try:
        return read_message(value)
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise ViewFailed(
            core.entity, f"a change that the core accepted cannot be read ({cause})", offset=offset
        ) from cause
