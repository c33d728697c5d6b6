"""Where the log begins and ends, asked of the brokers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import LogTruncated, TopicResized, Unavailable
from everstate.errors.log import BEGIN_NEW_LOG
from everstate.log.client import ADMIN_TIMEOUT_S, admin_settings
from everstate.log.outcome import translate, translated
from everstate.retrying import within

Ends = dict[tuple[str, int], int]

_SPEC: Any = OffsetSpec  # the driver has no types for it
_COUNT_AGAIN_S: Final = 1.0
_NEVER_S: Final = 3_600.0
"""The longest time-out that librdkafka takes."""
_AGAIN: Final = within(ADMIN_TIMEOUT_S, Unavailable, pause_s=0.02)


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets ``[start, end)`` of one partition."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)


class Offsets(Closing):
    """Reads offsets of whole topics: one round trip for each call, 1.5 ms on a local broker.

    Every call raises Unavailable when the broker does not answer for 10 s, LogError for a topic
    that does not exist, and TopicResized when a topic's number of partitions has changed since its
    first call (this is checked once a second).
    """

    def __init__(self, config: Config) -> None:
        self._settings = admin_settings(config)
        self._admin = AdminClient(self._settings)
        self._partitions: dict[str, tuple[int, float]] = {}

    def close(self) -> None:
        """Close the connection."""
        del self._admin

    def stable_ends(self, topics: Iterable[str]) -> Ends:
        """Last stable offset of each (topic, partition): the end for a read_committed reader.

        Offsets of markers and aborted records count; an open transaction holds it back.
        """
        return self._offsets(dict.fromkeys(topics, _SPEC.latest()), IsolationLevel.READ_COMMITTED)

    def high_watermarks(self, topics: Iterable[str]) -> Ends:
        """Ends including open transactions; one that stays above the stable end hangs (C5)."""
        return self._offsets(dict.fromkeys(topics, _SPEC.latest()), IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, topics: Iterable[str]) -> Ends:
        """First offset that the log still has, of each (topic, partition)."""
        return self._offsets(dict.fromkeys(topics, _SPEC.earliest()), IsolationLevel.READ_COMMITTED)

    def settled_ends(
        self, topics: Iterable[str], partition: int, alive: Callable[[], None]
    ) -> dict[str, int]:
        """Ends of one partition of these topics, when the transactions now open there have ended.

        For a new owner of the partition, after its former owner was fenced. Waits at most as long
        as that owner's transaction may last, and calls ``alive`` repeatedly.
        """
        listed = list(topics)
        high = self.high_watermarks(listed)
        while True:
            stable = self.stable_ends(listed)
            if all(stable[topic, partition] >= high[topic, partition] for topic in listed):
                return {topic: stable[topic, partition] for topic in listed}
            alive()
            time.sleep(0.02)

    def settle(self, topic: str, wait_s: float) -> None:
        """Wait until the transactions that are open now have ended; raises Unavailable."""
        since, high = time.monotonic(), self.high_watermarks([topic])
        while any(end < high[place] for place, end in self.stable_ends([topic]).items()):
            if time.monotonic() - since > wait_s:
                raise Unavailable(
                    f"the end of {topic} cannot be read because of an open transaction; the broker "
                    "aborts it after its time-out."
                )
            time.sleep(0.02)

    def check_partitions(self, topics: Iterable[str]) -> None:
        """Raise TopicResized when a topic has more partitions than at its first call."""
        for topic in topics:
            self._count(topic)

    def at_time(self, topics: Iterable[str], timestamp_ms: int) -> Ends:
        """First offset whose timestamp is not before ``timestamp_ms``; the stable end if none."""
        return self.at_times(dict.fromkeys(topics, timestamp_ms))

    def at_times(self, times_ms: Mapping[str, int]) -> Ends:
        """As :meth:`at_time`, with a time for each topic."""
        specs = {topic: _SPEC.for_timestamp(at_ms) for topic, at_ms in times_ms.items()}
        found = self._offsets(specs, IsolationLevel.READ_COMMITTED)
        ends = self.stable_ends(times_ms)
        return {place: offset if offset >= 0 else ends[place] for place, offset in found.items()}

    def _offsets(self, specs: Mapping[str, Any], isolation: IsolationLevel) -> Ends:
        request = {
            TopicPartition(topic, partition): spec
            for topic, spec in specs.items()
            for partition in range(self._count(topic))
        }
        if not request:
            return {}
        # A partition has no leader for a moment when a broker restarts or a topic is new.
        return _AGAIN(self._ask, request, isolation)

    def _ask(self, request: dict[TopicPartition, Any], isolation: IsolationLevel) -> Ends:
        # librdkafka 2.16 frees memory twice when this request times out, and the process dies: so
        # the request never does. Its client is dropped instead, which ends it.
        futures = self._admin.list_offsets(
            request, isolation_level=isolation, request_timeout=_NEVER_S
        )
        ends: Ends = {}
        for place, future in futures.items():
            with translated(f"reading the offsets of {place.topic}[{place.partition}]"):
                try:
                    ends[place.topic, place.partition] = future.result(ADMIN_TIMEOUT_S).offset
                except TimeoutError:
                    self._admin = AdminClient(self._settings)
                    raise
        return ends

    def _count(self, topic: str) -> int:
        known, asked_at = self._partitions.get(topic, (0, 0.0))
        now = time.monotonic()
        if known and now - asked_at < _COUNT_AGAIN_S:
            return known
        found = partition_count(self._admin, topic)
        if known and found != known:
            raise TopicResized(topic, known, found)
        self._partitions[topic] = (found, now)
        return found


def check_ends(
    who: str,
    topic: str,
    position: Mapping[int, int],
    ends: Mapping[int, int],
    *,
    advice: str = BEGIN_NEW_LOG,
) -> None:
    """Raise LogTruncated when a partition ends before the position to which it was read (C8).

    ``who`` is the subject of the error message. A stable end never decreases in normal operation:
    a broker that was restored from a backup, or lost its disk, has fewer records than it served.
    """
    lost = [
        f"{topic}[{partition}] ends at {ends.get(partition, 0):,}, and offsets "
        f"{ends.get(partition, 0):,} to {at - 1:,} are lost"
        for partition, at in sorted(position.items())
        if ends.get(partition, 0) < at
    ]
    if lost:
        raise LogTruncated(
            f"{who}: the log lost records that were read before: {'; '.join(lost)}. No record was "
            "skipped.",
            advice=advice,
        )


class OpenTransactions:
    """Measures for how long open transactions have held the stable end back (C5).

    A transaction that hangs (its writer was killed and not restarted) blocks every reader until
    the broker's time-out; regular calls of :meth:`observe` detect it.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], tuple[int, float]] = {}

    def observe(self, stable: Ends, high: Ends, now_s: float) -> dict[tuple[str, int], float]:
        """Seconds for which the stable end has not moved, for each partition that is held back.

        ``stable`` must be read before ``high``; ``now_s`` is a monotonic time.
        """
        since = {}
        for place, end in stable.items():
            if end < high[place]:
                known = self._held.get(place)
                since[place] = known if known and known[0] == end else (end, now_s)
        self._held = since
        return {place: now_s - seen_s for place, (_, seen_s) in since.items()}


def partition_count(admin: AdminClient, topic: str) -> int:
    """Number of partitions of a topic; raises LogError when there is none of that name."""
    with translated(f"describing topic {topic}"):
        described = admin.list_topics(topic, timeout=ADMIN_TIMEOUT_S).topics[topic]
    if described.error is not None:
        raise translate(described.error, f"describing topic {topic}")
    return len(described.partitions)
