"""Consume, process, produce: one Kafka transaction for each batch, fenced by group (KIP-447)."""

# librdkafka's own error codes are public, and spelled with a leading underscore.
# ruff: noqa: SLF001

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import confluent_kafka
from confluent_kafka import KafkaError, TopicPartition

from everstate.config import Config
from everstate.errors import EverstateError, Fenced, LogError, RecordRefused, Unavailable
from everstate.log.attempt import Attempt, Incoming, RecordPlace, TookTooLong, place_of
from everstate.log.client import member_settings
from everstate.log.collector import collector_paused
from everstate.log.outcome import OFFSET_GONE, is_transport, translate, translated
from everstate.log.producer import Producer
from everstate.runtime.worker import Worker

logger = logging.getLogger("everstate.log")

_OPEN_S: Final = 30.0
_ABORT_S: Final = 5.0
_COMMITTED_S: Final = 15.0
"""Wait for committed offsets; longer than the time-out of a killed member's transaction."""
_REPLACED: Final = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL})

LogPartition = tuple[str, int]
"""Topic and partition."""

Send = Callable[..., None]
"""``send(topic, key, value, headers, partition, timestamp_ms)``; see ``Producer.send_raw``."""


class PartitionsMoved(Exception):
    """Partitions were revoked while they were being opened; what was read is discarded."""


class Work(Protocol):
    """Processes the records of partitions that this process owns.

    One thread calls it. Between ``handle`` and ``settle`` a transaction is open: results of
    ``handle`` become valid only when ``settle`` is called. ``shut`` without ``settle`` discards
    them.
    """

    def open(self, place: LogPartition, committed: int | None, alive: Callable[[], None]) -> int:
        """Prepare a partition. In: the group's committed offset; out: the offset to start at.

        Call ``alive`` about every second; it raises PartitionsMoved.
        """

    def shut(self) -> None:
        """Release all partitions and discard what is not settled."""

    def handle(self, batch: Sequence[Incoming], send: Send, attempt: Attempt) -> None:
        """Process records, in their order, and send the resulting records.

        Everything that runs code of the project is called by ``attempt.call``. A record that is
        ``attempt.refused`` is processed with fewer results, or raises an error. Called in a thread
        of its own while the caller waits.
        """

    def settle(self) -> None:
        """Called when the transaction of the last ``handle`` has been committed."""

    def is_due(self) -> bool:
        """Whether ``handle`` has work to do without new records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Identity of this process: its group, its name in it, and the limits of its transactions."""

    group: str
    instance: str
    """Unique in the group and stable across restarts: the transactional id is derived from it."""
    session_timeout_s: float = 10.0
    transaction_timeout_s: float = 10.0


