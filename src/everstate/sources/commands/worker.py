"""The command handler's work on batches and partitions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from everstate.changes.keys import KEY_BYTES_MAX, check_key
from everstate.config import Config
from everstate.declarations.commands import CommandGroup
from everstate.errors import (
    EverstateError,
    InvalidChange,
    LogError,
    StateStoreFailed,
)
from everstate.errors.base import described
from everstate.log.attempt import Attempt, Incoming, place_of
from everstate.log.client import record_bytes_max
from everstate.log.loop import LogPartition, Send
from everstate.log.positions import Ends, check_ends
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.bound import check_log
from everstate.sources.commands.deciding import (
    NOTHING,
    REASON_MAX,
    Decided,
    Decider,
    RememberedEntity,
)
from everstate.sources.commands.restoring import Restorer
from everstate.sources.commands.store import (
    PartitionStore,
    StoreBatch,
    answer_key,
    read_state_row,
    state_row,
)
from everstate.sources.commands.wire import (
    CLIENT,
    DISCARD,
    OFFSET,
    PLACE,
    REASON,
    REPLAY,
    Outcome,
    WireCommand,
    decode_answer,
    decode_command,
    provenance_of,
)
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger(__name__)
_parked: Final = RateLimitedLogger(logger, logging.ERROR)
_unreadable: Final = RateLimitedLogger(logger, logging.ERROR)

_SAVE_EVERY_S: Final = 5.0
_PARKED_ROOM: Final = 16_384
"""For key, reason and place of a parked command."""
_FAILURES_MAX: Final = 2
"""A store that fails this many times without a success in between is deleted."""


class CommandPartition:
    """One partition of one entity type: its store, and its cache in memory."""

    def __init__(self, entity: str, number: int, store: PartitionStore, decider: Decider) -> None:
        self.entity, self.number = entity, number
        self.store = store
        self.decider = decider
        self.cache: dict[bytes, RememberedEntity] = {}
        self.batch = StoreBatch()
        self.open: dict[bytes, RememberedEntity] = {}
        """Entities after the changes of the open transaction."""
        self.newest: dict[bytes, tuple[bytes, Any]] = {}
        """Their newest changes, to be written to `.state`."""
        self.command_next = store.command_next

    def held(self, key: bytes) -> RememberedEntity:
        """An entity's present state, including the open transaction.

        Raises InvalidChange when the model no longer accepts its stored state.
        """
        found = self.open.get(key) or self.cache.get(key)
        if found is not None:
            return found
        row = self.store.state(key)
        if row is None:
            return NOTHING
        version, text, recorded_at = read_state_row(row)
        state = None if text is None else self.decider.group.entity_type.validate_json(text)
        held = self.cache[key] = RememberedEntity(version, state, text, recorded_at)
        return held

    def version(self, key: bytes) -> int:
        """Version of an entity whose stored state cannot be read."""
        row = self.store.state(key)
        return 0 if row is None else read_state_row(row)[0]

    def answer(self, name: bytes) -> bytes | None:
        """The remembered answer of a command."""
        return self.batch.answers.get(name) or self.store.answer(name)

    def settle(self, now_ms: int, cache_max: int, ends: Ends | None) -> None:
        """Store the results of the committed transaction, which proves these ends."""
        batch = self.batch
        for key, held in self.open.items():
            batch.states[key] = state_row(held.version, held.text, held.recorded_at)
        self.store.settle(batch, now_ms, ends, batch.command_offset + 1)
        self.cache.update(self.open)
        for key in list(islice(self.cache, max(0, len(self.cache) - cache_max))):
            del self.cache[key]
        if batch.command_offset >= 0:
            self.command_next = batch.command_offset + 1
        self.batch, self.open, self.newest = StoreBatch(), {}, {}


class CommandWork:
    """Decides commands; a :class:`~everstate.log.loop.Work`.

    All results of a batch are sent in its transaction; memory and local state are updated only
    after its commit, so that they are never ahead of the log.
    """

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, CommandGroup],
        folder: Path,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config
        self._clock = clock
        self._folder = folder
        self._names = TopicNames(config.log.prefix)
        limit, ahead_hours = config.log.message_bytes_max, config.log.occurred_ahead_hours
        self._failures = 0
        self._parked_bytes_max = record_bytes_max(config) - _PARKED_ROOM
        self._deciders = {
            name: Decider(group, message_bytes_max=limit, ahead_hours=ahead_hours)
            for name, group in groups.items()
        }
        self._entity_of = {self._names.commands(name): name for name in groups}
        self._topics = {
            name: (
                self._names.changes(name),
                self._names.state(name),
                self._names.replies(name),
                self._names.parked(name),
            )
            for name in groups
        }
        self._restorer: Restorer | None = None
        self._partitions: dict[LogPartition, CommandPartition] = {}
        self._ends: Ends | None = None
        self._saved_at = time.monotonic()

    @property
    def topics(self) -> Sequence[str]:
        """The topics to read."""
        return tuple(self._entity_of)

    def check_topics(self) -> None:
        """Raise TopicResized when a number of partitions changed, and LogError when they differ.

        Raises LogIdentityChanged when a changelog is not the one that it was.
        """
        check_log(self._config, self._topics)
        with Topics(self._config) as topics:
            for entity, others in self._topics.items():
                wanted = topics.partitions(self._names.commands(entity))
                for name in others:
                    if topics.partitions(name) != wanted:
                        raise LogError(
                            f"{name} has {topics.partitions(name)} partitions, and "
                            f"{self._names.commands(entity)} has {wanted}.",
                            advice="All topics of an entity type that takes commands need as many.",
                        )

    def open(self, place: LogPartition, committed: int | None, alive: Callable[[], None]) -> int:
        """Make the local state equal to the log; returns the offset of the next command."""
        if self._restorer is None:
            # A rebalance may have been caused by new partitions.
            self.check_topics()
            self._restorer = Restorer(self._config)
        topic, number = place
        entity = self._entity_of[topic]
        decider = self._deciders[entity]
        path = self._folder / entity / str(number)
        store = self._restorer.open(path, entity, decider.group.fingerprint, number, alive)
        self._partitions[place] = CommandPartition(entity, number, store, decider)
        # Answers in the log are right even when the group's offset has expired or was reset.
        wanted = max(committed or 0, store.command_next)
        there = self._restorer.extent(topic, number)
        check_ends(f"the command handler of {entity}", topic, {number: wanted}, {number: there.end})
        if 0 < wanted < there.start:
            last = there.start - 1
            logger.error("%s[%d]: commands %d to %d went undecided", *place, wanted, last)
        return max(wanted, there.start)

    def shut(self) -> None:
        """Close the stores; uncommitted results are discarded."""
        partitions, self._partitions = self._partitions, {}
        self._ends = None
        give_up = self._failures >= _FAILURES_MAX
        if give_up:
            logger.error("the local state fails again and again; it is made anew from the log")
            self._failures = 0
        for each in partitions.values():
            if give_up:
                each.store.destroy()
            else:
                each.store.close()
        if self._restorer is not None:
            self._restorer.close()
            self._restorer = None

    def is_due(self) -> bool:
        """Always false: there is no work without new commands."""
        return False

    def handle(self, batch: Sequence[Incoming], send: Send, attempt: Attempt) -> None:
        """Decide commands in their order, and send all results.

        A refused one is parked: its sender gets that answer, and its entity stays as it is.
        """
        with self._counted():
            self._decide_all(batch, send, attempt)

    def settle(self) -> None:
        """The transaction was committed: update memory and stores."""
        with self._counted():
            self._write_all()
        self._failures = 0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except StateStoreFailed:
            self._failures += 1
            raise

    def _decide_all(self, batch: Sequence[Incoming], send: Send, attempt: Attempt) -> None:
        now = self._clock()
        if self._restorer is not None and time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self._ends = self._restorer.ends({each.entity for each in self._partitions.values()})
        for message in batch:
            topic, number, offset = place_of(message)
            partition = self._partitions[topic, number]
            self._one(_Received(partition, message, offset, send), now, attempt)
            partition.batch.command_offset = offset
        for partition in self._partitions.values():
            state_topic = self._topics[partition.entity][1]
            for key, (value, headers) in partition.newest.items():
                send(state_topic, key, value, headers, partition.number)

    def _write_all(self) -> None:
        now_ms = int(time.time() * 1000)
        ends, self._ends = self._ends, None
        cache_max = self._config.commands.cache_entities_max // max(1, len(self._partitions))
        oldest_ms = now_ms - int(self._config.commands.remember_hours * 3_600_000)
        for each in self._partitions.values():
            if each.batch.command_offset < 0:
                # The commit proves the ownership only of partitions that are in the transaction.
                continue
            topics = self._topics[each.entity][:3]
            proved = None
            if ends is not None:
                proved = {(topic, each.number): ends[topic, each.number] for topic in topics}
            each.settle(now_ms, cache_max, proved)
            if proved is not None:
                each.store.forget(oldest_ms)
        if ends is not None:
            self._saved_at = time.monotonic()

    def _one(self, received: _Received, now: datetime, attempt: Attempt) -> None:
        """Decide one command."""
        message, partition, headers = received.message, received.partition, received.headers
        key = message.key() or b""
        topics = self._topics[partition.entity]
        try:
            command = decode_command(message.value() or b"")
            provenance_of(bytes(command.provenance))
            check_key(partition.entity, command.key)
            if command.key.encode() != key or command.entity != partition.entity or not key:
                raise ValueError(
                    f"it is to {command.entity} {command.key!r}, its record to {key!r}"
                )
        except (msgspec.DecodeError, ValueError, InvalidChange) as cause:
            self._park_unreadable(received, str(cause)[:REASON_MAX])
            return
        name = answer_key(key, command.id.bytes)
        again = REPLAY in headers or DISCARD in headers
        known = partition.answer(name)
        if known is not None and not (again and decode_answer(known).outcome is Outcome.PARKED):
            self._reply(received, known)
            return
        refused = attempt.refused(message)
        if refused is None:
            decided = attempt.call(
                message, self._decide, partition, key, command, DISCARD in headers, now
            )
        else:
            held = RememberedEntity(partition.version(key), None, None)
            decided = partition.decider.park(held, command, refused)
        for change_key, change, change_headers in decided.changes:
            received.give(topics[0], change_key, change, change_headers)
            partition.newest[key] = (change, change_headers)
        if decided.changes:
            partition.open[key] = decided.held
        partition.batch.answers[name] = decided.answer
        if decided.parked is not None or again:
            self._keep_parked(received, command, decided)
        self._reply(received, decided.answer)

    def _decide(
        self,
        partition: CommandPartition,
        key: bytes,
        command: WireCommand,
        give_up: bool,
        now: datetime,
    ) -> Decided:
        decider = partition.decider
        try:
            held = partition.held(key)
        except BaseException as cause:
            if isinstance(cause, EverstateError) and not isinstance(cause, InvalidChange):
                raise
            # The present model does not accept the stored state: the entity's commands are parked.
            held = RememberedEntity(partition.version(key), None, None)
            said = cause.message if isinstance(cause, InvalidChange) else described(cause)
            return decider.park(held, command, f"its stored state: {said}")
        return decider.discard(held, command) if give_up else decider.decide(held, command, now)

    def _reply(self, received: _Received, answer: bytes) -> None:
        client = (received.headers.get(CLIENT) or b"")[:KEY_BYTES_MAX]
        headers = [(OFFSET, b"%d" % received.offset), (CLIENT, client)]
        topic = self._topics[received.partition.entity][2]
        received.give(topic, received.message.key(), answer, headers)

    def _keep_parked(self, received: _Received, command: WireCommand, decided: Decided) -> None:
        """Park the command, or remove it from the parked ones when it was decided now."""
        entity, again = received.partition.entity, received.named_again
        parked_as = again or str(command.id).encode()
        if decided.parked is not None:
            _parked.log(
                "%s %r: %s %s is parked: %s",
                *(entity, command.key, command.command[:100], command.id, decided.parked),
            )
            self._send_parked(received, parked_as, decided.parked)
        elif again:
            received.give(self._topics[entity][3], parked_as, None, [])

    def _park_unreadable(self, received: _Received, reason: str) -> None:
        """Park an unreadable command, or remove it when it is discarded; it gets no answer."""
        entity, place = received.partition.entity, (received.partition.number, received.offset)
        parked_as = received.named_again or b"%d@%d" % place
        if DISCARD in received.headers:
            received.give(self._topics[entity][3], parked_as, None, [])
            return
        _unreadable.log("%s[%d]@%d: unreadable: %s", entity, *place, reason)
        self._send_parked(received, parked_as, reason)

    def _send_parked(self, received: _Received, parked_as: bytes, reason: str) -> None:
        """Park a command; a value that is too large with the headers stays in its topic only."""
        value, partition = received.message.value() or b"", received.partition
        if len(value) > self._parked_bytes_max:
            reason = f"its {len(value):,} bytes are in the commands topic only: {reason}"
            value = b""
        headers = [
            (REASON, reason[:REASON_MAX].encode()),
            (PLACE, b"%d@%d" % (partition.number, received.offset)),
            ("key", (received.message.key() or b"")[:KEY_BYTES_MAX]),
        ]
        received.give(self._topics[partition.entity][3], parked_as, value, headers)


class _Received:
    """A command's record that is decided now, and how what follows from it is sent."""

    def __init__(
        self, partition: CommandPartition, message: Incoming, offset: int, send: Send
    ) -> None:
        self.partition, self.message, self.offset, self._send = partition, message, offset, send
        self.headers: dict[str, Any] = dict(message.headers() or ())

    def give(self, topic: str, key: bytes | None, value: bytes | None, headers: Any) -> None:
        """Send a record to the partition that the command came from."""
        self._send(topic, key, value, headers, self.partition.number)

    @property
    def named_again(self) -> bytes:
        """The name under which a replayed or discarded command was parked; empty: it is neither."""
        named: bytes = self.headers.get(REPLAY) or self.headers.get(DISCARD) or b""
        return named[:KEY_BYTES_MAX]
