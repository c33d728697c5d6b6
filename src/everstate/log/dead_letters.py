"""Dead letters: records that could not be read or applied, with the reason and their place.

They are in `<prefix>.<entity>.dead`, byte for byte, so that nothing is lost and somebody can find
out why. The headers here say what is wrong, and where the record came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import Header, Record
from everstate.log.topics import TopicNames, Topics

REASON: Final = "everstate_reason"
"""Header with the reason."""
_TOPIC, _PARTITION, _OFFSET = "everstate_topic", "everstate_partition", "everstate_offset"
_DIGITS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record that was rejected."""

    entity: str | None
    """Its entity type; ``None``: a raw record of which not even that is known."""
    partition: int
    offset: int
    """Where the dead letter is in the dead-letter topic."""
    at: datetime
    """When it was written."""
    reason: str
    topic: str
    from_partition: int
    from_offset: int
    """Where the rejected record is, or was."""
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class DeadReason:
    """All dead letters of an entity type that have the same reason."""

    entity: str | None
    reason: str
    letters: int
    first_at: datetime
    last_at: datetime
    partition: int
    offset: int
    """Where the newest of them is in the dead-letter topic."""


def place_headers(reason: bytes, topic: str, partition: int, offset: int) -> list[Header]:
    """Headers of the dead letter of a record: why it was rejected, and where it is."""
    return [
        (REASON, reason),
        (_TOPIC, topic.encode()),
        (_PARTITION, str(partition).encode()),
        (_OFFSET, str(offset).encode()),
    ]


def dead_topics(config: Config, entity: str | None = None) -> dict[str, str | None]:
    """Dead-letter topics that exist, of one entity type or of all; topic → entity type."""
    names = TopicNames(config.log.prefix)
    with Topics(config) as topics:
        existing = topics.existing()
    found = {topic: names.entity_of_dead(topic) for topic in sorted(existing)}
    return {
        topic: named
        for topic, named in found.items()
        if (named or topic == names.dead_unknown) and entity in (None, named)
    }


def read_dead_letters(config: Config, entity: str | None = None) -> Iterator[DeadLetter]:
    """All dead letters of one entity type, or of all, partition by partition, oldest first.

    Cost: one pass over the dead-letter topics.
    """
    with Consumer(config, client_id="everstate-dead-letters") as consumer:
        for topic, named in dead_topics(config, entity).items():
            for record in consumer.read_topic(topic):
                yield _letter(named, record)


def read_dead_letter(
    config: Config, entity: str | None, partition: int, offset: int
) -> DeadLetter | None:
    """The dead letter at this place of its topic; ``None``: there is none."""
    names = TopicNames(config.log.prefix)
    topic = names.dead_unknown if entity is None else names.dead(entity)
    if topic not in dead_topics(config):
        return None
    with Offsets(config) as offsets, Consumer(config) as consumer:
        place = (topic, partition)
        end = offsets.stable_ends([topic]).get(place, 0)
        if offsets.beginnings([topic]).get(place, 0) <= offset < end:
            for record in consumer.read(topic, partition, offset, offset + 1):
                return _letter(entity, record)
    return None


def by_reason(letters: Iterable[DeadLetter]) -> list[DeadReason]:
    """Dead letters counted by entity type and reason, the most frequent first. Pure."""
    found: dict[tuple[str | None, str], DeadReason] = {}
    for one in letters:
        known = found.get((one.entity, one.reason))
        is_newest = known is None or one.at >= known.last_at
        place = one if is_newest or known is None else known
        found[one.entity, one.reason] = DeadReason(
            one.entity,
            one.reason,
            1 if known is None else known.letters + 1,
            one.at if known is None else min(one.at, known.first_at),
            one.at if known is None else max(one.at, known.last_at),
            place.partition,
            place.offset,
        )
    return sorted(found.values(), key=lambda each: (-each.letters, each.entity or "", each.reason))


def _letter(entity: str | None, record: Record) -> DeadLetter:
    headers = dict(record.headers)

    def text(name: str) -> str:
        return (headers.get(name) or b"").decode(errors="replace")

    def number(name: str) -> int:
        # Whoever may write to the topic may write any header.
        found = headers.get(name) or b""
        return int(found) if found.isdigit() and len(found) < _DIGITS_MAX else 0

    return DeadLetter(
        entity=entity,
        partition=record.partition,
        offset=record.offset,
        at=datetime.fromtimestamp(record.timestamp_ms / 1000, UTC),
        reason=text(REASON) or "no reason was written",
        topic=text(_TOPIC),
        from_partition=number(_PARTITION),
        from_offset=number(_OFFSET),
        key=record.key,
        value=record.value,
    )


def recent_dead_letters(config: Config, since_ms: int) -> list[str | None]:
    """Entity types that got dead letters since a time in ms since the epoch.

    ``None`` in it: records of no known entity type. Raises Unavailable. Cost: a few requests to the
    brokers; no record is read.
    """
    topics = dead_topics(config)
    if not topics:
        return []
    with Offsets(config) as offsets:
        starts, ends = offsets.at_time(topics, since_ms), offsets.stable_ends(topics)
    found = {topics[topic] for (topic, at), end in ends.items() if end > starts[topic, at]}
    return [entity for entity in topics.values() if entity in found]