class TransactionalLoop(Worker):
    """Reads topics as a member of a group; each batch is one transaction with its offsets.

    Exactly once: the records that ``work`` sends and the group's offsets are committed together.
    A member that lost its partitions is rejected by its group generation. A former instance that
    was killed is fenced by the transactional id, and its open transaction aborted at once. When
    the outcome of a commit is unknown, everything is closed and opened again, and the committed
    offsets are read from the log. After any failure smaller batches follow, so that one record does
    not hold up the others. Two causes are a record's own: the log refuses what follows from it, or
    the project's code is slow on it, twice. Only that record is refused.
    """

    idle_s = 0.0  # A step waits for records itself.
    retry_s = (0.1, 5.0)

    def __init__(
        self,
        config: Config,
        work: Work,
        topics: Sequence[str],
        member: Membership,
        *,
        batch_records_max: int,
        batch_wait_s: float,
    ) -> None:
        self._config = config
        self._work = work
        self._topics = list(topics)
        self._member = member
        self._batch_max = batch_records_max
        self._wait_s = batch_wait_s
        self._id = self.doing = f"{member.group}.{member.instance}"
        self._consumer: Any = None
        self._producer: Producer | None = None
        self._assigned: list[TopicPartition] | None = None
        self._moves = 0
        self._at_most = batch_records_max
        """Size limit of the next batch; smaller after a failure."""
        self._slow: set[RecordPlace] = set()
        """Records on which the project's code was slow once: the whole machine may have been."""
        self._refused: dict[RecordPlace, str] = {}
        """Records from which nothing can follow, and the reason."""
        self.batches = 0
        self.records = 0

    def failed(self, error: EverstateError) -> None:
        """Open everything again."""
        self.leave()

    def has_recovered(self, done: object) -> bool:
        """After a commit: members that only wait for records may fail at the next ones."""
        return bool(done)

    def step(self, timeout_s: float = 0.2) -> int:
        """Process at most one batch; returns its number of records.

        Raises Unavailable or DeliveryFailed when the batch was not committed, or when that is
        unknown: call ``leave``, then ``step`` again. Raises Fenced when another process took over
        this name, and every error of ``work``.
        """
        if self._consumer is None:
            self._open()
        if self._assigned is not None:
            self._take_over()
        batch = self._gather(0.0 if self._work.is_due() else timeout_s)
        if batch or self._work.is_due():
            self._transact(batch)
        return len(batch)

    def close(self) -> None:
        """As :meth:`leave`."""
        self.leave()

    def leave(self) -> None:
        """Abort an open transaction, leave the group, and close the connections."""
        producer, self._producer = self._producer, None
        consumer, self._consumer = self._consumer, None
        self._assigned = None
        self._moves += 1
        try:
            self._work.shut()
        finally:
            if producer is not None:
                producer.discard()
            if consumer is not None:
                with suppress(confluent_kafka.KafkaException, RuntimeError):
                    consumer.close()

    def _open(self) -> None:
        member = self._member
        producer = Producer(
            self._config,
            transactional_id=self._id,
            client_id=self._id,
            transaction_timeout_ms=int(member.transaction_timeout_s * 1000),
        )
        try:
            # Fence first: an open transaction of a former instance would hold back the stable
            # end that is read below.
            producer.init(_OPEN_S)
        except BaseException:
            producer.discard()
            raise
        self._producer = producer
        self._consumer = confluent_kafka.Consumer(
            member_settings(
                self._config,
                self._id,
                group=member.group,
                instance=member.instance,
                session_timeout_ms=int(member.session_timeout_s * 1000),
            )
        )
        self._consumer.subscribe(self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke)

    def _on_assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        # Partitions are opened outside of this callback: that may take longer than a rebalance
        # should.
        consumer.assign([])
        self._assigned = partitions
        self._moves += 1

    def _on_revoke(self, consumer: Any, _partitions: list[TopicPartition]) -> None:
        self._assigned = None
        self._moves += 1
        self._work.shut()
        consumer.unassign()

    def _take_over(self) -> None:
        """Open the partitions that were assigned, then start reading them."""
        partitions, moves = self._assigned, self._moves
        assert partitions is not None

        def alive() -> None:
            if self._consumer.poll(0) is not None or self._moves != moves:
                raise PartitionsMoved

        try:
            with translated("reading the committed offsets of the group"):
                committed = self._consumer.committed(partitions, _COMMITTED_S)
            places, unknown = [], {}
            for each in sorted(committed, key=lambda one: (one.topic, one.partition)):
                if each.error is not None:
                    raise translate(each.error, "reading the committed offsets of the group")
                known = each.offset if each.offset >= 0 else None
                start = self._work.open((each.topic, each.partition), known, alive)
                places.append(TopicPartition(each.topic, each.partition, start))
                if known is None:
                    unknown[each.topic, each.partition] = start
                alive()
        except PartitionsMoved:
            self._work.shut()
            return
        if unknown:
            # The start offset of a group is decided once, not again at its next start.
            self._commit(lambda _send: None, unknown)
        self._consumer.assign(places)
        self._assigned = None
        logger.info(
            "%s: is the owner of the partitions %s",
            self._id,
            [(p.topic, p.partition, p.offset) for p in places],
        )

    def _gather(self, timeout_s: float) -> list[Incoming]:
        """Records for one transaction: the first, and those that come within a short wait."""
        consumer, moves = self._consumer, self._moves
        with translated("reading the log"):
            first = consumer.poll(timeout_s)
            if first is None:
                return []
            found = [first]
            deadline = time.monotonic() + self._wait_s
            while len(found) < self._at_most:
                left_s = deadline - time.monotonic()
                found += consumer.consume(self._at_most - len(found), max(0.0, left_s))
                if left_s <= 0:
                    break
        batch = [message for message in found if message.error() is None]
        if len(batch) < len(found):
            for message in found:
                self._check(message.error())
        # Records read before a rebalance are read again by the partition's present owner.
        return batch if self._moves == moves else []

    def _check(self, error: KafkaError | None) -> None:
        if error is None or is_transport(error):
            return
        if error.code() in _REPLACED or error.fatal():
            raise Fenced(
                f"{self._id}: another process with the same id took over its partitions "
                f"({error.str()}).",
                advice="Stop one of the two processes.",
            )
        if error.code() in OFFSET_GONE:
            raise Unavailable(
                f"{self._id}: the log no longer has the records after the group's committed offset."
            )
        if error.code() != KafkaError._MAX_POLL_EXCEEDED:
            raise translate(error, "reading the log")

    def _transact(self, batch: Sequence[Incoming]) -> None:
        attempt = Attempt(self._refused, batch_s=self._member.transaction_timeout_s / 2)
        began = time.monotonic()
        try:
            with collector_paused():
                self._commit(
                    lambda send: attempt.run(lambda: self._work.handle(batch, send, attempt)),
                    next_offsets(batch),
                )
                self._work.settle()
        except (EverstateError, TookTooLong) as failure:
            self._at_most = max(1, len(batch) // 2)
            if isinstance(failure, TookTooLong):
                raise self._slowed(failure) from failure
            if isinstance(failure, RecordRefused) and len(self._refused) < len(batch):
                if len(batch) == 1:
                    self._refused[place_of(batch[0])] = f"the log refuses it: {failure.reason}"
                raise Unavailable(f"{failure.message} A smaller batch is tried.") from failure
            raise
        if time.monotonic() - began < self._member.transaction_timeout_s / 4:
            self._at_most = min(self._batch_max, 2 * self._at_most)
        if self._slow or self._refused:
            for place in map(place_of, batch):
                self._slow.discard(place)
                self._refused.pop(place, None)
        self.batches += 1
        self.records += len(batch)

    def _slowed(self, slow: TookTooLong) -> Unavailable:
        """The error after an attempt that took too long; refuses a record that is slow again."""
        if slow.place is None:
            return Unavailable(f"{slow.reason}. A smaller batch is tried.")
        topic, partition, offset = slow.place
        if slow.place in self._slow:
            self._refused[slow.place] = slow.reason
            then = "It is refused"
        else:
            self._slow.add(slow.place)
            then = "It is tried again in a smaller batch"
        return Unavailable(f"{topic}[{partition}]@{offset}: {slow.reason}. {then}.")

    def _commit(self, handle: Callable[[Send], None], offsets: Mapping[LogPartition, int]) -> None:
        """One transaction: the records that ``handle`` sends, and the group's offsets."""
        producer = self._producer
        assert producer is not None
        try:
            producer.begin()
            handle(producer.send_raw)
            if offsets:
                group = self._consumer.consumer_group_metadata()
                producer.send_offsets(offsets, group, self._timeout_s)
            producer.commit(self._timeout_s)
        except Fenced as error:
            # A transaction that exceeded its time-out is fenced too. If another process has this
            # name, the group reports it when this loop joins again.
            raise Unavailable(error.message) from error
        except LogError as error:
            self._withdraw(producer)
            raise Unavailable(error.message) from error
        except Exception:
            self._withdraw(producer)
            raise

    @property
    def _timeout_s(self) -> float:
        return 2 * self._member.transaction_timeout_s

    def _withdraw(self, producer: Producer) -> None:
        """Abort, so that no reader waits for the open transaction."""
        with suppress(EverstateError):
            producer.abort(_ABORT_S)


def next_offsets(batch: Sequence[Incoming]) -> Mapping[LogPartition, int]:
    """The offset after the last record of each partition of a batch."""
    found: dict[LogPartition, int] = {}
    for message in batch:
        topic, partition, offset = place_of(message)
        found[topic, partition] = offset + 1
    return found
