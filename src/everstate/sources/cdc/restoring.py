"""Making the local state the log's again: from `.state`, else from `.changes`, else the lake."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from everstate.archive import ArchiveReader
from everstate.config import Config
from everstate.errors import ArchiveError, LocalStateError
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.sources.cdc.completion import Known
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.holding import HELD
from everstate.sources.cdc.local_state import LocalState

LOGGER = logging.getLogger("everstate.sources.cdc")

_CHUNK: Final = 5_000
_NULL: Final = b"null"
_HEADERS: Final = [("ce_specversion", b"1.0"), ("content-type", b"application/json")]


class _Origin(msgspec.Struct):
    position: dict[str, list[int | str]] = {}


class _StateWire(msgspec.Struct, rename="camel", gc=False):
    """What of a change makes up the newest state of its entity."""

    key: str
    version: int
    kind: str
    current_entity_state: msgspec.Raw = msgspec.Raw(_NULL)
    original_entity_state: msgspec.Raw = msgspec.Raw(_NULL)
    source: _Origin | None = None


_decode = msgspec.json.Decoder(_StateWire).decode


def known_of(value: bytes) -> tuple[str, Known]:
    """Key and state that a change leaves behind."""
    wire = _decode(value)
    is_deleted = wire.kind == "deleted"
    image = bytes(wire.original_entity_state if is_deleted else wire.current_entity_state)
    position: dict[str, list[int | str]] = {} if wire.source is None else wire.source.position
    return wire.key, Known(wire.version, image, is_deleted, position)


def restore(
    config: Config, capture: Capture, state: LocalState, topics: Topics
) -> tuple[int, list[str]]:
    """Read into the local state whatever the log has behind it.

    Out: how many records were read, and entity types whose states came from their history: their
    `.state` has to be filled again (:func:`refill`).

    A state of other topics (C8), or ahead of them, is forgotten first. When `.state` is empty and
    `.changes` is not, states are made again from `.changes` as far as it still begins at its
    beginning, else from the archive; raises LocalStateError when neither is there (C10).
    """
    names = topics.names
    of_topic = {names.state(entity): entity for entity in stateful(capture)}
    held = names.capture(capture.name, HELD)
    listed = [*of_topic, held]
    found = topics.identities(listed)
    identities = {name: f"{one.cluster_id}/{one.topic_id}" for name, one in found.items()}
    with Offsets(config) as offsets:
        starts, ends = offsets.beginnings(listed), offsets.stable_ends(listed)
        places = state.places()
        is_ours = state.identities() == identities
        if not is_ours or any(places.get(at, 0) > end for at, end in ends.items()):
            state.forget()
            state.identify(identities)
            places = {}
        read = 0
        with Consumer(config, client_id=f"everstate-clean-{capture.name}") as consumer:
            for (topic, partition), end in sorted(ends.items()):
                start = max(places.get((topic, partition), 0), starts[topic, partition])
                records = consumer.read(topic, partition, start, end)
                entity = of_topic.get(topic)
                if entity is None:
                    read += _take_held(state, records)
                else:
                    read += _take(state, entity, (r.value for r in records))
                state.restore({}, {}, {(topic, partition): end})
    empty = []
    for entity in stateful(capture):
        if state.count(entity) == 0:
            from_history = _take(state, entity, _history(config, topics, entity))
            if from_history:
                empty.append(entity)
            read += from_history
    return read, empty


def refill(
    config: Config, state: LocalState, topics: Topics, entity: str
) -> Iterator[list[OutRecord]]:
    """Records that `.state` lacks, in batches: the newest change of each entity."""
    topic = topics.names.state(entity)
    batch: list[OutRecord] = []
    for value in _history(config, topics, entity):
        if value is None:
            continue
        key, known = known_of(value)
        newest = state.get(entity, key)
        if newest is not None and newest.version == known.version:
            batch.append(OutRecord(topic, key.encode(), value, _HEADERS))
        if len(batch) >= _CHUNK:
            yield batch
            batch = []
            state.discard()
    if batch:
        yield batch
    state.discard()


def stateful(capture: Capture) -> tuple[str, ...]:
    """Entity types of a capture that have a newest state: all but those of domain events."""
    events = {table.events for table in capture.tables.values()}
    return tuple(name for name in capture.entities if name not in events)


def _take(state: LocalState, entity: str, values: Iterable[bytes | None]) -> int:
    """Newest states of these changes; a tombstone leaves the version counting (C7)."""
    count = 0
    states: dict[tuple[str, str], Known] = {}
    for value in values:
        count += 1
        if value is None:
            continue
        key, known = known_of(value)
        before = states.get((entity, key))
        if before is None or known.version >= before.version:
            states[entity, key] = known
        if len(states) >= _CHUNK:
            state.restore(states, {}, {})
            states.clear()
    state.restore(states, {}, {})
    return count


def _take_held(state: LocalState, records: Iterable[Any]) -> int:
    held: dict[tuple[str, str], bytes | None] = {}
    count = 0
    for record in records:
        count += 1
        entity, _, key = record.key.decode().partition("\n")
        held[entity, key] = record.value
    state.restore({}, held, {})
    return count


def _history(config: Config, topics: Topics, entity: str) -> Iterator[bytes | None]:
    """Every change of an entity type: from `.changes` if it is all there, else the lake first."""
    changes = topics.names.changes(entity)
    with Offsets(config) as offsets:
        starts, ends = offsets.beginnings([changes]), offsets.stable_ends([changes])
    if not any(ends.values()):
        return
    LOGGER.warning("%s has no newest states; they are made from its history", entity)
    positions: dict[int, int] = {}
    if any(starts.values()):
        reader = ArchiveReader(config, entity)
        positions = _archived(reader)
        if any(positions.get(part, 0) < at for (_, part), at in starts.items()):
            raise LocalStateError(
                f"{entity}: its newest states are lost. {changes} no longer begins at its "
                "beginning, and the archive does not reach what is there.",
                advice="Run the archive until it has caught up, or restore the state topic.",
            )
        yield from reader.values()
    with Consumer(config, client_id=f"everstate-clean-{entity}") as consumer:
        for (topic, partition), end in sorted(ends.items()):
            start = max(positions.get(partition, 0), starts[topic, partition])
            yield from (r.value for r in consumer.read(topic, partition, start, end))


def _archived(reader: ArchiveReader) -> dict[int, int]:
    """Next offset of each partition that the archive lacks; empty: there is no archive."""
    try:
        return dict(reader.position().get(1, {}))
    except ArchiveError as error:
        LOGGER.warning("%s", error.message)
        return {}
