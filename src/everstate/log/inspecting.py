"""What the brokers report about themselves and about our rights, for `everstate doctor`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclOperation,
    AdminClient,
    ConfigResource,
    ResourceType,
)

from everstate.config import Config
from everstate.log.client import ADMIN_TIMEOUT_S, admin_settings
from everstate.log.consumer import Consumer
from everstate.log.outcome import translated
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import Topics

TOPIC_RIGHTS = ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS")
"""What the roles do with topics that exist."""


@dataclass(frozen=True, slots=True)
class Brokers:
    """The cluster as one of its brokers describes it."""

    nodes: int
    settings: Mapping[str, str]
    """Settings of that broker."""
    may_create: bool | None
    """Whether we may create topics anywhere; ``None``: it is not known."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """One topic as the brokers describe it."""

    name: str
    replicas: int
    """Replicas of the partition that has the fewest."""
    in_sync: int
    """The same of those that are in sync."""
    min_insync: int
    missing_rights: tuple[str, ...]
    """Rights of :data:`TOPIC_RIGHTS` that we do not have; empty also where they are not known."""


def brokers(config: Config) -> Brokers:
    """Describe the cluster; raises LogError or Unavailable. Cost: two requests."""
    admin = AdminClient(admin_settings(config))
    asked = admin.describe_cluster(
        include_authorized_operations=True, request_timeout=ADMIN_TIMEOUT_S
    )
    with translated("describing the cluster"):
        found = asked.result(ADMIN_TIMEOUT_S)
    resource = ConfigResource(ResourceType.BROKER, str(found.nodes[0].id))
    settings: dict[str, str] = {}
    for future in admin.describe_configs([resource]).values():
        with translated("reading a broker's settings"):
            settings = {name: entry.value for name, entry in future.result(ADMIN_TIMEOUT_S).items()}
    rights = found.authorized_operations
    may_create = None if rights is None else AclOperation.CREATE in rights
    return Brokers(len(found.nodes), settings, may_create)


def topic_facts(config: Config, names: Iterable[str]) -> list[TopicFacts]:
    """Describe existing topics; raises LogError or Unavailable. Cost: two requests."""
    listed = sorted(names)
    if not listed:
        return []
    admin = AdminClient(admin_settings(config))
    described = admin.describe_topics(
        TopicCollection(listed),
        include_authorized_operations=True,
        request_timeout=ADMIN_TIMEOUT_S,
    )
    with Topics(config) as topics:
        settings = topics.configs(listed)
    found = []
    for name, future in described.items():
        with translated(f"describing topic {name}"):
            topic = future.result(ADMIN_TIMEOUT_S)
        known = topic.authorized_operations
        rights = {each.name for each in known or ()}
        found.append(
            TopicFacts(
                name,
                min(len(each.replicas) for each in topic.partitions),
                min(len(each.isr) for each in topic.partitions),
                int(settings[name]["min.insync.replicas"]),
                () if known is None else tuple(r for r in TOPIC_RIGHTS if r not in rights),
            )
        )
    return found


def clock_ahead_s(config: Config, clock: Callable[[], float] = time.time) -> float:
    """Seconds by which a broker's clock is ahead of ``clock``; negative: behind.

    Writes one record to a new topic, to which the broker gives its own time, and deletes the topic.
    Raises LogError (no right to create, write, read or delete it) or Unavailable.
    """
    with Topics(config) as topics, Producer(config) as producer, Consumer(config) as consumer:
        name = f"{topics.names.prefix}.doctor.{uuid.uuid4().hex[:12]}"
        topics.create(name, 1, {"message.timestamp.type": "LogAppendTime"})
        try:
            before_s = clock()
            producer.send(OutRecord(name, b"doctor", b"{}", partition=0))
            producer.flush()
            middle_s = (before_s + clock()) / 2
            (record,) = consumer.read(name, 0, 0, 1)
            return record.timestamp_ms / 1000 - middle_s
        finally:
            topics.delete([name])
