"""Reading explicit ranges of the log, without groups and commits: views store their positions."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Final, cast

import confluent_kafka
from confluent_kafka import Message, TopicPartition

from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import DataLoss, Unavailable
from everstate.log.attempt import place_of
from everstate.log.client import READ_COMMITTED, READ_UNCOMMITTED, consumer_settings
from everstate.log.outcome import END_OF_PARTITION, OFFSET_GONE, is_transport, translate, translated
from everstate.log.positions import Offsets
from everstate.log.record import Header, Record

_FETCH_MESSAGES: Final = 5_000
_STEP_S: Final = 0.2


class Consumer(Closing):
    """Reads records byte-exact, in order, read_committed unless an audit asks otherwise (C5).

    Out: the records that the isolation level shows. Offsets of markers, aborted and compacted
    records are skipped; a range that the log no longer holds raises DataLoss, and never gives a
    shorter result.
    """

    def __init__(
        self,
        config: Config,
        *,
        isolation: str = READ_COMMITTED,
        client_id: str = "everstate-reader",
        timeout_s: float = 60.0,
        read_ahead: bool = True,
        at_once: int = _FETCH_MESSAGES,
        has_headers: bool = True,
    ) -> None:
        """``at_once``: most records of one poll.

        A poll waits up to 0.2 s for that many, so a reader of small ranges wants few. Without
        headers (``has_headers``) a record costs half as much.
        """
        self._config = config
        self._isolation = isolation
        self._timeout_s, self._has_headers = timeout_s, has_headers
        self._fetch_messages = at_once if read_ahead else 1
        self._client = confluent_kafka.Consumer(
            consumer_settings(config, client_id, isolation=isolation, read_ahead=read_ahead)
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def read(
        self, topic: str, partition: int, start: int, end: int
    ) -> Generator[Record, None, None]:
        """Records of ``[start, end)`` of one partition; ``end`` must not exceed the stable end.

        Raises DataLoss when the log no longer has ``start``, Unavailable when no record comes for
        ``timeout_s``.
        """
        if start >= end:
            return
        self._client.assign([TopicPartition(topic, partition, start)])
        try:
            for message in self._messages(f"reading {topic}[{partition}]"):
                if message is None:
                    continue
                error = message.error()
                offset = message.offset()
                assert offset is not None
                if error is None and offset < end:
                    yield as_record(message, has_headers=self._has_headers)
                if offset >= end or (error is None and offset == end - 1):
                    return
        finally:
            self._client.unassign()

    def read_topic(self, topic: str, *, last: int | None = None) -> Iterator[Record]:
        """All records that a topic has now, one partition after the other.

        ``last``: only those at so many offsets before the end of each partition.
        """
        with Offsets(self._config) as offsets:
            starts = offsets.beginnings([topic])
            whole = self._isolation == READ_UNCOMMITTED
            ends = offsets.high_watermarks([topic]) if whole else offsets.stable_ends([topic])
        for (name, partition), end in sorted(ends.items()):
            start = starts[name, partition]
            start = start if last is None else max(start, end - last)
            yield from self.read(name, partition, start, end)

    def tail(
        self, topics: Iterable[str], *, from_end: bool = True, idle_s: float | None = None
    ) -> Generator[Record, None, None]:
        """Records as they are appended; they are in order within each partition.

        Starts at the end (or the beginning) that the partitions have at this call, not at the first
        ``next``. Ends after ``idle_s`` without a record; ``None``: never. It waits while a broker
        is unreachable. It has a connection of its own: close it, or exhaust it.

        Raises TopicResized when a topic gets more partitions, whose records would be missing.
        """
        offsets, listed = Offsets(self._config), list(topics)
        starts = offsets.stable_ends(listed) if from_end else offsets.beginnings(listed)
        return _records(Follower(self._config, starts), offsets, listed, idle_s)

    def _messages(self, doing: str) -> Iterator[Message | None]:
        """Records, and ends of partitions; ``None`` for a poll that returned nothing."""
        heard_at = time.monotonic()
        while True:
            with translated(doing):
                messages = self._client.consume(self._fetch_messages, _STEP_S)
            for message in messages:
                error = message.error()
                if error is None:
                    heard_at = time.monotonic()
                elif error.code() in OFFSET_GONE:
                    raise DataLoss(
                        f"{doing}: the log no longer has the requested offset ({error.str()}). No "
                        "record was skipped.",
                        advice="Read that range from the archive.",
                    )
                elif is_transport(error):
                    continue
                elif error.code() != END_OF_PARTITION:
                    raise translate(error, doing)
                yield message
            if not messages:
                yield None
            if time.monotonic() - heard_at > self._timeout_s:
                raise Unavailable(f"{doing}: Kafka did not answer for {self._timeout_s:g} s.")


class Follower:
    """Follows partitions from given offsets: first their existing records, then new ones.

    read_committed. Each partition is in order; markers and aborted records are skipped.
    """

    def __init__(
        self,
        config: Config,
        starts: Mapping[tuple[str, int], int],
        *,
        client_id: str = "everstate-follower",
        is_one_of_many: bool = False,
    ) -> None:
        """``is_one_of_many``: it reads less ahead, and an empty fetch request waits longer."""
        self._doing = f"following the log as {client_id}"
        settings = consumer_settings(config, client_id)
        # How long the broker holds an empty fetch request; it answers at once when records come.
        settings |= {"fetch.wait.max.ms": 100}
        if is_one_of_many:
            settings |= {"fetch.wait.max.ms": 500, "queued.max.messages.kbytes": 4_096}
        self._reported, self._at = dict(starts), dict(starts)
        """Next offset of each partition: at the last call of :meth:`spans`, and now."""
        self._client = confluent_kafka.Consumer(settings)
        self._client.assign(
            [TopicPartition(topic, part, at) for (topic, part), at in starts.items()]
        )
        self._assigned, self._paused = frozenset(starts), frozenset[tuple[str, int]]()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def only(self, places: Iterable[tuple[str, int]]) -> None:
        """Follow these partitions only, until the next call; no record of the others is lost.

        Records that were already fetched from the others are discarded and fetched again later. A
        call with the same partitions as before costs nothing.
        """
        paused = self._assigned - frozenset(places)
        with translated(self._doing):
            self._client.pause([TopicPartition(*place) for place in paused - self._paused])
            self._client.resume([TopicPartition(*place) for place in self._paused - paused])
        self._paused = paused

    def poll(self, records_max: int, wait_s: float) -> list[Record]:
        """At most about ``records_max`` records; waits up to ``wait_s`` for the first one only.

        Raises DataLoss when the log no longer has an offset. While a broker is unreachable its
        partitions give no records.
        """
        with translated(self._doing):
            first = self._client.consume(1, wait_s)
            messages = first + self._client.consume(records_max, 0) if first else []
        found = []
        for message in messages:
            error = message.error()
            if error is None:
                record = as_record(message)
                found.append(record)
                self._at[record.topic, record.partition] = record.offset + 1
            elif error.code() == END_OF_PARTITION:
                topic, partition, offset = place_of(message)
                self._at[topic, partition] = offset
            elif error.code() in OFFSET_GONE:
                raise DataLoss(
                    f"{self._doing}: the log no longer has the requested offset ({error.str()})."
                )
            elif not is_transport(error):
                raise translate(error, self._doing)
        return found

    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """First and next offset of each partition that was read since the last call.

        :meth:`poll` has returned all records between them. Reaching the end of a partition counts
        as well, so that the range includes markers at its end.
        """
        spans = {
            place: (self._reported[place], end)
            for place, end in self._at.items()
            if end != self._reported[place]
        }
        self._reported = dict(self._at)
        return spans


def _records(
    follower: Follower, offsets: Offsets, topics: Iterable[str], idle_s: float | None
) -> Generator[Record, None, None]:
    """Records that a follower gives, until none came for ``idle_s``; closes it."""
    seen_at = time.monotonic()
    with closing(follower), closing(offsets):
        while True:
            with suppress(Unavailable):
                offsets.check_partitions(topics)
            found = follower.poll(_FETCH_MESSAGES, _STEP_S)
            yield from found
            if found:
                seen_at = time.monotonic()
            elif idle_s is not None and time.monotonic() - seen_at > idle_s:
                return


def as_record(message: Message, *, has_headers: bool = True) -> Record:
    """The driver's message as a :class:`Record`."""
    kind, timestamp_ms = message.timestamp()
    # Not by place_of: a call would be a third of the cost of a record.
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers = cast("list[Header] | None", message.headers()) if has_headers else None
    return Record(
        topic,
        partition,
        offset,
        timestamp_ms,
        message.key(),
        message.value(),
        tuple(headers) if headers else (),
        # librdkafka's number is one higher than that of Java and Spark.
        kind - 1,
    )
