"""Makes of a changelog that was replayed what else commands own in the log.

An archive has the changes. From these follow the states of `.state`, the answers of the commands
that were accepted, and the position of a process manager that shall not react to them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final
from uuid import UUID

import msgspec

from everstate.changes.codec import WireChange, decode_wire
from everstate.closing import Closing
from everstate.config import Config
from everstate.declarations.processes import ProcessManager
from everstate.errors import LogError
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.deciding import BLOCK, answer_json
from everstate.sources.commands.seen import position_row
from everstate.sources.commands.wire import (
    CLIENT,
    OFFSET,
    AnsweredChange,
    Outcome,
    WireAnswer,
)

_BEFORE_ALL: Final = [(OFFSET, b"-1"), (CLIENT, b"")]
"""Headers of an answer whose command is in no topic."""


class _Event(msgspec.Struct):
    type: str = ""
    data: msgspec.Raw = msgspec.Raw(b"null")


_decode_event = msgspec.json.Decoder(_Event | None).decode


class Carrying(Closing):
    """Carries what follows from changelogs; it may be run again, and stopped at any time."""

    def __init__(
        self, config: Config, entities: Collection[str], processes: Mapping[str, ProcessManager]
    ) -> None:
        """``entities``: the entity types that take commands."""
        self._config, self._entities = config, entities
        self._names = TopicNames(config.log.prefix)
        with Topics(config) as topics:
            topics.ensure_commands(entities, processes)
            read = {name for process in processes.values() for name in process.on}
            topics.ensure(read)
            changelogs = list(map(self._names.changes, read))
            self._identities = topics.identities(changelogs) if changelogs else {}
        self._offsets = Offsets(config)
        seen = {each.name: self._names.seen(each.name) for each in processes.values()}
        ends = self._offsets.stable_ends(seen.values())
        used = {topic for (topic, _), end in ends.items() if end}
        self._new = [each for each in processes.values() if seen[each.name] not in used]
        """Process managers that never ran on this log."""

    def close(self) -> None:
        """Close the connection."""
        self._offsets.close()

    def check(self, published_again: Collection[str]) -> None:
        """Raise LogError when something would be lost or done again; nothing was written then.

        ``published_again``: the entity types whose source writes its changes to the new log later.
        """
        for entity in self._entities:
            changes, state = self._names.changes(entity), self._names.state(entity)
            begins, ends = self._offsets.beginnings([changes]), self._offsets.stable_ends([state])
            if len(begins) != len(ends):
                raise LogError(
                    f"{changes} has {len(begins)} partitions, and {state} has {len(ends)}.",
                    advice=f"Give `log.partitions` the value {len(begins)} and `log.prefix` a new "
                    "one, and replay again.",
                )
            if any(begin and not ends[state, number] for (_, number), begin in begins.items()):
                raise LogError(
                    f"{changes} has lost its oldest changes, and {state} is empty: the states of "
                    "some entities are not known.",
                    advice="Replay the archive to a new `log.prefix`.",
                )
        for process in self._new:
            for entity in process.on:
                self._check_process(process, entity, entity in published_again)

    def _check_process(self, process: ProcessManager, entity: str, is_published: bool) -> None:
        is_there = any(self._offsets.stable_ends([self._names.changes(entity)]).values())
        if is_there and process.start != "end":
            raise LogError(
                f"process manager {process.name!r} would react again to the changes of {entity} "
                "that are in the new log. Nothing was carried over or moved.",
                advice='Declare it with start="end" and run `everstate log begin --again`: it goes '
                "on after these changes.",
            )
        if is_published and not is_there:
            raise LogError(
                f"process manager {process.name!r} would react again to the changes of {entity} "
                "when its source publishes them to the new log. Nothing was carried over or moved.",
                advice="Take the process manager out of the app, begin the log, and let the source "
                f"publish (`everstate drift repair {entity}`). Then declare it again, with "
                'start="end", and run `everstate log begin --again`.',
            )

    def carry(self) -> list[str]:
        """Write what the log lacks; returns the entity types of which that was something.

        Cost: the changelogs are read, once or twice; the memory has the version of each key of a
        partition.
        """
        carried = []
        with (
            Consumer(self._config, client_id="everstate-carry") as consumer,
            Producer(self._config, client_id="everstate-carry") as producer,
        ):
            for entity in self._entities:
                # One after the other: all partitions are carried.
                found = [
                    self._carry(consumer, producer, entity, number)
                    for _, number in sorted(self._offsets.beginnings([self._names.state(entity)]))
                ]
                carried += [entity] if any(found) else []
            for process in self._new:
                self._position(producer, process)
            producer.flush()
        return carried

    def _carry(self, consumer: Consumer, producer: Producer, entity: str, number: int) -> bool:
        """Carry a partition; the answers come first, so that where states are, answers are too."""
        changes, state = self._names.changes(entity), self._names.state(entity)
        # A handler that runs writes to both at once: the states are at least as new.
        span = self._span(changes, number)
        newest = _newest(consumer.read(changes, number, *span))
        known = _newest(consumer.read(state, number, *self._span(state, number)))
        lacking = {key: at for key, at in newest.items() if known.get(key, (0,))[0] < at[0]}
        if not lacking:
            return False
        for answer in _answers(consumer.read(changes, number, *span), lacking):
            text = answer_json(answer, self._config.log.message_bytes_max)
            key = answer.key.encode()
            producer.send_raw(self._names.replies(entity), key, text, _BEFORE_ALL, number)
        producer.flush()
        for record in consumer.read(changes, number, *span):
            if lacking.get(record.key or b"", (0, -1))[1] == record.offset:
                producer.send_raw(state, record.key, record.value, record.headers, number)
        producer.flush()
        return True

    def _position(self, producer: Producer, process: ProcessManager) -> None:
        """Let a process manager go on after the changes that are there."""
        changelogs = list(map(self._names.changes, process.on))
        for (topic, number), end in self._offsets.stable_ends(changelogs).items():
            if end:
                name, row = position_row(topic, end, self._identities[topic])
                producer.send_raw(self._names.seen(process.name), name, row, [], number)

    def _span(self, topic: str, number: int) -> tuple[int, int]:
        place = (topic, number)
        begins, ends = self._offsets.beginnings([topic]), self._offsets.stable_ends([topic])
        return begins[place], ends[place]


def _newest(records: Iterable[Record]) -> dict[bytes, tuple[int, int]]:
    """Key → the newest version, and the offset of the first record of it, which counts (C6)."""
    newest = dict[bytes, tuple[int, int]]()
    for record in records:
        change, key = _readable(record), record.key or b""
        if change is not None and change.version > newest.get(key, (0, 0))[0]:
            newest[key] = change.version, record.offset
    return newest


def _answers(records: Iterable[Record], keys: Collection[bytes]) -> Iterator[WireAnswer]:
    """The answer of each accepted command; its changes are one after the other."""
    newest, answered = dict[bytes, int](), list[AnsweredChange]()
    for record in records:
        change, key = _readable(record), record.key or b""
        block = None if change is None else change.provenance.transaction
        if change is None or change.version <= newest.get(key, 0) or key not in keys:
            continue
        newest[key] = change.version
        if block is None or not block.id.startswith(BLOCK):
            continue
        event = _decode_event(change.event) or _Event()
        if block.index == 1:
            answered = []
        answered.append(
            AnsweredChange(
                id=change.id,
                version=change.version,
                kind=change.kind.value,
                type=event.type,
                data=event.data,
            )
        )
        if block.index == block.count == len(answered):
            yield WireAnswer(
                id=UUID(block.id.removeprefix(BLOCK)),
                entity=change.entity,
                key=change.key,
                outcome=Outcome.ACCEPTED,
                version=change.version,
                changes=answered,
            )


def _readable(record: Record) -> WireChange | None:
    try:
        return decode_wire(record.value or b"")
    except ValueError:
        return None
