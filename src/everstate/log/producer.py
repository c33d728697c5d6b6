"""Writing to the log: records are never lost silently or reordered, and failures are raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from everstate.config import Config
from everstate.errors import DeliveryFailed, EverstateError, RecordRefused, Unavailable
from everstate.log import attempt
from everstate.log.client import TRANSACTION_TIMEOUT_MS, producer_settings
from everstate.log.outcome import (
    CONSEQUENCES,
    FENCING,
    PERMANENT,
    TOO_LARGE,
    is_transport,
    translate,
)
from everstate.log.record import Header, OutRecord
from everstate.retrying import within

_POLL_EVERY: Final = 1_000
_STEP_S: Final = 0.5
_GRACE_S: Final = 5.0
_KEY_BYTES_MAX: Final = 2_048
"""What an error says of a key; those of entities are not longer."""
_Failure = tuple[KafkaError, str, bytes | None]


class Producer:
    """Idempotent producer, acks=all; plain, or transactional when given an id.

    A full queue makes ``send`` wait (back-pressure), for as long as the broker is unreachable. A
    delivery error is raised by the next ``send`` or ``flush``: all records queued after the failed
    one are purged, so that none overtakes it (C4), and the caller may use the producer again to
    resume from the log's end. One thread at a time.
    """

    def __init__(
        self,
        config: Config,
        *,
        transactional_id: str | None = None,
        client_id: str = "everstate-producer",
        transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
    ) -> None:
        self._failures: list[_Failure] = []
        # No reference to self: a dropped producer must be freed at once, without the collector.
        self._settings: dict[str, Any] = {
            **producer_settings(
                config,
                client_id,
                transactional_id=transactional_id,
                transaction_timeout_ms=transaction_timeout_ms,
            ),
            "on_delivery": partial(_collect, self._failures),
        }
        self._limit = int(self._settings["message.max.bytes"])
        self._unpolled = 0
        self._stuck = False
        self._limit_s = transaction_timeout_ms / 1000
        self._begun_at: float | None = None
        self._connect()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __len__(self) -> int:
        """Records that were sent and are not yet acknowledged."""
        return len(self._client)

    def send(self, record: OutRecord) -> None:
        """Queue one record; waits while the queue is full. See :meth:`send_raw`."""
        partition, timestamp_ms = record.partition, record.timestamp_ms
        self.send_raw(
            record.topic,
            record.key,
            record.value,
            record.headers,
            -1 if partition is None else partition,
            timestamp_ms or 0,
        )

    def send_many(self, records: Iterable[OutRecord]) -> int:
        """Queue records in their order; returns how many."""
        if self._failures:
            raise self._fail()
        count, produce = 0, self._produce
        for count, one in enumerate(records, 1):
            partition = -1 if one.partition is None else one.partition
            headers: Any = one.headers
            if headers.__class__ is not list:
                headers = list(headers)
            try:
                produce(
                    one.topic,
                    one.value,
                    one.key,
                    partition=partition,
                    timestamp=one.timestamp_ms or 0,
                    headers=headers,
                )
            except (BufferError, KafkaException):
                # It was not queued: ``send`` waits for room, or raises the error.
                self.send(one)
            if count % _POLL_EVERY == 0:
                self._serve(self._client.poll, 0)
        return count

    def send_raw(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[Header] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """Queue one record without an OutRecord, which is faster (fastest with a list of headers).

        Raises RecordRefused when the record is larger than the producer takes (it was not queued,
        and the producer stays usable), DeliveryFailed when an earlier record was not delivered.
        """
        while not self.offer(topic, key, value, headers, partition, timestamp_ms):
            self._serve(self._client.poll, _STEP_S)

    def offer(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[Header] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> bool:
        """Like :meth:`send_raw`, without waiting: ``False`` when the queue is full."""
        if self._failures:
            raise self._fail()
        listed = headers if headers.__class__ is list else list(headers)
        try:
            self._produce(
                topic,
                value,
                key,
                partition=partition,
                timestamp=timestamp_ms,
                headers=listed,
            )
        except BufferError:
            self._serve(self._client.poll, 0)
            return False
        except KafkaException as cause:
            raise self._refusal(cause.args[0], topic, key) from cause
        self._unpolled += 1
        if self._unpolled >= _POLL_EVERY:
            self._unpolled = 0
            self._serve(self._client.poll, 0)
        return True

    def poll(self) -> None:
        """Serve delivery reports without waiting; raises what ``send`` would."""
        self._serve(self._client.poll, 0)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until everything sent is acknowledged.

        Raises DeliveryFailed (key and reason) when a record was not delivered, and Unavailable
        after ``timeout_s``: then the records stay queued, are delivered when the broker is back,
        and ``flush`` may be called again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            remaining = self._serve(self._client.flush, max(0.0, min(_STEP_S, left_s)))
            if remaining == 0:
                return
            if left_s <= 0:
                raise Unavailable(
                    f"Kafka has not acknowledged {remaining:,} records within {timeout_s:g} s; "
                    "they stay buffered."
                )

    def close(self, timeout_s: float = 60.0) -> None:
        """Flush, then close the connection; raises as ``flush`` does.

        After Unavailable the records that were not acknowledged in time are discarded.
        """
        try:
            self.flush(timeout_s)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the connection and discard all queued records, without waiting.

        A call of the driver that never returned keeps its thread and its connections until the
        process ends; its transaction is aborted by the next producer with the same id.
        """
        if not self._stuck:
            self._drain()
        self._failures.clear()

    def init(self, timeout_s: float = 60.0) -> None:
        """Take over the transactional id (C3).

        An older instance is fenced: its open transaction is aborted, or completed when its commit
        had begun. Raises Fenced or Unavailable.
        """
        # Without a connection, librdkafka looks for the coordinator again half a second later.
        with suppress(KafkaException):
            self._client.list_topics(timeout=min(timeout_s, _STEP_S))
        self._until(timeout_s, "starting transactions", self._client.init_transactions)

    def begin(self) -> None:
        """Begin a transaction (no round trip); raises Fenced or Unavailable."""
        try:
            self._client.begin_transaction()
            self._begun_at = time.monotonic()
        except KafkaException as cause:
            raise self._transaction_error(cause.args[0], "beginning a transaction") from cause

    def send_offsets(
        self, offsets: Mapping[tuple[str, int], int], group: Any, timeout_s: float = 60.0
    ) -> None:
        """Add a group's next offsets to the transaction: they are committed with it.

        ``group`` is the consumer's group metadata, by which the broker rejects a member that lost
        its partitions (KIP-447). Raises as ``commit`` does, and Unavailable when librdkafka does
        not return in time: then the only valid call on this producer is ``discard``.
        """
        places = [TopicPartition(topic, part, at) for (topic, part), at in offsets.items()]
        send = self._client.send_offsets_to_transaction

        def call(wait_s: float) -> None:
            # The driver ignores its own time-out when the group's coordinator was unreachable and
            # is back (confluentinc/librdkafka#5456, #5511).
            try:
                attempt.within(wait_s + _GRACE_S, send, places, group, wait_s)
            except attempt.TookTooLong as cause:
                self._stuck = True
                raise Unavailable(
                    "sending offsets: a call of Kafka's client library does not return."
                ) from cause

        self._until(timeout_s, "sending offsets", call)

    def commit(self, timeout_s: float = 60.0) -> None:
        """Commit the transaction: all its records become visible, or none.

        When it returns, the commit is final; readers see it some milliseconds later, when the
        brokers have written their markers.

        Raises DeliveryFailed or RecordRefused when the transaction must be aborted (call ``abort``,
        which raises Fenced if that was the cause), Fenced, and Unavailable when the outcome is
        unknown: then only ``init`` of a new producer with the same id completes or aborts it.
        """
        deadline = time.monotonic() + timeout_s
        self.flush(timeout_s)
        left_s = deadline - time.monotonic()
        self._until(left_s, "committing a transaction", self._client.commit_transaction)
        self._failures.clear()

    def abort(self, timeout_s: float = 60.0) -> None:
        """Abort the transaction: no read_committed reader ever sees a record of it."""
        if self._stuck:
            raise Unavailable("aborting a transaction: the producer cannot be used any more.")
        self._until(timeout_s, "aborting a transaction", self._client.abort_transaction)
        self._failures.clear()

    def _connect(self) -> None:
        self._client = confluent_kafka.Producer(self._settings)
        self._produce = self._client.produce

    def _serve(self, call: Callable[[float], int], timeout_s: float) -> int:
        """Run the client's callbacks; raise the errors that they reported."""
        try:
            count = call(timeout_s)
        except (KafkaException, SystemError) as cause:
            # A fatal error is raised by poll and flush; when delivery reports are served in the
            # same call, Python finds the exception already set and wraps it in a SystemError.
            error = cause if isinstance(cause, KafkaException) else cause.__cause__
            if not isinstance(error, KafkaException):
                raise
            self._drain()
            raise self._fatal(error.args[0]) from cause
        if self._failures:
            raise self._fail()
        return count

    def _drain(self) -> None:
        """Purge queued records and serve their delivery reports."""
        self._client.purge()
        for _ in range(10):
            try:
                if self._client.flush(0.05) == 0:
                    return
            except (KafkaException, SystemError):
                continue

    def _refusal(self, error: KafkaError, topic: str, key: bytes | None) -> EverstateError:
        if error.code() in PERMANENT:
            return RecordRefused(topic, _text(key), self._reason(error))
        if error.fatal() or error.code() in CONSEQUENCES:
            self._drain()
            return self._fatal(error)
        return DeliveryFailed(topic, _text(key), self._reason(error))

    def _fatal(self, error: KafkaError) -> EverstateError:
        """The error to raise after a fatal one: the record that caused it, or Fenced."""
        if self._failures and error.code() not in FENCING:
            return self._fail()
        return self._transaction_error(error, "sending to the log")

    def _reason(self, error: KafkaError) -> str:
        if error.code() in TOO_LARGE:
            return (
                f"the record is larger than Kafka accepts here (limit {self._limit:,} bytes,"
                " from log.message_bytes_max; the topic's max.message.bytes may be lower)"
            )
        return f"{error.str()} ({error.name()})"

    def _first_failure(self) -> EverstateError:
        causes = [failure for failure in self._failures if failure[0].code() not in CONSEQUENCES]
        error, topic, key = (causes or self._failures)[0]
        kind = RecordRefused if error.code() in PERMANENT else DeliveryFailed
        return kind(topic, _text(key), self._reason(error))

    def _fail(self) -> EverstateError:
        """The error to raise; a plain producer is purged and replaced, so that order is kept."""
        failure = self._first_failure()
        if "transactional.id" not in self._settings:
            self.discard()
            self._connect()
        return failure

    def _until(self, timeout_s: float, doing: str, call: Any) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            within(timeout_s, _may_pass, pause_s=0.02)(
                lambda: call(min(5.0, max(0.1, deadline - time.monotonic())))
            )
        except KafkaException as cause:
            raise self._transaction_error(cause.args[0], doing) from cause

    def _transaction_error(self, error: KafkaError, doing: str) -> EverstateError:
        if error.txn_requires_abort():
            if not self._failures:
                # The report on the record that caused it may not have been served yet.
                self._drain()
            if self._failures:
                return self._first_failure()
            return DeliveryFailed("transaction", None, f"{doing}: {error.str()} ({error.name()})")
        if error.fatal() and error.code() not in FENCING and not is_transport(error):
            return Unavailable(
                f"{doing}: {error.str()} ({error.name()}); the producer cannot be used any more."
            )
        open_s = 0.0 if self._begun_at is None else time.monotonic() - self._begun_at
        expired = (
            f"the transaction was open for {open_s:.1f} s, and the broker ends one after "
            f"{self._limit_s:g} s"
            if open_s >= self._limit_s
            else None
        )
        return translate(error, doing, expired)


def _text(key: bytes | None) -> str | None:
    return None if key is None else key[:_KEY_BYTES_MAX].decode(errors="replace")


def _collect(failures: list[_Failure], error: KafkaError, message: Message) -> None:
    if error.code() not in CONSEQUENCES or not failures:
        failures.append((error, str(message.topic()), message.key()))


def _may_pass(cause: BaseException) -> bool:
    """Whether the same call of a transaction may succeed later."""
    if not isinstance(cause, KafkaException):
        return False
    error: KafkaError = cause.args[0]
    return error.retriable() and not error.fatal() and not error.txn_requires_abort()
