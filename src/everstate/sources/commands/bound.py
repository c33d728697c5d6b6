"""The changelogs of the entity types that take commands, as recorded in the log.

The record is in the topic of parked commands. A handler compares it with the log before it decides
anything: after a topic has got more partitions, a key's commands go to another partition, where its
state and its answers are not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from everstate.config import Config
from everstate.log.bound import Bound, BoundTopic, check_bound
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames

BOUND: Final = b"bound"
"""Key of the record; no parked command has it, because their keys are UUIDs and places."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BoundTopic).decode


def check_log(config: Config, entities: Iterable[str]) -> None:
    """Raise LogIdentityChanged or TopicResized when commands were decided on other topics before.

    Cost: a partition of each topic of parked commands is read. Raises Unavailable.
    """
    listed = list(entities)
    check_bound(
        config,
        listed,
        store="the command handlers",
        read=lambda: _read(config, listed),
        note=lambda missing: _write(config, missing),
    )


def _read(config: Config, entities: Iterable[str]) -> Bound:
    names, found = TopicNames(config.log.prefix), dict[str, BoundTopic]()
    with Consumer(config, client_id="everstate-commands-bound") as consumer:
        for entity in entities:
            for record in consumer.read_topic(names.parked(entity)):
                if record.key == BOUND:
                    found[entity] = _decode(record.value or b"")
    return found


def _write(config: Config, bound: Bound) -> None:
    names = TopicNames(config.log.prefix)
    with Producer(config, client_id="everstate-commands-bound") as producer:
        for entity, topic in bound.items():
            producer.send_raw(names.parked(entity), BOUND, _encode(topic), partition=0)
        producer.flush()
