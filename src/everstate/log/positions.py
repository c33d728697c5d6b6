"""Where the log begins and ends, asked of the brokers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from everstate.config import Config
from everstate.log.client import ADMIN_TIMEOUT_S, admin_settings
from everstate.log.outcome import translated
from everstate.log.topics import partition_count

Ends = dict[tuple[str, int], int]

_SPEC: Any = OffsetSpec  # the driver has no types for it


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets ``[start, end)`` of one partition."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


class Offsets:
    """Asks for offsets of whole topics: one round trip a call, about 1.5 ms on a local broker.

    A topic's partition count is asked once: a topic that is resized is a new generation. Every
    call raises Unavailable when the broker does not answer for 10 s, and LogError for a topic
    that does not exist.
    """

    def __init__(self, config: Config) -> None:
        self._admin = AdminClient(admin_settings(config))
        self._partitions: dict[str, int] = {}

    def __enter__(self) -> Offsets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connection."""
        del self._admin

    def stable_ends(self, topics: Iterable[str]) -> Ends:
        """Last stable offset of each (topic, partition): what a read_committed reader may read.

        Markers and aborted records below it are counted; an open transaction holds it back.
        """
        return self._offsets(topics, _SPEC.latest(), IsolationLevel.READ_COMMITTED)

    def high_watermarks(self, topics: Iterable[str]) -> Ends:
        """Ends that count open transactions too; one that stays above the stable end hangs (C5)."""
        return self._offsets(topics, _SPEC.latest(), IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, topics: Iterable[str]) -> Ends:
        """First offset that is still there, of each (topic, partition)."""
        return self._offsets(topics, _SPEC.earliest(), IsolationLevel.READ_COMMITTED)

    def at_time(self, topics: Iterable[str], timestamp_ms: int) -> Ends:
        """First offset whose timestamp is not before ``timestamp_ms``; the stable end if none."""
        listed = list(topics)
        found = self._offsets(
            listed, _SPEC.for_timestamp(timestamp_ms), IsolationLevel.READ_COMMITTED
        )
        ends = self.stable_ends(listed)
        return {place: offset if offset >= 0 else ends[place] for place, offset in found.items()}

    def _offsets(self, topics: Iterable[str], spec: Any, isolation: IsolationLevel) -> Ends:
        request = {
            TopicPartition(topic, partition): spec
            for topic in topics
            for partition in range(self._count(topic))
        }
        if not request:
            return {}
        futures = self._admin.list_offsets(
            request, isolation_level=isolation, request_timeout=ADMIN_TIMEOUT_S
        )
        ends: Ends = {}
        for place, future in futures.items():
            with translated(f"asking for offsets of {place.topic}[{place.partition}]"):
                ends[place.topic, place.partition] = future.result(ADMIN_TIMEOUT_S).offset
        return ends

    def _count(self, topic: str) -> int:
        if topic not in self._partitions:
            self._partitions[topic] = partition_count(self._admin, topic)
        return self._partitions[topic]
