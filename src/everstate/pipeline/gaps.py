"""An operator accepts a version gap: changes are published in place of those that never came.

Nothing is sent to the keeper. It reads these changes from the log like all others, and so do every
other view group, the archive and each consumer of the log. So all of them agree, and law 2, the
chain and the proof hold as before (decision 16).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from everstate.changes import (
    Change,
    ChangeCodec,
    EntityType,
    Kind,
    Provenance,
    derived_change_id,
)
from everstate.changes.codec import decode_wire
from everstate.config import Config
from everstate.errors import GapTooWide, NoGap
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.views.control import opened_control
from everstate.views.gaps import Gap, GapEdges, read_edges, read_gaps

MISSING_MAX: Final = 10_000
"""A wider gap is more likely a wrong version number than so many lost changes."""


@dataclass(frozen=True, slots=True)
class AcceptedGap:
    """A gap, and the versions that were published in place of the missing ones."""

    gap: Gap
    published: tuple[int, ...]


def list_gaps(config: Config, entity: str | None = None, key: str | None = None) -> list[Gap]:
    """Keys with changes that are held because of a missing version; raises Unavailable."""
    with opened_control(config) as control:
        control.update()
        return read_gaps(control, entity, key)


def accept_gap(
    config: Config,
    entity_type: EntityType,
    key: str,
    *,
    provenance: Provenance,
    now: datetime | None = None,
) -> AcceptedGap:
    """Publish changes in place of the missing versions of a key, so that held ones are released.

    They lead from the state in the views to the original state of the first held change.
    ``provenance`` names who accepts the gap, and stays in log, archive and history. The ids are
    derived from the held change, so that accepting twice changes nothing. When a missing version
    arrives later, the first one in the log counts, and the other is a conflict in `.dead` (C6).

    Raises NoGap, GapTooWide, LogIdentityChanged, TopicResized, and Unavailable: then the call may
    be repeated.
    """
    name = entity_type.name
    with opened_control(config) as control:
        control.update()
        found = read_gaps(control, name, key)
        if not found:
            raise NoGap(name, key)
        gap = found[0]
        if len(gap.missing) > MISSING_MAX:
            raise GapTooWide(name, key, len(gap.missing), MISSING_MAX)
        edges = read_edges(control, gap)
        topic = TopicNames(config.log.prefix).changes(name, edges.generation)
        with Topics(config) as topics:
            log = topics.identity(topic)
        control.check_topic_identity(name, topic, log, edges.generation)
    codec = ChangeCodec(entity_type, message_bytes_max=config.log.message_bytes_max)
    moment = now or datetime.now(UTC)
    records = [
        OutRecord(topic, *codec.encode(change), partition=edges.partition)
        for change in bridge(gap, edges, provenance, moment)
    ]
    with Producer(config) as producer:
        producer.send_many(records)
        producer.flush()
    return AcceptedGap(gap, tuple(gap.missing))


def bridge(
    gap: Gap, edges: GapEdges, provenance: Provenance, now: datetime
) -> Iterator[Change[bytes]]:
    """Changes for the missing versions, chained to both sides (law 3).

    All but the last keep the state before the gap, so that no state is invented. An entity that
    exists on neither side of the gap, and must have existed in between, gets the current state of
    the held change.
    """
    after = decode_wire(edges.after)
    target = _state(after.original_entity_state)
    state = None if edges.before is None else edges.before.encode()
    reason = provenance.reason or "gap accepted"
    filling = replace(
        provenance,
        reason=f"{reason}: versions {gap.missing[0]} to {gap.missing[-1]} were never received",
        causation_id=str(after.id),
    )
    between = state or target or _state(after.current_entity_state)
    for version in gap.missing:
        following = target if version == gap.missing[-1] else between
        yield Change(
            id=derived_change_id("gap accepted", str(after.id), version),
            entity=gap.entity,
            schema_version=after.schema_version,
            key=gap.key,
            version=version,
            kind=Kind.between(state, following),
            occurred_at=after.occurred_at,
            recorded_at=now,
            provenance=filling,
            current=following,
            original=state,
        )
        state = following


def _state(raw: Any) -> bytes | None:
    text = bytes(raw)
    return None if text == b"null" else text
