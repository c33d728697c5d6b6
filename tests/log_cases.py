"""What may happen to a topic from outside: it gets more partitions, or its broker an old copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from everstate.config import Config
from everstate.log.positions import Offsets, partition_count
from everstate.log.topics import Topics
from kit.waiting import until


def grow(config: Config, topic: str, partitions: int) -> None:
    """Give a topic more partitions, as an administrator can; returns when they are served."""
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    for future in admin.create_partitions([NewPartitions(topic, partitions)]).values():
        future.result(30)
    until(lambda: partition_count(admin, topic) >= partitions, 30, 0.02)
    with Offsets(config) as offsets:
        offsets.beginnings([topic])


def lose_records(monkeypatch: pytest.MonkeyPatch, config: Config, *names: str) -> None:
    """Empty topics as a broker does that was restored from an old copy: they stay the same ones."""
    identities = Topics.identities
    with Topics(config) as topics:
        known = topics.identities(names)
        as_made = {
            name: (
                topics.partitions(name),
                {"cleanup.policy": topics.config(name)["cleanup.policy"]},
            )
            for name in names
        }
        topics.delete(names)
        for name, (partitions, settings) in as_made.items():
            topics.create(name, partitions, settings)

    def as_before(self: Topics, wanted: Any) -> Any:
        return {**identities(self, wanted), **{n: known[n] for n in wanted if n in known}}

    monkeypatch.setattr(Topics, "identities", as_before)


def forget(config: Config, topic: str, before: Mapping[int, int] | None = None) -> None:
    """Let the log delete what is before these offsets, as retention does; without them: all."""
    if before is None:
        with Offsets(config) as offsets:
            before = {part: end for (_, part), end in offsets.stable_ends([topic]).items()}
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    cut = [TopicPartition(topic, part, offset) for part, offset in before.items()]
    for deleted in admin.delete_records(cut).values():
        deleted.result(30)
