"""Writing to the log: never lost silently, never reordered, the caller told what failed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from everstate.config import Config
from everstate.errors import DeliveryFailed, EverstateError, RecordRefused, Unavailable
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

_POLL_EVERY: Final = 1_000
_STEP_S: Final = 0.5
_GRACE_S: Final = 5.0
_Failure = tuple[KafkaError, str, bytes | None]


class Producer:
    """Idempotent producer, acks=all; plain, or transactional when given an id.

    A full queue makes ``send`` wait (back-pressure), for as long as the broker is away. A delivery
    error is raised by the next ``send`` or ``flush``: everything queued behind it is purged, so
    that nothing overtakes what was lost (C4), and the producer is fresh for a caller that resumes
    from the log's tail. One thread at a time.
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
        # No reference to self: a dropped producer must go at once, not when garbage is collected.
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
        """Queue records in their order; says how many."""
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
                # It was not queued: waited for, or told, as of any one record.
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
        """Queue one record without an OutRecord: the fast way in (a list of headers is fastest).

        Raises RecordRefused when the record is larger than the producer takes (nothing was
        queued, the producer goes on), DeliveryFailed when an earlier record was not delivered.
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
        """As :meth:`send_raw`, without waiting: ``False`` when the queue is full."""
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
        when time is up: then the records stay queued, are delivered when the broker is back, and
        ``flush`` may be called again.
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
                    "they stay queued."
                )

    def close(self, timeout_s: float = 60.0) -> None:
        """Flush, then give up the connection; raises as ``flush`` does.

        After Unavailable the records that were not acknowledged in time are given up.
        """
        try:
            self.flush(timeout_s)
        finally:
            self.discard()

    def discard(self) -> None:
        """Give up the connection and whatever is queued, without waiting.

        A call of the driver that never came back keeps its thread and its connections until the
        process ends; its transaction is aborted by the next producer with the same id.
        """
        if not self._stuck:
            self._drain()
        self._failures.clear()

    def init(self, timeout_s: float = 60.0) -> None:
        """Take over the transactional id (C3).

        An older instance is fenced, its open transaction aborted, one that was being committed
        is completed. Raises Fenced or Unavailable.
        """
        self._until(timeout_s, "starting transactions", self._client.init_transactions)

    def begin(self) -> None:
        """Begin a transaction (no round trip); raises Fenced or Unavailable."""
        try:
            self._client.begin_transaction()
        except KafkaException as cause:
            raise self._transaction_error(cause.args[0], "beginning a transaction") from cause

    def send_offsets(
        self, offsets: Mapping[tuple[str, int], int], group: Any, timeout_s: float = 60.0
    ) -> None:
        """Make a group's next offsets part of the transaction: they count if it is committed.

        ``group`` is the consumer's group metadata, by which a member that lost its partitions is
        found out (KIP-447). Raises as ``commit`` does, and Unavailable when librdkafka does not
        come back in time: then nothing is left to do with this producer but ``discard``.
        """
        places = [TopicPartition(topic, part, at) for (topic, part), at in offsets.items()]
        send = self._client.send_offsets_to_transaction

        def call(wait_s: float) -> None:
            # The driver's own time-out is not kept when the group's coordinator was away and is
            # back (confluentinc/librdkafka#5456, #5511).
            try:
                _call_aside(lambda: send(places, group, wait_s), wait_s + _GRACE_S)
            except TimeoutError as cause:
                self._stuck = True
                raise Unavailable("sending offsets: Kafka's driver does not come back.") from cause

        self._until(timeout_s, "sending offsets", call)

    def commit(self, timeout_s: float = 60.0) -> None:
        """Commit the transaction: all its records become visible, or none.

        When it returns the commit is decided; readers see it some milliseconds later, when the
        brokers have written their markers.

        Raises DeliveryFailed or RecordRefused when it must be aborted (call ``abort``, which also
        tells whether being fenced was the cause), Fenced, and Unavailable when the outcome is
        unknown: only a new producer with the same id settles it (``init`` there completes or
        aborts).
        """
        deadline = time.monotonic() + timeout_s
        self.flush(timeout_s)
        left_s = deadline - time.monotonic()
        self._until(left_s, "committing a transaction", self._client.commit_transaction)
        self._failures.clear()

    def abort(self, timeout_s: float = 60.0) -> None:
        """Abort the transaction: nothing of it is ever visible to a read_committed reader."""
        if self._stuck:
            raise Unavailable("aborting a transaction: the producer is spent.")
        self._until(timeout_s, "aborting a transaction", self._client.abort_transaction)
        self._failures.clear()

    def _connect(self) -> None:
        self._client = confluent_kafka.Producer(self._settings)
        self._produce = self._client.produce

    def _serve(self, call: Callable[[float], int], timeout_s: float) -> int:
        """Run the client's callbacks; raise what they brought."""
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
        """Purge what is queued and serve its delivery reports."""
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
        """What to raise when the client is spent: the record that did it, or being fenced."""
        if self._failures and error.code() not in FENCING:
            return self._fail()
        return self._transaction_error(error, "sending to the log")

    def _reason(self, error: KafkaError) -> str:
        if error.code() in TOO_LARGE:
            return (
                f"the record is larger than Kafka takes here (producer limit {self._limit:,} bytes,"
                " from log.message_bytes_max; the topic's max.message.bytes may be lower)"
            )
        return f"{error.str()} ({error.name()})"

    def _first_failure(self) -> EverstateError:
        causes = [failure for failure in self._failures if failure[0].code() not in CONSEQUENCES]
        error, topic, key = (causes or self._failures)[0]
        kind = RecordRefused if error.code() in PERMANENT else DeliveryFailed
        return kind(topic, _text(key), self._reason(error))

    def _fail(self) -> EverstateError:
        """What to raise; a plain producer is purged and made anew, so that nothing overtakes."""
        failure = self._first_failure()
        if "transactional.id" not in self._settings:
            self.discard()
            self._connect()
        return failure

    def _until(self, timeout_s: float, doing: str, call: Any) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            try:
                call(min(left_s, 5.0))
            except KafkaException as cause:
                error = cause.args[0]
                retry = error.retriable() and not error.fatal() and not error.txn_requires_abort()
                if not retry or time.monotonic() > deadline:
                    raise self._transaction_error(error, doing) from cause
                time.sleep(0.02)
            else:
                return

    def _transaction_error(self, error: KafkaError, doing: str) -> EverstateError:
        if error.txn_requires_abort():
            if self._failures:
                return self._first_failure()
            return DeliveryFailed("transaction", None, f"{doing}: {error.str()} ({error.name()})")
        if error.fatal() and error.code() not in FENCING and not is_transport(error):
            return Unavailable(f"{doing}: {error.str()} ({error.name()}); the producer is spent.")
        return translate(error, doing)


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="replace")


def _collect(failures: list[_Failure], error: KafkaError, message: Message) -> None:
    if error.code() not in CONSEQUENCES or not failures:
        failures.append((error, str(message.topic()), message.key()))


def _call_aside(call: Callable[[], object], timeout_s: float) -> None:
    """Run ``call`` in a thread of its own, which is left behind when it takes too long.

    Raises what ``call`` raises, or TimeoutError.
    """
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            call()
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run, name="driver-call", daemon=True).start()
    try:
        error = ended.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
