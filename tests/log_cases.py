"""What may happen to a topic from outside: it gets more partitions, or its broker an old copy."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from everstate.config import Config
from everstate.log.positions import Offsets, partition_count
from everstate.log.topics import Topics


def grow(config: Config, topic: str, partitions: int) -> None:
    """Give a topic more partitions, as an administrator can; returns when they are served."""
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    for future in admin.create_partitions([NewPartitions(topic, partitions)]).values():
        future.result(30)
    deadline = time.monotonic() + 30
    while partition_count(admin, topic) < partitions:
        assert time.monotonic() < deadline
        time.sleep(0.02)
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
