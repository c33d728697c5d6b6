"""Positions that consumer groups have committed: of everstate's own roles, and of others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Final

from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from everstate.config import Config
from everstate.errors import LogError, Unavailable
from everstate.log.client import ADMIN_TIMEOUT_S, admin_settings
from everstate.log.lag import ReaderPosition
from everstate.log.outcome import translated

GROUP: Final = "group "
"""How the name of a reader begins that is a consumer group."""


def group_positions(
    config: Config, topics: Container[str], groups: Iterable[str] | None = None
) -> list[ReaderPosition]:
    """What ``groups``, or all of the cluster, have committed for these topics.

    Groups that we may not describe are left out. Raises Unavailable. Cost: a request for each
    group; for all, one to each broker besides.
    """
    admin, found = AdminClient(admin_settings(config)), list[ReaderPosition]()
    if groups is None:
        with translated("listing consumer groups"):
            asks = admin.list_consumer_groups(request_timeout=ADMIN_TIMEOUT_S)
            listed = asks.result(ADMIN_TIMEOUT_S)
        if listed.errors:
            raise Unavailable(f"a broker does not list its consumer groups: {listed.errors[0]}.")
        groups = [each.group_id for each in listed.valid]
    wanted = [ConsumerGroupTopicPartitions(each) for each in groups]
    # One group is asked for at a time, and all are asked before the first answer is awaited.
    asked = [admin.list_consumer_group_offsets([each]) for each in wanted]
    for group, future in (pair for each in asked for pair in each.items()):
        with suppress(LogError), translated(f"reading the offsets of group {group}"):
            found += [
                ReaderPosition(f"{GROUP}{group}", at.topic, at.partition, at.offset)
                for at in future.result(ADMIN_TIMEOUT_S).topic_partitions
                if at.topic in topics and at.offset >= 0
            ]
    return found
