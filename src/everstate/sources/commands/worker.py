"""The handler of commands: what it does with each batch, and with its partitions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from everstate.config import Config
from everstate.errors import InvalidChange, LogError, LogIdentityChanged
from everstate.log.loop import Incoming, Place, Send
from everstate.log.positions import Ends
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.deciding import NOTHING, Decided, Decider, Held
from everstate.sources.commands.group import CommandGroup
from everstate.sources.commands.restoring import Restorer
from everstate.sources.commands.store import (
    Batch,
    PartitionStore,
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
    WireCommand,
    decode_command,
    provenance_of,
)

log = logging.getLogger(__name__)

_SAVE_EVERY_S: Final = 5.0
_PARKED: Final = b'"outcome":"parked"'
_HEAD_BYTES: Final = 300


class Partition:
    """One partition of one entity type: its store, and what is in memory of it."""

    def __init__(self, entity: str, number: int, store: PartitionStore, decider: Decider) -> None:
        self.entity, self.number = entity, number
        self.store = store
        self.decider = decider
        self.cache: dict[bytes, Held] = {}
        self.batch = Batch()
        self.open: dict[bytes, Held] = {}
        """Entities as the open transaction leaves them."""
        self.newest: dict[bytes, tuple[bytes, Any]] = {}
        """Their newest changes: what `.state` gets."""
        self.command_next = store.meta.command_next

    def held(self, key: bytes) -> Held:
        """An entity as it is now, the open transaction included.

        Raises InvalidChange when the model no longer takes its stored state.
        """
        found = self.open.get(key) or self.cache.get(key)
        if found is not None:
            return found
        row = self.store.state(key)
        if row is None:
            return NOTHING
        version, text = read_state_row(row)
        state = None if text is None else self.decider.group.entity_type.validate_json(text)
        held = self.cache[key] = Held(version, state, text)
        return held

    def version(self, key: bytes) -> int:
        """Version of an entity whose stored state cannot be read."""
        row = self.store.state(key)
        return 0 if row is None else read_state_row(row)[0]

    def answer(self, name: bytes) -> bytes | None:
        """The remembered answer of a command."""
        return self.batch.answers.get(name) or self.store.answer(name)

    def settle(self, now_ms: int, cache_max: int) -> None:
        """Write what the committed transaction brought."""
        batch = self.batch
        for key, held in self.open.items():
            batch.states[key] = state_row(held.version, held.text)
        self.store.write(batch, now_ms)
        self.cache.update(self.open)
        for key in list(islice(self.cache, max(0, len(self.cache) - cache_max))):
            del self.cache[key]
        if batch.command_offset >= 0:
            self.command_next = batch.command_offset + 1
        self.batch, self.open, self.newest = Batch(), {}, {}


class CommandWork:
    """Decides commands; a :class:`~everstate.log.loop.Work`.

    Everything that follows from a batch goes out in its transaction; memory and local state
    follow only when it is committed, so that they are never ahead of the log.
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
        limit = config.log.message_bytes_max
        self._deciders = {
            name: Decider(group, message_bytes_max=limit) for name, group in groups.items()
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
        self._partitions: dict[Place, Partition] = {}
        self._ends: Ends | None = None
        self._saved_at = time.monotonic()

    @property
    def topics(self) -> Sequence[str]:
        """What is to be read."""
        return tuple(self._entity_of)

    @property
    def owned(self) -> Sequence[Place]:
        """Partitions that are open."""
        return tuple(self._partitions)

    def check_topics(self) -> None:
        """Raise LogError when an entity's topics differ in their partitions: keys would move."""
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

    def open(self, place: Place, committed: int | None, alive: Callable[[], None]) -> int:
        """Make the local state equal to the log; says at which command to go on."""
        if self._restorer is None:
            self._restorer = Restorer(self._config)
        topic, number = place
        entity = self._entity_of[topic]
        decider = self._deciders[entity]
        path = self._folder / entity / str(number)
        store = self._restorer.open(path, entity, decider.group.fingerprint, number, alive)
        self._partitions[place] = Partition(entity, number, store, decider)
        # The answers know better than a group that was forgotten or set back.
        wanted = max(committed or 0, store.meta.command_next)
        there = self._restorer.extent(topic, number)
        if wanted > there.end:
            raise LogIdentityChanged(
                f"{topic}[{number}] ends at {there.end}, and commands before {wanted} are "
                "answered: it is not the topic that it was. Nothing was read.",
                advice="Give the handlers a log.prefix with topics of its own, or the old topic.",
            )
        if 0 < wanted < there.start:
            log.error("%s[%d]: commands %d to %d went undecided", *place, wanted, there.start)
        return max(wanted, there.start)

    def shut(self) -> None:
        """Close the stores; what no commit settled is forgotten."""
        partitions, self._partitions = self._partitions, {}
        self._ends = None
        for each in partitions.values():
            each.store.close()
        if self._restorer is not None:
            self._restorer.close()
            self._restorer = None

    def is_due(self) -> bool:
        """Never: only commands make work."""
        return False

    def handle(self, batch: Sequence[Incoming], send: Send) -> None:
        """Decide commands in their order, and send all that follows from them."""
        now = self._clock()
        if self._restorer is not None and time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self._ends = self._restorer.ends({each.entity for each in self._partitions.values()})
        for message in batch:
            topic, number, offset = message.topic(), message.partition(), message.offset()
            assert topic is not None
            assert number is not None
            assert offset is not None
            partition = self._partitions[topic, number]
            self._one(partition, message, offset, now, send)
            partition.batch.command_offset = offset
        for partition in self._partitions.values():
            state_topic = self._topics[partition.entity][1]
            for key, (value, headers) in partition.newest.items():
                send(state_topic, key, value, headers, partition.number)

    def settle(self) -> None:
        """The transaction is committed: memory and stores follow."""
        now_ms = int(time.time() * 1000)
        ends, self._ends = self._ends, None
        cache_max = self._config.commands.cache_entities_max // max(1, len(self._partitions))
        oldest_ms = now_ms - int(self._config.commands.remember_hours * 3_600_000)
        for each in self._partitions.values():
            worked = each.batch.command_offset >= 0
            if worked:
                each.settle(now_ms, cache_max)
            # Only of partitions in this transaction is it proved that nobody else owned them.
            if ends is not None and worked and self._restorer is not None:
                self._restorer.save(each.store, each.entity, each.number, ends, each.command_next)
                each.store.forget(oldest_ms)
        if ends is not None:
            self._saved_at = time.monotonic()

    def _one(
        self, partition: Partition, message: Incoming, offset: int, now: datetime, send: Send
    ) -> None:
        key, value = message.key() or b"", message.value() or b""
        headers = dict(message.headers() or ())
        topics = self._topics[partition.entity]
        try:
            command = decode_command(value)
            provenance_of(bytes(command.provenance))
            if command.key.encode() != key or command.entity != partition.entity or not key:
                raise ValueError(
                    f"it is to {command.entity} {command.key!r}, its record to {key!r}"
                )
        except (msgspec.DecodeError, ValueError) as cause:
            self._park_unreadable(partition, message, offset, str(cause), send)
            return
        name = answer_key(key, command.id.bytes)
        again = REPLAY in headers or DISCARD in headers
        known = partition.answer(name)
        if known is not None and not (again and _PARKED in known[:_HEAD_BYTES]):
            self._reply(partition, key, known, headers, offset, send)
            return
        decided = self._decide(partition, key, command, DISCARD in headers, now)
        for change_key, change, change_headers in decided.changes:
            send(topics[0], change_key, change, change_headers, partition.number)
            partition.newest[key] = (change, change_headers)
        if decided.changes:
            partition.open[key] = decided.held
        partition.batch.answers[name] = decided.answer
        if decided.parked is not None or again:
            self._keep_parked(partition, command, decided, message, offset, send)
        self._reply(partition, key, decided.answer, headers, offset, send)

    def _decide(
        self,
        partition: Partition,
        key: bytes,
        command: WireCommand,
        give_up: bool,
        now: datetime,
    ) -> Decided:
        decider = partition.decider
        try:
            held = partition.held(key)
        except InvalidChange as cause:
            # A state that today's model does not take: the entity's commands wait for a repair.
            held = Held(partition.version(key), None, None)
            return decider.park(held, command, f"its stored state: {cause.message}")
        return decider.discard(held, command) if give_up else decider.decide(held, command, now)

    def _reply(
        self,
        partition: Partition,
        key: bytes,
        answer: bytes,
        headers: Mapping[str, Any],
        offset: int,
        send: Send,
    ) -> None:
        told = [(OFFSET, b"%d" % offset), (CLIENT, headers.get(CLIENT) or b"")]
        send(self._topics[partition.entity][2], key, answer, told, partition.number)

    def _keep_parked(
        self,
        partition: Partition,
        command: WireCommand,
        decided: Decided,
        message: Incoming,
        offset: int,
        send: Send,
    ) -> None:
        """Park the command, or take it off the parked ones when it was one of them."""
        parked_topic = self._topics[partition.entity][3]
        headers = dict(message.headers() or ())
        again = headers.get(REPLAY) or headers.get(DISCARD)
        parked_as = again or str(command.id).encode()
        if decided.parked is not None:
            log.error(
                "%s %r: %s %s is parked: %s",
                *(partition.entity, command.key, command.command, command.id, decided.parked),
            )
            told = _parked_headers(message, partition.number, offset, decided.parked)
            send(parked_topic, parked_as, message.value(), told, partition.number)
        elif again:
            send(parked_topic, parked_as, None, [], partition.number)

    def _park_unreadable(
        self, partition: Partition, message: Incoming, offset: int, reason: str, send: Send
    ) -> None:
        """Park what cannot be read; nobody can be answered, and a parked one stays parked."""
        headers = dict(message.headers() or ())
        known_as = headers.get(REPLAY) or headers.get(DISCARD)
        parked_as = known_as or b"%d@%d" % (partition.number, offset)
        parked_topic = self._topics[partition.entity][3]
        if DISCARD in headers:
            send(parked_topic, parked_as, None, [], partition.number)
            return
        log.error("%s[%d]@%d: unreadable: %s", partition.entity, partition.number, offset, reason)
        told = _parked_headers(message, partition.number, offset, reason)
        send(parked_topic, parked_as, message.value(), told, partition.number)


def _parked_headers(
    message: Incoming, partition: int, offset: int, reason: str
) -> list[tuple[str, bytes]]:
    key = message.key() or b""
    return [
        (REASON, reason[:2_000].encode()),
        (PLACE, b"%d@%d" % (partition, offset)),
        ("key", key),
    ]
