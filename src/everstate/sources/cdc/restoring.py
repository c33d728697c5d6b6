"""Completes the local copy of a capture's states: from `.state`, else `.changes`, else the lake."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec

from everstate.archive import ArchiveReader
from everstate.changes.depth import bounded
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import ArchiveError, LocalStateError
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets
from everstate.log.record import OutRecord, Record
from everstate.log.state_copy import StateCopy, open_copy
from everstate.log.topics import Topics
from everstate.sources.cdc.completion import Known
from everstate.sources.cdc.holding import HELD
from everstate.sources.cdc.states import FORM, held_name, known_row, state_name, state_row
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger("everstate.sources.cdc")
_unreadable: Final = RateLimitedLogger(logger, logging.ERROR)

_CHUNK: Final = 5_000
_NULL: Final = b"null"
_HEADERS: Final = [("ce_specversion", b"1.0"), ("content-type", b"application/json")]


class _Origin(msgspec.Struct):
    position: msgspec.Raw = msgspec.Raw(b"{}")


class _StateWire(msgspec.Struct, rename="camel", gc=False):
    """The fields of a change that make up the newest state of its entity."""

    key: str
    version: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    kind: str
    current_entity_state: msgspec.Raw = msgspec.Raw(_NULL)
    original_entity_state: msgspec.Raw = msgspec.Raw(_NULL)
    source: _Origin | None = None


_decode = bounded(msgspec.json.Decoder(_StateWire).decode)


def known_of(value: bytes) -> tuple[str, Known]:
    """Key of a change, and the state of its entity after it; raises msgspec.DecodeError."""
    wire = _decode(value)
    is_deleted = wire.kind == "deleted"
    image = bytes(wire.original_entity_state if is_deleted else wire.current_entity_state)
    place = b"" if wire.source is None else bytes(wire.source.position)
    return wire.key, Known(wire.version, image, is_deleted, b"" if place == b"{}" else place)


class Restoring:
    """Opens the copy of one capture's states and completes it from the log."""

    def __init__(self, config: Config, capture: Capture, topics: Topics) -> None:
        self._config, self._topics = config, topics
        self._entities = stateful(capture)
        names = topics.names
        self._entity_of = {names.state(entity): entity for entity in self._entities}
        self._held = names.capture(capture.name, HELD)
        self._client = f"everstate-clean-{capture.name}"

    def ends(self, offsets: Offsets) -> Ends:
        """The current ends of the topics that the copy is made of."""
        return offsets.stable_ends([*self._entity_of, self._held])

    def open(self, path: Path, batch: int) -> tuple[StateCopy, int]:
        """Open the copy and complete it from the log; out also: how many records were read.

        ``batch``: number of the newest batch in the log, once other writers are fenced. A copy of
        that batch is complete; an older copy is completed with the later records of the log; a copy
        of other topics (C8), or one that is ahead of them, is made again.
        """
        listed = [*self._entity_of, self._held]
        ids = {topic: one.topic_id for topic, one in self._topics.identities(listed).items()}
        progress = self._topics.names.progress
        ids[progress] = self._topics.identity(progress).topic_id
        copy = open_copy(path, FORM, ids)
        if batch and copy.meta.batch == batch:
            return copy, 0
        try:
            with Offsets(self._config) as offsets:
                starts, ends = offsets.beginnings(listed), self.ends(offsets)
            if copy.is_ahead(ends) or (copy.meta.batch or 0) > batch:
                logger.warning("%s: ahead of the log; it is made again", path)
                copy.destroy()
                copy = open_copy(path, FORM, ids)
            spans = {p: (max(copy.next_of(p), starts[p]), end) for p, end in ends.items()}
            with Consumer(self._config, client_id=self._client) as consumer:
                read = copy.fill(consumer, spans, self._rows_of)
        except BaseException:
            copy.close()
            raise
        return copy, read

    def lost(self, copy: StateCopy) -> list[str]:
        """Entity types whose states were rebuilt from their history, as `.state` was empty (C10).

        Their `.state` has to be filled again (:meth:`refill`). Raises LocalStateError where
        neither `.changes` nor the archive reaches back to the beginning.
        """
        return [
            entity
            for entity in self._entities
            if next(copy.scan(state_name(entity, "")), None) is None
            and self._take_history(copy, entity)
        ]

    def refill(self, copy: StateCopy, entity: str) -> Iterator[list[OutRecord]]:
        """Records that `.state` lacks, in batches: the newest change of each entity."""
        topic = self._topics.names.state(entity)
        for values in _chunks(self._history(entity)):
            batch: list[OutRecord] = []
            for value, (key, known) in zip(values, map(known_of, values), strict=True):
                row = copy.get(state_name(entity, key))
                if row is not None and known_row(row).version == known.version:
                    batch.append(OutRecord(topic, key.encode(), value, _HEADERS))
            if batch:
                yield batch

    def _rows_of(self, record: Record) -> Iterable[tuple[bytes, bytes | None]]:
        entity = self._entity_of.get(record.topic)
        if entity is None:
            assert record.key is not None
            return [(held_name(record.key), record.value)]
        if record.value is None:
            return []  # a tombstone does not reset the version (C7)
        try:
            key, known = known_of(record.value)
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            # No capture writes one. Who may write to the topic stops none.
            place = (record.topic, record.partition, record.offset)
            _unreadable.log("%s[%d]@%d is no change, and is skipped: %s", *place, cause)
            return []
        return [(state_name(entity, key), state_row(known))]

    def _take_history(self, copy: StateCopy, entity: str) -> bool:
        """Write the newest states of a type's history into the copy; out: whether there are any."""
        newest: dict[str, int] = {}
        for values in _chunks(self._history(entity)):
            rows: dict[bytes, bytes | None] = {}
            for key, known in map(known_of, values):
                if known.version >= newest.get(key, 0):
                    newest[key] = known.version
                    rows[state_name(entity, key)] = state_row(known)
            copy.write(rows)
        return bool(newest)

    def _history(self, entity: str) -> Iterator[bytes]:
        """Every change of an entity type: from `.changes` if it is all there, else the lake too."""
        changes = self._topics.names.changes(entity)
        with Offsets(self._config) as offsets:
            starts, ends = offsets.beginnings([changes]), offsets.stable_ends([changes])
        if not any(ends.values()):
            return
        logger.warning("%s has no newest states; they are made from its history", entity)
        positions: dict[int, int] = {}
        if any(starts.values()):
            reader = ArchiveReader(self._config, entity)
            positions = _archived(reader)
            if any(positions.get(part, 0) < at for (_, part), at in starts.items()):
                raise LocalStateError(
                    f"{entity}: its newest states are lost. {changes} no longer begins at its "
                    "beginning, and the archive does not reach what is there.",
                    advice="Run the archive until it has caught up, or restore the state topic.",
                )
            yield from (value for value in reader.values() if value is not None)
        with Consumer(self._config, client_id=self._client) as consumer:
            for (topic, partition), end in sorted(ends.items()):
                start = max(positions.get(partition, 0), starts[topic, partition])
                for record in consumer.read(topic, partition, start, end):
                    if record.value is not None:
                        yield record.value


def stateful(capture: Capture) -> tuple[str, ...]:
    """Entity types of a capture that have a newest state: all but those of domain events."""
    events = {table.events for table in capture.tables.values()}
    return tuple(name for name in capture.entities if name not in events)


def _chunks(values: Iterator[bytes]) -> Iterator[list[bytes]]:
    """The values in lists that fit into memory."""
    while chunk := list(islice(values, _CHUNK)):
        yield chunk


def _archived(reader: ArchiveReader) -> dict[int, int]:
    """Next offset of each partition that the archive lacks; empty: there is no archive."""
    try:
        return dict(reader.position().get(1, {}))
    except ArchiveError as error:
        logger.warning("%s", error.message)
        return {}
