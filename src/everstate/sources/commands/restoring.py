"""Brings a partition's local state up to date with the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from everstate.changes.codec import decode_wire
from everstate.config import Config
from everstate.errors import LogTruncated
from everstate.errors.log import REPLAYED
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets, Range
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.store import (
    VERSION_MAX,
    PartitionStore,
    StoreBatch,
    answer_key,
    open_store,
    read_state_row,
    state_name,
    state_row,
)
from everstate.sources.commands.wire import OFFSET, decode_answer
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger(__name__)
_unreadable: Final = RateLimitedLogger(logger, logging.ERROR)

_ROWS: Final = 2_000
_TOGETHER_MS: Final = 1_000
_UNREADABLE: Final = b"an unreadable record of the log"

Alive = Callable[[], None]


class Restorer:
    """Opens stores and reads the newer records of the log into them; holds two connections."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = TopicNames(config.log.prefix)
        self._offsets = Offsets(config)
        self._consumer = Consumer(config, client_id="everstate-commands-restore")

    def close(self) -> None:
        """Close the connections."""
        self._offsets.close()
        self._consumer.close()

    def open(
        self, path: Path, entity: str, fingerprint: str, partition: int, alive: Alive
    ) -> PartitionStore:
        """The store of one partition, with exactly the contents of the log.

        Cost: the records of `.state` and `.replies` since the store was saved; all of them (only
        answers within ``commands.remember_hours``) when it was lost or is of another version.
        """
        topics = self._topics(entity)
        with Topics(self._config) as asked:
            ids = {topic: found.topic_id for topic, found in asked.identities(topics).items()}
        # The group's offset was read before: after this a former owner cannot commit any more.
        ends = self._offsets.settled_ends(topics, partition, alive)
        store = open_store(path, fingerprint, ids)
        try:
            places = {(topic, partition): end for topic, end in ends.items()}
            store.copy.check(f"the command handler of {entity}", places)
            self._fill(store, topics[1:], partition, ends, alive)
            self._check_whole(store, entity, partition, ends)
            store.copy.prove(places)
        except BaseException:
            store.close()
            raise
        return store

    def ends(self, entities: Iterable[str]) -> Ends:
        """Present ends of `.changes`, `.state` and `.replies` of these entity types."""
        return self._offsets.stable_ends({name for each in entities for name in self._topics(each)})

    def extent(self, topic: str, partition: int) -> Range:
        """Range of offsets of a partition that the log has now."""
        place = (topic, partition)
        first = self._offsets.beginnings([topic])[place]
        return Range(first, self._offsets.high_watermarks([topic])[place])

    def _topics(self, entity: str) -> tuple[str, str, str]:
        names = self._names
        return names.changes(entity), names.state(entity), names.replies(entity)

    def _fill(
        self,
        store: PartitionStore,
        topics: tuple[str, ...],
        partition: int,
        ends: dict[str, int],
        alive: Alive,
    ) -> None:
        state_place, replies_place = ((topic, partition) for topic in topics)
        begins = self._offsets.beginnings(topics)
        start = max(store.copy.next_of(state_place), begins[state_place])
        span = (start, ends[state_place[0]])
        store.copy.fill(self._consumer, {state_place: span}, _state_rows, alive)
        known, end = store.copy.next_of(replies_place), ends[replies_place[0]]
        start = max(begins[replies_place], known)
        if known == 0:
            start = max(start, self._remembered_from(*replies_place, end))
        self._fill_answers(store, *replies_place, (start, end), alive)

    def _check_whole(
        self, store: PartitionStore, entity: str, partition: int, ends: dict[str, int]
    ) -> None:
        """Raise LogTruncated when `.changes` and `.state` do not end with the same changes (C8).

        A transaction writes to both. Cost: the newest records of both are read.
        """
        changes, state, _ = self._topics(entity)
        newest = self._newest(state, partition, ends[state], 1)
        wanted = _version_of(newest[-1]) if newest else None
        found, count = list[tuple[bytes, int]](), _ROWS
        begin = self._offsets.beginnings([changes])[changes, partition]
        while True:
            read = self._newest(changes, partition, ends[changes], count)
            found = [each for record in read if (each := _version_of(record)) is not None]
            if wanted is None or wanted in found or count >= ends[changes] - begin:
                break
            count *= 10
        for key, version in found:
            stated, text, _ = read_state_row(store.state(key) or state_row(0, None))
            if stated < version and text != _UNREADABLE:
                self._lost(entity, changes, (key, version), f"{state} has version {stated}")
        # Old changes may have been dropped, by the retention of the changelog.
        if wanted is not None and wanted not in found and (found or begin == 0):
            self._lost(entity, state, wanted, f"{changes} has not")

    def _newest(self, topic: str, partition: int, end: int, count: int) -> list[Record]:
        """The newest records of a partition, from at least the last ``count`` offsets on."""
        begin = self._offsets.beginnings([topic])[topic, partition]
        while True:
            start = max(begin, end - count)
            read = list(self._consumer.read(topic, partition, start, end))
            if read or start == begin:
                return read
            count *= 10

    def _lost(self, entity: str, topic: str, has: tuple[bytes, int], lacks: str) -> None:
        key, version = has
        raise LogTruncated(
            f"the command handler of {entity}: {topic} has {key.decode(errors='replace')!r} at "
            f"version {version}, and {lacks}: the log has lost records. Nothing was decided.",
            advice=REPLAYED,
        )

    def _fill_answers(
        self,
        store: PartitionStore,
        topic: str,
        partition: int,
        offsets: tuple[int, int],
        alive: Alive,
    ) -> None:
        command_next, first_ms, last_ms = store.command_next, 0, 0
        batch, began = StoreBatch(), time.monotonic()
        for record in self._consumer.read(topic, partition, *offsets):
            found = _answer_of(record)
            if found is None:
                continue
            name, offset = found
            command_next = max(command_next, offset + 1)
            last_ms = record.timestamp_ms
            if len(batch.answers) >= _ROWS or last_ms - first_ms > _TOGETHER_MS:
                store.write(batch, first_ms)
                batch, first_ms, began = StoreBatch(), last_ms, _breathe(began, alive)
            batch.answers[name] = record.value or b""
        store.write(batch, last_ms)
        store.answered(command_next)

    def _remembered_from(self, topic: str, partition: int, end: int) -> int:
        """Offset of the oldest answer that is still remembered."""
        oldest_ms = int((time.time() - self._config.commands.remember_hours * 3600) * 1000)
        since = self._offsets.at_time([topic], oldest_ms)[topic, partition]
        # The newest answers are always read: they show which commands are answered.
        return min(since, max(0, end - _ROWS))


