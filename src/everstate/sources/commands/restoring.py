"""Making a partition's local state equal to the log, from where it stands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from everstate.changes.codec import decode_wire
from everstate.config import Config
from everstate.errors import CorruptRecord
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets, Range
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.store import (
    Batch,
    PartitionStore,
    answer_key,
    open_store,
    state_row,
)
from everstate.sources.commands.wire import OFFSET, decode_answer

log = logging.getLogger(__name__)

_ROWS: Final = 2_000
_TOGETHER_MS: Final = 1_000

Alive = Callable[[], None]


class Restorer:
    """Opens stores and reads into them what the log has more; holds two connections."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = TopicNames(config.log.prefix)
        self._offsets = Offsets(config)
        self._consumer = Consumer(config, client_id="everstate-commands-restore")
        self._ids: dict[str, tuple[str, ...]] = {}

    def close(self) -> None:
        """Give up the connections."""
        self._offsets.close()
        self._consumer.close()

    def open(
        self, path: Path, entity: str, fingerprint: str, partition: int, alive: Alive
    ) -> PartitionStore:
        """The store of one partition, holding exactly what the log holds.

        Cost: the records of `.state` and `.replies` since the store was saved; all of them (of
        the answers: within ``commands.remember_hours``) when it was lost or does not fit.
        """
        state_topic, replies_topic = self._names.state(entity), self._names.replies(entity)
        topic_ids = self._topic_ids(state_topic, replies_topic)
        # The group's offset was asked before: a former owner can commit nothing after this.
        ends = self._offsets.settled_ends((state_topic, replies_topic), partition, alive)
        store = open_store(path, fingerprint, topic_ids)
        meta = store.meta
        if meta.state_next > ends[state_topic] or meta.replies_next > ends[replies_topic]:
            log.warning("%s: ahead of the log; it is made again", path)
            store.destroy()
            store = open_store(path, fingerprint, topic_ids)
        try:
            self._fill(store, entity, partition, ends, alive)
        except BaseException:
            store.close()
            raise
        store.save(
            replace(
                store.meta,
                topic_ids=topic_ids,
                state_next=ends[state_topic],
                replies_next=ends[replies_topic],
            )
        )
        return store

    def ends(self, entities: Iterable[str]) -> Ends:
        """Where `.state` and `.replies` of these entity types end now."""
        return self._offsets.stable_ends({name for each in entities for name in self._topics(each)})

    def save(
        self, store: PartitionStore, entity: str, number: int, ends: Ends, command_next: int
    ) -> None:
        """Note in a store how far of the log it holds.

        ``ends`` must have been asked before a transaction of the store's owner that was committed
        since: only that proves that nobody else had written before these ends.
        """
        state_topic, replies_topic = self._topics(entity)
        meta = store.meta
        store.save(
            replace(
                meta,
                state_next=max(meta.state_next, ends[state_topic, number]),
                replies_next=max(meta.replies_next, ends[replies_topic, number]),
                command_next=max(meta.command_next, command_next),
            )
        )

    def extent(self, topic: str, partition: int) -> Range:
        """Offsets of a partition that the log has now."""
        place = (topic, partition)
        first = self._offsets.beginnings([topic])[place]
        return Range(first, self._offsets.high_watermarks([topic])[place])

    def _topics(self, entity: str) -> tuple[str, str]:
        return self._names.state(entity), self._names.replies(entity)

    def _topic_ids(self, *topics: str) -> tuple[str, ...]:
        with Topics(self._config) as asked:
            found = asked.identities(topics)
        return tuple(found[topic].topic_id for topic in topics)

    def _fill(
        self,
        store: PartitionStore,
        entity: str,
        partition: int,
        ends: dict[str, int],
        alive: Alive,
    ) -> None:
        state_topic, replies_topic = self._topics(entity)
        begins = self._offsets.beginnings((state_topic, replies_topic))
        start = max(store.meta.state_next, begins[state_topic, partition])
        batch, began = Batch(), time.monotonic()
        for record in self._consumer.read(state_topic, partition, start, ends[state_topic]):
            if record.key is not None and record.value is not None:
                batch.states[record.key] = _state_of(record)
            if len(batch.states) >= _ROWS:
                store.write(batch, 0)
                batch, began = Batch(), _breathe(began, alive)
        store.write(batch, 0)
        start = max(begins[replies_topic, partition], store.meta.replies_next)
        if store.meta.replies_next == 0:
            start = max(start, self._remembered_from(replies_topic, partition, ends[replies_topic]))
        self._fill_answers(store, replies_topic, partition, (start, ends[replies_topic]), alive)

    def _fill_answers(
        self,
        store: PartitionStore,
        topic: str,
        partition: int,
        offsets: tuple[int, int],
        alive: Alive,
    ) -> None:
        command_next, first_ms, last_ms = store.meta.command_next, 0, 0
        batch, began = Batch(), time.monotonic()
        for record in self._consumer.read(topic, partition, *offsets):
            name, offset = _answer_of(record)
            command_next = max(command_next, offset + 1)
            last_ms = record.timestamp_ms
            if len(batch.answers) >= _ROWS or last_ms - first_ms > _TOGETHER_MS:
                store.write(batch, first_ms)
                batch, first_ms, began = Batch(), last_ms, _breathe(began, alive)
            batch.answers[name] = record.value or b""
        store.write(batch, last_ms)
        store.meta = replace(store.meta, command_next=command_next)

    def _remembered_from(self, topic: str, partition: int, end: int) -> int:
        """Offset of the oldest answer that is still remembered."""
        oldest_ms = int((time.time() - self._config.commands.remember_hours * 3600) * 1000)
        since = self._offsets.at_time([topic], oldest_ms)[topic, partition]
        # The newest answers are always read: they say which commands are answered.
        return min(since, max(0, end - _ROWS))


def _breathe(began: float, alive: Alive) -> float:
    if time.monotonic() - began < 1.0:
        return began
    alive()
    return time.monotonic()


def _state_of(record: Record) -> bytes:
    """Stored row of a record of `.state`; raises CorruptRecord."""
    try:
        wire = decode_wire(record.value or b"")
    except msgspec.DecodeError as cause:
        place = (record.topic, record.partition, record.offset)
        raise CorruptRecord(*place, str(cause)) from cause
    text = bytes(wire.current_entity_state)
    return state_row(wire.version, None if text == b"null" else text)


def _answer_of(record: Record) -> tuple[bytes, int]:
    """Name of an answer and the offset of its command; raises CorruptRecord."""
    try:
        answer = decode_answer(record.value or b"")
        offset = int(dict(record.headers)[OFFSET] or b"")
    except (msgspec.DecodeError, KeyError, ValueError) as cause:
        place = (record.topic, record.partition, record.offset)
        raise CorruptRecord(*place, f"no answer: {cause}") from cause
    return answer_key(answer.key.encode(), answer.id.bytes), offset
