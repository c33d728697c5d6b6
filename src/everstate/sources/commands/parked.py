"""Parked commands, which could not be decided: list, replay or discard them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from everstate.changes import json_numbers
from everstate.config import Config
from everstate.errors import NotFound
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.sources.commands.bound import BOUND
from everstate.sources.commands.wire import DISCARD, PLACE, REASON, REPLAY, decode_command

_UNKNOWN: Final = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """One parked command; ``parked_id`` is its command id, or the place of an unreadable one."""

    parked_id: str
    key: str
    command: str
    """Name of the command; ``?`` when it cannot be read."""
    reason: str
    place: str
    """``partition@offset`` in the commands topic at which it was last read."""
    parked_at_ms: int
    value: bytes
    """The command's record value, unchanged."""

    @property
    def data(self) -> Any:
        """The command's own data, for people; ``None`` when it cannot be read."""
        try:
            return json_numbers.decode(bytes(decode_command(self.value).data))
        except (msgspec.DecodeError, ValueError):
            return None


def read_parked(config: Config, entity: str) -> list[Parked]:
    """Parked commands of an entity type, the oldest first.

    Cost: the whole topic, which is compacted.
    """
    topic = TopicNames(config.log.prefix).parked(entity)
    found: dict[bytes, Parked] = {}
    with Consumer(config, client_id="everstate-parked") as consumer:
        for record in consumer.read_topic(topic):
            name = record.key or b""
            if name == BOUND:
                continue
            found.pop(name, None)
            if record.value is not None:
                found[name] = _parked(record)
    return sorted(found.values(), key=lambda each: each.parked_at_ms)


def replay(
    config: Config, entity: str, parked_ids: Sequence[str] | None = None, *, give_up: bool = False
) -> list[Parked]:
    """Send parked commands again, in the order in which they were parked; returns them.

    Each is decided against its entity's state at that time, and is no longer parked when it could
    be decided, whatever the answer. With ``give_up`` they are answered with a rejection instead.
    ``None``: all of them. Raises NotFound naming ids that are not parked; then nothing was sent.
    """
    parked = read_parked(config, entity)
    if parked_ids is not None:
        wanted = set(parked_ids)
        missing = wanted - {each.parked_id for each in parked}
        if missing:
            raise NotFound(f"not parked: {', '.join(sorted(missing))}.")
        parked = [each for each in parked if each.parked_id in wanted]
    topic = TopicNames(config.log.prefix).commands(entity)
    mark = DISCARD if give_up else REPLAY
    with Producer(config, client_id="everstate-replay") as producer:
        for each in parked:
            headers = [(mark, each.parked_id.encode())]
            producer.send_raw(topic, each.key.encode(), each.value, headers)
        producer.flush()
    return parked


def _parked(record: Record) -> Parked:
    headers = dict(record.headers)
    value = record.value or b""
    try:
        name = decode_command(value).command
    except (msgspec.DecodeError, ValueError):
        name = _UNKNOWN
    return Parked(
        parked_id=(record.key or b"").decode(errors="replace"),
        key=(headers.get("key") or b"").decode(errors="replace"),
        command=name,
        reason=(headers.get(REASON) or b"").decode(errors="replace"),
        place=(headers.get(PLACE) or b"").decode(errors="replace"),
        parked_at_ms=record.timestamp_ms,
        value=value,
    )
