"""Membership in a consumer group whose partitions their owner reads by itself."""

# librdkafka's own error codes are public, and spelled with a leading underscore.
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

import confluent_kafka
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from everstate.closing import Closing
from everstate.config import Config
from everstate.log.client import member_settings
from everstate.log.outcome import OFFSET_GONE, is_transport, translate

SESSION_S: Final = 10.0
"""A process that does not reach Kafka for this time loses its partitions to the others."""
_POLL_MAX_S: Final = 3_600.0
"""So does one that does not poll for this time: to sort a large archive takes many minutes."""
_PASSING: Final = OFFSET_GONE | {KafkaError._MAX_POLL_EXCEEDED}
"""Partitions are paused, so that no offset of them matters."""


class GroupMember(Closing):
    """Says which partitions of a topic this process owns; one thread at a time.

    Heartbeats are sent by a thread of librdkafka. Partitions move one by one (cooperative); when a
    process ends, the others get its partitions at once (it is no static member).
    """

    def __init__(
        self, config: Config, group: str, topic: str, released: Callable[[Collection[int]], None]
    ) -> None:
        """``released`` finishes the work on partitions before the others may have them."""
        self._group, self._released = group, released
        self.owned: frozenset[int] = frozenset()
        settings = member_settings(
            config, group, group=group, instance="", session_timeout_ms=int(SESSION_S * 1000)
        )
        del settings["group.instance.id"]
        strategy = {"partition.assignment.strategy": "cooperative-sticky"}
        settings |= strategy | {"max.poll.interval.ms": int(_POLL_MAX_S * 1000)}
        self._client, gone = confluent_kafka.Consumer(settings), self._gone
        self._client.subscribe([topic], on_assign=self._assigned, on_revoke=gone, on_lost=gone)

    def poll(self, wait_s: float = 0.0) -> None:
        """Take part in the group, at least every few seconds; raises LogError."""
        message = self._client.poll(wait_s)
        error = None if message is None else message.error()
        if error is not None and not is_transport(error) and error.code() not in _PASSING:
            raise translate(error, f"the group {self._group}")

    def close(self) -> None:
        """Leave the group."""
        with suppress(KafkaException, RuntimeError):
            self._client.close()

    def _assigned(self, client: Any, partitions: list[TopicPartition]) -> None:
        places = [TopicPartition(each.topic, each.partition, OFFSET_END) for each in partitions]
        client.incremental_assign(places)
        client.pause(places)
        self.owned |= {each.partition for each in places}

    def _gone(self, client: Any, partitions: list[TopicPartition]) -> None:
        numbers = {each.partition for each in partitions}
        self._released(numbers)
        self.owned -= numbers
        client.incremental_unassign(partitions)
