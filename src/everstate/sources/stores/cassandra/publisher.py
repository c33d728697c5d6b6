"""The publisher: sends committed changes from Cassandra to the log, each once and in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
from prometheus_client import Counter, Gauge

from everstate.cassandra import Database
from everstate.changes import (
    ChangeCodec,
    EntityType,
)
from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.errors import EverstateError, InvalidChange, RecordRefused, Unavailable
from everstate.log.publisher import OncePublisher, check_progress
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.runtime.worker import Worker
from everstate.sources.stores.cassandra.bound import BATCH, BEGUN, check_log, read_batch
from everstate.sources.stores.cassandra.schema import CassandraStatements, IndexStatements, install
from everstate.sources.stores.cassandra.unpublished import Announcement, Unpublished
from everstate.sources.stores.rows import bytes_of, stored_change

logger = logging.getLogger("everstate.sources.crud.cassandra")

OLDEST = Gauge(
    "everstate_cassandra_oldest_unpublished_seconds",
    "Age of the oldest change that is not in the log",
)
BLOCKED = Gauge("everstate_cassandra_blocked_keys", "Keys whose changes the log does not take")
PUBLISHED = Counter("everstate_cassandra_published_changes", "Changes moved to the log")

_KEYS_AT_ONCE: Final = 64
_ROWS_AT_ONCE: Final = 8
"""Rows that are read of each of many keys; a key that has more is read on alone."""
_BATCH_BYTES_MAX: Final = 16 * 1_048_576
_ASK_AFTER_S: Final = 2.0
"""After this time, an announced write that is not visible is read with SERIAL."""
_FENCE_AFTER_S: Final = 60.0
_KNOWN_MAX: Final = 100_000
_PUBLISH_S: Final = 30.0
_OPEN_S: Final = 10.0
_BLOCK_S: Final = 30.0

_encode = msgspec.json.Encoder().encode
_decode_note = msgspec.json.Decoder(list[tuple[str, str, int]]).decode


@dataclass
class _Batch:
    """Contents of one Kafka transaction: records, and the version that each key reaches."""

    changes: list[OutRecord] = field(default_factory=list)
    newest: dict[EntityKey, OutRecord] = field(default_factory=dict)
    reached: dict[EntityKey, int] = field(default_factory=dict)
    settled: list[Announcement] = field(default_factory=list)
    resent: dict[UUID, int] = field(default_factory=dict)
    """Attempt of an announcement to send again → version up to which this batch does so."""
    size: int = 0
    """Bytes of the values."""
    note_size: int = 2
    """Upper bound for the bytes of the note."""

    @property
    def records(self) -> list[OutRecord]:
        """All changes, and then the newest of each key for `.state`."""
        return [*self.changes, *self.newest.values()]

    def note(self) -> bytes:
        """The published version of each key, recorded in the log with the batch."""
        return _encode([(*key, version) for key, version in self.reached.items()])


class Publisher(Worker):
    """Publishes the changes in Cassandra to `.changes` and `.state` of the log (C9).

    It polls the index of unpublished changes. For each key in it, it sends the changes after the
    newest published one, in the order of their versions, in a numbered Kafka transaction (see
    :class:`OncePublisher`). Then it stores the published version of each key in Cassandra. If it
    was killed in between, the next publisher reads the newest batch from the log, and stores these
    versions instead of sending the batch again: each change is in the log once.

    One process at a time, one thread; a second publisher of the keyspace fences the first.
    """

    doing = "the publisher of Cassandra"
    retry_s = (0.2, 5.0)

    def __init__(
        self,
        config: Config,
        entity_types: Iterable[EntityType],
        *,
        database: Database | None = None,
    ) -> None:
        self._config = config
        self._types = {each.name: each for each in entity_types}
        names, limit = TopicNames(config.log.prefix), config.log.message_bytes_max
        self._topics = {name: (names.changes(name), names.state(name)) for name in self._types}
        self._codecs = {
            name: ChangeCodec(each, message_bytes_max=limit) for name, each in self._types.items()
        }
        self._owned = database is None
        self._database = database or Database(config)
        keyspace = self._database.keyspace
        self._sql = {name: CassandraStatements(keyspace, name) for name in self._types}
        self._index = IndexStatements(keyspace)
        self._unpublished = Unpublished(self._database)
        watched = [changes for changes, _ in self._topics.values()]
        self._publisher = OncePublisher(config, f"publisher-cassandra-{keyspace}", watched=watched)
        self._note_bytes_max = limit // 2
        self._batch_changes = config.cassandra.batch_changes
        self.idle_s = config.cassandra.poll_ms / 1000
        self._published: dict[EntityKey, int] = {}
        """Published versions of recent keys; a cache, because no other process writes them."""
        self._resent: dict[UUID, int] = {}
        """Versions up to which announced changes were sent again; those after them follow."""
        self._blocked: dict[EntityKey, float] = {}
        self._alone: EntityKey | None = None
        """The key that gets the next batch for itself, while searching for a refused one."""
        self._is_open = False
        self._number = 0

    def close(self) -> None:
        """Close the connections; unpublished changes stay unpublished."""
        self._is_open = False
        self._publisher.close()
        if self._owned:
            self._database.close()

    def may_pass(self, error: EverstateError) -> bool:
        """Only of a server that is down."""
        return isinstance(error, Unavailable)

    def step(self) -> int:
        """Publish one batch of unpublished changes; returns its number of changes.

        Raises Unavailable when a server is down: nothing is lost, call again. Raises Fenced when
        another publisher took over, and LogTruncated when the log lost batches that were published.
        """
        try:
            self._open()
            waiting = self._unpublished.open()
            OLDEST.set(max((each.age_s for each in waiting), default=0.0))
            by_key = self._by_key(waiting)
            batch = self._collect(by_key)
            if batch.changes:
                self._publish(batch)
            for announcement in batch.settled:
                self._unpublished.settle(announcement)
                self._resent.pop(announcement.attempt, None)
            return len(batch.changes)
        except Unavailable:
            self.close()
            raise

    def _open(self) -> None:
        if self._is_open:
            return
        install(self._database, tuple(self._types))
        check_log(self._database, self._config, self._types)
        progress = self._publisher.open(_OPEN_S)
        marked, begun = (read_batch(self._database, name) for name in (BATCH, BEGUN))
        check_progress("the publisher of Cassandra", progress, marked, begun)
        self._publisher.check_tails("the publisher of Cassandra", begun)
        self._number = marked
        self._published.clear()
        if progress is not None:
            self._number = max(marked, progress.batch)
            self._write_down(_decode_note(progress.note))
        self._is_open = True

    def _by_key(self, waiting: Sequence[Announcement]) -> dict[EntityKey, list[Announcement]]:
        now, found = time.monotonic(), dict[EntityKey, list[Announcement]]()
        alone, self._alone = self._alone, None
        for each in waiting:
            key = (each.entity, each.key)
            if alone is not None and key != alone:
                continue
            if each.entity in self._types and self._blocked.get(key, 0.0) <= now:
                found.setdefault(key, []).append(each)
        return found

    def _collect(self, by_key: Mapping[EntityKey, list[Announcement]]) -> _Batch:
        """Read the changes of the announced keys until a batch is full."""
        batch, keys = _Batch(), list(by_key)
        for at in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[at : at + _KEYS_AT_ONCE]
            self._look_up_published(some)
            firsts = dict[EntityKey, int]()
            for key in some:
                first = self._first(key, by_key[key])
                if first is None:
                    batch.settled.extend(by_key[key])
                else:
                    firsts[key] = first
            for key, rows in self._read(firsts, batch):
                if self._is_full(batch):
                    return batch
                self._add(batch, key, firsts[key], rows, by_key[key])
        return batch

    def _first(self, key: EntityKey, announced: Sequence[Announcement]) -> int | None:
        """First version of a key to be sent; ``None``: the log has all announced versions."""
        published = self._published[key]
        again = [
            max(each.again_from, self._resent.get(each.attempt, 0) + 1)
            for each in announced
            if each.again_from is not None
        ]
        if not again and all(each.version <= published for each in announced):
            return None
        return min([published + 1, *again])

    def _read(
        self, firsts: Mapping[EntityKey, int], batch: _Batch
    ) -> Iterator[tuple[EntityKey, Sequence[Any]]]:
        """Each key's rows, oldest first, from the version before the first to be sent."""
        for entity, sql in self._sql.items():
            keys = [key for key in firsts if key[0] == entity]
            values = ([key[1], max(1, firsts[key] - 1), _ROWS_AT_ONCE] for key in keys)
            answers = self._database.execute_many(sql.changes, values)
            for key, rows in zip(keys, answers, strict=True):
                is_all = len(rows) < _ROWS_AT_ONCE
                yield key, rows if is_all else self._read_on(key, firsts[key], batch)

    def _read_on(self, key: EntityKey, first: int, batch: _Batch) -> Sequence[Any]:
        """The rows of a key with many of them: as many as the batch has room for.

        The first row may be the one before the first to be sent, so there are at least two.
        """
        count = max(_ROWS_AT_ONCE, self._batch_changes + 1 - len(batch.changes))
        values = [key[1], max(1, first - 1), count]
        rows, size = list[Any](), batch.size
        for row in self._database.stream(self._sql[key[0]].changes, values, _ROWS_AT_ONCE):
            rows.append(row)
            size += sum(bytes_of(text) for text in (row.before, row.after, row.event))
            if size >= _BATCH_BYTES_MAX and len(rows) > 1:
                break
        return rows

    def _is_full(self, batch: _Batch) -> bool:
        return (
            len(batch.changes) >= self._batch_changes
            or batch.size >= _BATCH_BYTES_MAX
            or batch.note_size >= self._note_bytes_max
        )

    def _look_up_published(self, keys: Sequence[EntityKey]) -> None:
        if len(self._published) > _KNOWN_MAX:
            self._published.clear()
        unknown = [key for key in keys if key not in self._published]
        answers = self._database.execute_many(self._index.published, unknown)
        for key, rows in zip(unknown, answers, strict=True):
            self._published[key] = rows[0].version if rows else 0

    def _add(
        self,
        batch: _Batch,
        key: EntityKey,
        first: int,
        rows: Sequence[Any],
        announced: Sequence[Announcement],
    ) -> None:
        """Add a key's unpublished changes to the batch, and settle its announcements."""
        head = _head(rows)
        if any(each.version > head and each.age_s > _ASK_AFTER_S for each in announced):
            # An announced write that is not visible may be in progress: a SERIAL read settles it.
            values = [key[1], max(1, first - 1), max(len(rows), _ROWS_AT_ONCE)]
            rows = self._database.execute(self._sql[key[0]].changes, values, serial=True)
            head = _head(rows)
        try:
            records = self._compose(key, first, rows)
        except (InvalidChange, KeyError, ValueError, RecursionError) as refusal:
            self._block(key, str(refusal))
            return
        reached = rows[-1].version or head if rows else head
        for each in announced:
            if each.version <= reached or (each.version > head and self._is_off(key, head, each)):
                batch.settled.append(each)
            elif each.again_from is not None:
                batch.resent[each.attempt] = reached
        if records:
            last = records[-1]
            batch.changes.extend(records)
            state = self._topics[key[0]][1]
            batch.newest[key] = OutRecord(state, last.key, last.value, last.headers)
            batch.reached[key] = reached
            batch.size += sum(len(record.value or b"") for record in records)
            batch.note_size += 2 * len(key[1].encode()) + 80

    def _is_off(self, key: EntityKey, head: int, announced: Announcement) -> bool:
        """Whether an announced write will never be done; after a minute a fence ensures that.

        The fence changes a column that the write's condition includes, so that a writer that was
        suspended until then fails, starts over, and announces again.
        """
        if announced.age_s < _FENCE_AFTER_S:
            return False
        statement = self._sql[key[0]].fence
        row = self._database.execute(statement, [uuid4(), key[1], head or None])[0]
        return bool(row[0])

    def _compose(self, key: EntityKey, first: int, rows: Sequence[Any]) -> list[OutRecord]:
        """Records of a key's changes from version ``first`` on; raises InvalidChange."""
        entity, name = key
        records, below = list[OutRecord](), None
        for row in rows:
            if row.version is not None and row.version >= first:
                chained = row.chained is None or row.chained
                before, recorded_at = below if chained else row.before, row.recorded_at
                change = stored_change(
                    entity, name, row, before, datetime.fromisoformat(recorded_at)
                )
                topic = self._topics[entity][0]
                records.append(OutRecord(topic, *self._codecs[entity].encode(change)))
            below = row.after
        return records

    def _publish(self, batch: _Batch) -> None:
        self._number += 1
        try:
            self._publisher.publish(self._number, batch.records, batch.note(), timeout_s=_PUBLISH_S)
        except RecordRefused as refusal:
            self._narrow(batch, refusal)
            return
        self._write_down([(*key, version) for key, version in batch.reached.items()])
        for key, version in batch.reached.items():
            self._published[key] = max(version, self._published.get(key, 0))
        self._resent.update(batch.resent)
        PUBLISHED.inc(len(batch.changes))

    def _narrow(self, batch: _Batch, refusal: RecordRefused) -> None:
        """Block the key that the log refuses; no change of the batch was published.

        The key in Kafka's error may belong to another record of the batch, so a key is blocked only
        when a batch of only that key was refused. The one with the largest change is tried first.
        """
        largest = max(batch.changes, key=lambda record: len(record.value or b""))
        batch.settled.clear()
        batch.changes.clear()
        batch.resent.clear()
        named = [
            (entity, (largest.key or b"").decode())
            for entity, (topic, _) in self._topics.items()
            if topic == largest.topic
        ]
        if len(batch.reached) > 1:
            self._alone = named[0]
        else:
            self._block(named[0], refusal.reason)

    def _block(self, key: EntityKey, reason: str) -> None:
        logger.error("the changes of %s %r stay unpublished: %s", *key, reason)
        now = time.monotonic()
        self._blocked = {k: due for k, due in self._blocked.items() if due > now}
        self._blocked[key] = now + _BLOCK_S
        BLOCKED.set(len(self._blocked))

    def _write_down(self, reached: Iterable[tuple[str, str, int]]) -> None:
        """Store each key's published version, and the batch.

        Each is also the timestamp of its row, so that it never decreases.
        """
        rows = [*reached, (*BATCH, self._number)]
        self._database.execute_many(
            self._index.set_published,
            ([entity, key, number, number] for entity, key, number in rows),
        )


def _head(rows: Sequence[Any]) -> int:
    return int(rows[0].head_version or 0) if rows else 0
