"""Process managers: they turn changes into commands, sent at once or after a delay."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from everstate.changes import Change, ChangeCodec, Provenance
from everstate.changes.keys import check_key
from everstate.config import Config
from everstate.declarations.commands import group_of
from everstate.declarations.processes import ProcessManager
from everstate.errors import (
    ChangeTooLarge,
    DataLoss,
    InvalidChange,
    LogTruncated,
    ProcessFailed,
    TopicResized,
)
from everstate.errors.log import REPLAYED
from everstate.log.attempt import Attempt, Incoming, place_of
from everstate.log.consumer import Consumer
from everstate.log.loop import (
    LogPartition,
    Send,
    next_offsets,
)
from everstate.log.positions import Offsets, Range, check_ends
from everstate.log.slots import Slot
from everstate.log.topics import TopicIdentity, TopicNames, Topics, check_same_topic
from everstate.sources.commands.handler import SlotLoop
from everstate.sources.commands.seen import Seen
from everstate.sources.commands.wire import WireCommand, command_json, encode, provenance_text
from everstate.telemetry import RateLimitedLogger
from everstate.views.project import Project

logger = logging.getLogger(__name__)
_unreadable: Final = RateLimitedLogger(logger, logging.ERROR)

_FIRE_MAX: Final = 1_000


class Timer(msgspec.Struct, frozen=True, order=True, gc=False):
    """A delayed command, as stored in the log; ordered by due time."""

    due_us: int
    id: UUID
    entity: str
    key: str
    command: msgspec.Raw


_decode_timer = msgspec.json.Decoder(Timer).decode


class ProcessWork:
    """Turns changes into commands; a :class:`~everstate.log.loop.Work`."""

    def __init__(
        self,
        config: Config,
        app: Project,
        process: ProcessManager,
        folder: Path,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config, self._app, self._process, self._clock = config, app, process, clock
        self._folder = folder
        self._bytes_max = config.log.message_bytes_max
        self._names = TopicNames(config.log.prefix)
        self._codecs = {
            self._names.changes(name): ChangeCodec(app.entities[name]) for name in process.on
        }
        self._timers_topic = self._names.timers(process.name)
        self._seen_topic = self._names.seen(process.name)
        self._seen: dict[int, Seen] = {}
        self._identities: dict[str, TopicIdentity] = {}
        self._waiting: list[tuple[Timer, int]] = []
        self._set: list[tuple[Timer, int]] = []
        self._fired = 0

    @property
    def topics(self) -> Sequence[str]:
        """The topics to read."""
        return tuple(self._codecs)

    def open(self, place: LogPartition, committed: int | None, alive: Callable[[], None]) -> int:
        """Read a partition's timers and seen versions; returns the offset to resume at.

        Raises LogIdentityChanged and TopicResized when the changelog is not the one that was read,
        and as :meth:`start_at` does.
        """
        topic, number = place
        own = (self._timers_topic, self._seen_topic)
        with Topics(self._config) as topics:
            identities = topics.identities([topic, *own])
        identity = self._identities[topic] = identities[topic]
        for each in own:
            if identities[each].partitions < identity.partitions:
                raise TopicResized(topic, identities[each].partitions, identity.partitions)
        with Offsets(self._config) as offsets:
            if number not in self._seen:
                self._read_timers(number, offsets, alive)
                path = self._folder / str(number)
                self._seen[number] = Seen.open(
                    self._config, path, self._seen_topic, number, offsets, alive
                )
            first = offsets.beginnings([topic])[topic, number]
            there = Range(first, offsets.stable_ends([topic])[topic, number])
        # The stored position is used when Kafka has expired the group's offset, or it is older.
        position = 0
        if (stored := self._seen[number].position(topic)) is not None:
            position, read = stored
            check_same_topic(topic, read, identity)
        known = [each for each in (committed, position) if each]
        if there.end and not known:
            self._check_begun(place)
        return self.start_at(place, max(known, default=committed), there)

    def _check_begun(self, place: LogPartition) -> None:
        """Raise LogTruncated when a changelog of commands was replayed, and nothing else (C8)."""
        topic, number = place
        for entity in self._app.command_groups:
            state = self._names.state(entity)
            if topic != self._names.changes(entity):
                continue
            with Offsets(self._config) as offsets:
                if not offsets.stable_ends([state])[state, number]:
                    raise LogTruncated(
                        f"process manager {self._process.name!r}: {topic} has changes, and {state} "
                        "is empty. It did not react to them.",
                        advice=REPLAYED,
                    )

    def start_at(self, place: LogPartition, position: int | None, there: Range) -> int:
        """The offset to resume at, within the offsets ``there``; ``position`` ``None``: never ran.

        Raises DataLoss when unread changes are gone from the log, and LogTruncated when the log
        ends before its position.
        """
        name, start = self._process.name, self._process.start
        if position is None and start == "end":
            return there.end
        wanted = position or 0
        topic, number = place
        check_ends(f"process manager {name!r}", topic, {number: wanted}, {number: there.end})
        if wanted < there.start:
            lost = (
                f"process manager {name!r}: {place[0]}[{place[1]}] no longer has the changes from"
                f" {wanted} to {there.start - 1}"
            )
            if start != "oldest":
                raise DataLoss(
                    f"{lost}. It has not reacted to them.",
                    advice='Declare it with start="oldest" to continue at the oldest change that'
                    ' the log has. A new one with start="end" reacts to new changes only.',
                )
            logger.error("%s, and continues without them", lost)
        return max(wanted, there.start)

    def shut(self) -> None:
        """Clear the memory; the log has its contents."""
        seen, self._seen = self._seen, {}
        for each in seen.values():
            each.close()
        self._waiting, self._set, self._fired = [], [], 0

    def is_due(self) -> bool:
        """Whether a delayed command is due."""
        return bool(self._waiting) and self._waiting[0][0].due_us <= _us(self._clock())

    def handle(self, batch: Sequence[Incoming], send: Send, attempt: Attempt) -> None:
        """Send the commands that follow and delayed ones that are due; store new delayed ones.

        Raises ProcessFailed for a refused change: none is skipped, and its commands cannot be sent.
        """
        now_us = _us(self._clock())
        for message in batch:
            topic, number, _ = place_of(message)
            try:
                change = self._codecs[topic].decode(message.value() or b"")
            except InvalidChange as error:
                # The keeper and the archive report it too; no command can follow from it.
                place = (self._process.name, topic, number)
                _unreadable.log("%s: %s[%d]: %s", *place, error.message)
                continue
            if not self._seen[number].takes(change):
                continue
            if refused := attempt.refused(message):
                cause = ValueError(refused)
                raise ProcessFailed(self._process.name, change.entity, change.key, cause)
            for timer in attempt.call(message, self._followed, change):
                if timer.due_us <= now_us:
                    self._send(timer, send)
                else:
                    send(self._timers_topic, _name(timer), encode(timer), [], number)
                    self._set.append((timer, number))
        due = self._waiting and self._waiting[0][0].due_us <= now_us
        for timer, number in heapq.nsmallest(_FIRE_MAX, self._waiting) if due else ():
            if timer.due_us > now_us:
                break
            self._send(timer, send)
            send(self._timers_topic, _name(timer), None, [], number)
            self._fired += 1
        for (topic, number), position in next_offsets(batch).items():
            self._seen[number].move(topic, position, self._identities[topic])
        for number, seen in self._seen.items():
            for name, value in seen.changed.items():
                send(self._seen_topic, name, value, [], number)

    def settle(self) -> None:
        """The transaction was committed: update the memory."""
        for seen in self._seen.values():
            seen.settle()
        for _ in range(self._fired):
            heapq.heappop(self._waiting)
        for timer in self._set:
            heapq.heappush(self._waiting, timer)
        self._set, self._fired = [], 0

    def _followed(self, change: Change[dict[str, Any]]) -> list[Timer]:
        try:
            return list(self._follow(change))
        except BaseException as cause:
            # The project's own code: the process manager stops until it is repaired; no change is
            # skipped.
            raise ProcessFailed(self._process.name, change.entity, change.key, cause) from cause

    def _follow(self, change: Change[dict[str, Any]]) -> Iterable[Timer]:
        for command_id, effect in self._process.effects(change):
            group = group_of(self._app.command_groups, effect.entity)
            check_key(group.name, effect.key)
            at = change.recorded_at + effect.delay
            command = WireCommand(
                id=command_id,
                entity=effect.entity,
                key=effect.key,
                command=group.check(effect.command),
                data=msgspec.Raw(command_json(effect.command)),
                occurred_at=at,
                provenance=provenance_text(self._provenance(change)),
                expected_version=effect.expected_version,
            )
            encoded = encode(command)
            if len(encoded) > self._bytes_max:
                raise ChangeTooLarge(group.name, effect.key, len(encoded), self._bytes_max)
            yield Timer(_us(at), command_id, effect.entity, effect.key, msgspec.Raw(encoded))

    def _provenance(self, change: Change[dict[str, Any]]) -> Provenance:
        source = change.provenance
        return Provenance(
            api_version=source.api_version,
            service_name=f"process:{self._process.name}",
            identifier=f"{change.entity}:{change.key}",
            correlation_id=source.correlation_id,
            causation_id=str(change.id),
        )

    def _send(self, timer: Timer, send: Send) -> None:
        send(self._names.commands(timer.entity), timer.key.encode(), bytes(timer.command))

    def _read_timers(self, number: int, offsets: Offsets, alive: Callable[[], None]) -> None:
        topic = self._timers_topic
        start = offsets.beginnings([topic])[topic, number]
        end = offsets.settled_ends([topic], number, alive)[topic]
        found: dict[bytes, bytes | None] = {}
        with Consumer(self._config, client_id=f"everstate-{self._process.name}") as consumer:
            for record in consumer.read(topic, number, start, end):
                found[record.key or b""] = record.value
        alive()
        for name, value in found.items():
            try:
                timer = None if value is None else _decode_timer(value)
            except msgspec.DecodeError as cause:
                # No process manager writes such a record: its id is no command's.
                _unreadable.log("%s[%d]: %r is no delayed command: %s", topic, number, name, cause)
                continue
            if timer is not None:
                heapq.heappush(self._waiting, (timer, number))


class ProcessRunner(SlotLoop):
    """Runs one process manager of an app, with one Kafka transaction for each batch of changes."""

    def __init__(
        self,
        config: Config,
        app: Project,
        name: str,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        process = app.processes[name]
        with Topics(config) as topics:
            topics.ensure(process.on)
            topics.ensure_commands(app.command_groups, [name])
        slot = Slot(config.commands_path / config.log.prefix / f"process-{name}")
        work = ProcessWork(config, app, process, slot.path, clock=clock)
        topics_on = [TopicNames(config.log.prefix).changes(each) for each in process.on]
        super().__init__(config, work, topics_on, slot, f".process.{name}")


def _us(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)


def _name(timer: Timer) -> bytes:
    return str(timer.id).encode()