def _breathe(began: float, alive: Alive) -> float:
    if time.monotonic() - began < 1.0:
        return began
    alive()
    return time.monotonic()


def _version_of(record: Record) -> tuple[bytes, int] | None:
    """Key and version of a change; ``None``: it cannot be read."""
    try:
        return record.key or b"", decode_wire(record.value or b"").version
    except ValueError:
        return None


def _state_rows(record: Record) -> list[tuple[bytes, bytes]]:
    """Stored row of a record of `.state`.

    The row of an unreadable record has a text that no model accepts, so that the commands of that
    entity are parked, and those of all others are decided.
    """
    if record.key is None or record.value is None:
        return []
    try:
        wire = decode_wire(record.value)
        if not 0 < wire.version <= VERSION_MAX:
            raise ValueError(f"its version is {wire.version}")
        text = bytes(wire.current_entity_state)
        stated = None if text == b"null" else text
        row = state_row(wire.version, stated, wire.recorded_at)
    except (ValueError, TypeError) as cause:
        _unreadable.log(
            "%s[%d]@%d cannot be read, and the commands of %r are parked: %s",
            *(record.topic, record.partition, record.offset, record.key, cause),
        )
        return [(state_name(record.key), state_row(0, _UNREADABLE))]
    return [(state_name(record.key), row)]


def _answer_of(record: Record) -> tuple[bytes, int] | None:
    """Name of an answer and the offset of its command; ``None``: it cannot be read, and is skipped.

    No handler writes such a record. A command that had been answered by it would be decided again
    if it came again.
    """
    try:
        answer = decode_answer(record.value or b"")
        offset = int(dict(record.headers)[OFFSET] or b"")
    except (KeyError, ValueError) as cause:
        place = (record.topic, record.partition, record.offset)
        _unreadable.log("%s[%d]@%d is no answer, and is skipped: %r", *place, cause)
        return None
    return answer_key(answer.key.encode(), answer.id.bytes), offset
