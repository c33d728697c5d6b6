"""Reading explicit ranges of the log; no groups, no commits: positions belong to the views."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Final, cast

import confluent_kafka
from confluent_kafka import Message, TopicPartition

from everstate.config import Config
from everstate.errors import DataLoss, Unavailable
from everstate.log.client import READ_COMMITTED, READ_UNCOMMITTED, consumer_settings
from everstate.log.outcome import END_OF_PARTITION, OFFSET_GONE, is_transport, translate, translated
from everstate.log.positions import Offsets
from everstate.log.record import Header, Record

_FETCH_MESSAGES: Final = 5_000
_STEP_S: Final = 0.2


class Consumer:
    """Reads records byte-exact, in order, read_committed unless an audit asks otherwise (C5).

    Out: what the isolation serves. Offsets of markers, aborted and compacted records are passed
    over silently; a range that the log no longer holds is DataLoss, never a shorter answer.
    """

    def __init__(
        self,
        config: Config,
        *,
        isolation: str = READ_COMMITTED,
        client_id: str = "everstate-reader",
        timeout_s: float = 60.0,
        read_ahead: bool = True,
    ) -> None:
        self._config = config
        self._isolation = isolation
        self._timeout_s = timeout_s
        self._fetch_messages = _FETCH_MESSAGES if read_ahead else 1
        self._client = confluent_kafka.Consumer(
            consumer_settings(config, client_id, isolation=isolation, read_ahead=read_ahead)
        )

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connection."""
        self._client.close()

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Record]:
        """Records of ``[start, end)`` of one partition; ``end`` at most the stable end.

        Raises DataLoss when ``start`` is gone, Unavailable when nothing comes for ``timeout_s``.
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
                    yield as_record(message)
                if offset >= end or (error is None and offset == end - 1):
                    return
        finally:
            self._client.unassign()

    def read_topic(self, topic: str) -> Iterator[Record]:
        """All records of a topic that are there now, one partition after the other."""
        with Offsets(self._config) as offsets:
            starts = offsets.beginnings([topic])
            whole = self._isolation == READ_UNCOMMITTED
            ends = offsets.high_watermarks([topic]) if whole else offsets.stable_ends([topic])
        for (name, partition), end in sorted(ends.items()):
            yield from self.read(name, partition, starts[name, partition], end)

    def tail(
        self, topics: Iterable[str], *, from_end: bool = True, idle_s: float | None = None
    ) -> Generator[Record, None, None]:
        """Records as they come; order holds in each partition.

        Begins at what is the end (or the beginning) at this call, not at the first ``next``.
        Ends after ``idle_s`` without a record; ``None``: never. A broker that is away is waited
        for. Close it (or exhaust it) before the consumer.
        """
        with Offsets(self._config) as offsets:
            listed = list(topics)
            starts = offsets.stable_ends(listed) if from_end else offsets.beginnings(listed)
        places = [TopicPartition(topic, part, at) for (topic, part), at in starts.items()]
        return self._follow(places, idle_s)

    def _follow(
        self, places: list[TopicPartition], idle_s: float | None
    ) -> Generator[Record, None, None]:
        self._client.assign(places)
        seen_at = time.monotonic()
        try:
            for message in self._messages("following the log", patient=True):
                if message is not None and message.error() is None:
                    yield as_record(message)
                    seen_at = time.monotonic()
                elif idle_s is not None and time.monotonic() - seen_at > idle_s:
                    return
        finally:
            self._client.unassign()

    def _messages(self, doing: str, *, patient: bool = False) -> Iterator[Message | None]:
        """Records and ends of partitions; ``None`` when a poll brought nothing."""
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
                        f"{doing}: the log no longer holds the offset asked for "
                        f"({error.str()}). Nothing was skipped.",
                        advice="Read that range from the archive.",
                    )
                elif is_transport(error):
                    continue
                elif error.code() != END_OF_PARTITION:
                    raise translate(error, doing)
                yield message
            if not messages:
                yield None
            if not patient and time.monotonic() - heard_at > self._timeout_s:
                raise Unavailable(f"{doing}: nothing came for {self._timeout_s:g} s.")


class Follower:
    """Follows partitions from given offsets: what is there comes at once, and what comes, soon.

    read_committed. Each partition is in order; markers and aborted records are passed over.
    """

    def __init__(
        self,
        config: Config,
        starts: Mapping[tuple[str, int], int],
        *,
        client_id: str = "everstate-follower",
    ) -> None:
        self._doing = f"following the log as {client_id}"
        settings = consumer_settings(config, client_id)
        # How often the broker is asked while there is nothing; what comes, it tells at once.
        settings |= {"fetch.wait.max.ms": 100}
        self._told, self._at = dict(starts), dict(starts)
        """Next offset of each partition: when :meth:`spans` was called last, and now."""
        self._client = confluent_kafka.Consumer(settings)
        self._client.assign(
            [TopicPartition(topic, part, at) for (topic, part), at in starts.items()]
        )
        self._assigned, self._paused = frozenset(starts), frozenset[tuple[str, int]]()

    def close(self) -> None:
        """Give up the connection."""
        self._client.close()

    def only(self, places: Iterable[tuple[str, int]]) -> None:
        """Follow these partitions only, until another call; of the others nothing is lost.

        What was fetched of the others is thrown away: the same again is free, a change is not.
        """
        paused = self._assigned - frozenset(places)
        with translated(self._doing):
            self._client.pause([TopicPartition(*place) for place in paused - self._paused])
            self._client.resume([TopicPartition(*place) for place in self._paused - paused])
        self._paused = paused

    def poll(self, records_max: int, wait_s: float) -> list[Record]:
        """Records that are there, at most so many; waits up to ``wait_s`` for the first one.

        Raises DataLoss when an offset is gone; a broker that is away brings nothing.
        """
        with translated(self._doing):
            first = self._client.consume(1, wait_s)
            messages = first + self._client.consume(records_max, 0.005) if first else []
        found = []
        for message in messages:
            error = message.error()
            if error is None:
                record = as_record(message)
                found.append(record)
                self._at[record.topic, record.partition] = record.offset + 1
            elif error.code() == END_OF_PARTITION:
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                self._at[topic, partition] = offset
            elif error.code() in OFFSET_GONE:
                raise DataLoss(f"{self._doing}: the log no longer holds it ({error.str()}).")
            elif not is_transport(error):
                raise translate(error, self._doing)
        return found

    def spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """What was read since the last call: first and next offset of each such partition.

        All that is there between them was given by :meth:`poll`; an end that was come to counts,
        so that markers at the end of a partition are passed, too.
        """
        spans = {
            place: (self._told[place], end)
            for place, end in self._at.items()
            if end != self._told[place]
        }
        self._told = dict(self._at)
        return spans


def as_record(message: Message) -> Record:
    """Our record of the driver's message."""
    kind, timestamp_ms = message.timestamp()
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers = cast("list[Header] | None", message.headers())
    return Record(
        topic,
        partition,
        offset,
        timestamp_ms,
        message.key(),
        message.value(),
        tuple(headers) if headers else (),
        # librdkafka counts one higher than Java and Spark.
        kind - 1,
    )
