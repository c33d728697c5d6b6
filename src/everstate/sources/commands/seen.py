"""The versions of each entity to which a process manager has reacted, stored in the log.

A process manager may read a change again long after the ids of its commands have expired:
`everstate drift repair` and refilling a truncated log publish changes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from everstate.changes import Change
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import Record
from everstate.log.state_copy import StateCopy, open_copy
from everstate.log.topics import TopicIdentity, Topics
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger(__name__)
_unreadable: Final = RateLimitedLogger(logger, logging.ERROR)

_FORM: Final = "seen-2"
_NOTHING: Final = (0, ())
_POSITION: Final = b"\0"
"""Start of the name of a position; no entity type has an empty name."""

_Versions = tuple[int, tuple[tuple[int, int], ...]]
"""The newest version, and the ranges of versions below it that were not read."""

_encode = msgspec.json.Encoder().encode
_decode_versions = msgspec.json.Decoder(_Versions).decode
_decode_position = msgspec.json.Decoder(tuple[int, TopicIdentity]).decode


class Seen:
    """The seen versions of one partition: a compacted topic, and a local copy in RocksDB.

    Updates by :meth:`takes` and :meth:`move` are in :attr:`changed` until :meth:`settle`. The
    caller writes them to the topic, in the transaction of the commands that follow.
    """

    def __init__(self, copy: StateCopy) -> None:
        self._copy = copy
        self.changed: dict[bytes, bytes] = {}
        """Keys and values of the records to write to the topic."""

    @classmethod
    def open(
        cls,
        config: Config,
        path: Path,
        topic: str,
        number: int,
        offsets: Offsets,
        alive: Callable[[], None],
    ) -> Seen:
        """Update the local copy from the topic. Cost: the records since it was last opened."""
        end = offsets.settled_ends([topic], number, alive)[topic]
        with Topics(config) as topics:
            topic_id = topics.identity(topic).topic_id
        copy = open_copy(path, _FORM, {topic: topic_id})
        try:
            place = (topic, number)
            copy.check("the process manager", {place: end})
            start = max(copy.next_of(place), offsets.beginnings([topic])[place])
            with Consumer(config, client_id="everstate-process-seen") as consumer:
                copy.fill(consumer, {place: (start, end)}, _rows_of, alive)
        except BaseException:
            copy.close()
            raise
        return cls(copy)

    def close(self) -> None:
        """Discard updates that were not settled, and close the files."""
        self._copy.close()

    def position(self, topic: str) -> tuple[int, TopicIdentity] | None:
        """Next offset of a changelog, and its identity; ``None``: it was never read."""
        row = self._row(_position_name(topic))
        return None if row is None else _decode_position(row)

    def move(self, topic: str, position: int, identity: TopicIdentity) -> None:
        """Record the next offset of a changelog."""
        name, row = position_row(topic, position, identity)
        self.changed[name] = row

    def takes(self, change: Change[Any]) -> bool:
        """Whether a change is read for the first time; records its version.

        A version that was skipped, because the log did not have it then, is taken when it comes.
        An event has a key of its own and the version 1: it is taken once, like any version.
        """
        name = f"{change.entity}\0{change.key}".encode()
        row = self._row(name)
        newest, missing = _NOTHING if row is None else _decode_versions(row)
        taken = _with(newest, missing, change.version)
        if taken is not None:
            self.changed[name] = _encode(taken)
        return taken is not None

    def settle(self) -> None:
        """The transaction was committed: update the local copy."""
        self._copy.settle(self.changed)
        self.changed = {}

    def _row(self, name: bytes) -> bytes | None:
        return self.changed.get(name) or self._copy.get(name)


def _rows_of(record: Record) -> list[tuple[bytes, bytes]]:
    """Stored row of a record; no process manager writes one that cannot be read: it is skipped."""
    name, row = record.key or b"", record.value or b""
    try:
        if name.startswith(_POSITION):
            _decode_position(row)
        else:
            _decode_versions(row)
    except msgspec.DecodeError as cause:
        place = (record.topic, record.partition, record.offset)
        _unreadable.log("%s[%d]@%d has no versions, and is skipped: %s", *place, cause)
        return []
    return [(name, row)]


def position_row(topic: str, position: int, identity: TopicIdentity) -> tuple[bytes, bytes]:
    """Key and value of the record of the next offset of a changelog."""
    return _position_name(topic), _encode((position, identity))


def _position_name(topic: str) -> bytes:
    return _POSITION + topic.encode()


def _with(newest: int, missing: tuple[tuple[int, int], ...], version: int) -> _Versions | None:
    """The versions with ``version`` added; ``None``: it was included already."""
    if version > newest:
        # Versions before the first change that was read do not count as missing.
        passed = ((newest + 1, version - 1),) if 0 < newest < version - 1 else ()
        return version, (*missing, *passed)
    for at, (first, last) in enumerate(missing):
        if first <= version <= last:
            parts = [(first, version - 1), (version + 1, last)]
            left = tuple(part for part in parts if part[0] <= part[1])
            return newest, (*missing[:at], *left, *missing[at + 1 :])
    return None
