"""Behavioural facts: events that are written to the log only, each under its own id."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cachetools import FIFOCache
from pydantic import BaseModel

from everstate.changes import Change, ChangeCodec, EntityType, Kind, Provenance, derived_change_id
from everstate.changes.codec import Headers
from everstate.changes.keys import EntityKey, check_key
from everstate.changes.moments import check_moment
from everstate.config import Config
from everstate.errors import EventConflict, EverstateError, RecordRefused, Unavailable
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics

logger = logging.getLogger("everstate.sources.crud")

_BATCH_MAX: Final = 5_000
_WAITING_MAX: Final = 20_000
_WAITING_BYTES_MAX: Final = 128 * 1_048_576
_REMEMBERED_MAX: Final = 100_000
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Pending:
    """A record that is not yet acknowledged."""

    place: EntityKey
    topic: str
    key: bytes
    value: bytes
    headers: Headers
    done: Future[None]


class EventLog:
    """Appends events to `<entity>.changes`, and reports when Kafka has acknowledged (acks=all).

    An event is one change of kind `event`, version 1; its key is the id that its writer gave it.
    The change id is derived from that id and the content. So an event that was written twice,
    because a response was lost or another process handled the second request, is the same change
    twice, and every view counts it once (C6, C13). The same id with other content is a conflict:
    the first in log order is accepted, the other is dead-lettered to `.dead` (C6).

    Within a process the last 100,000 ids are remembered: a repeated event is answered without a
    second record, and a conflict is detected at once. At most 20,000 events and 128 MiB wait for
    Kafka, so that memory is bounded. One thread sends queued events in batches; any thread may
    append. A context manager.
    """

    def __init__(self, config: Config, entity_types: Iterable[EntityType]) -> None:
        self._config = config
        limit = config.log.message_bytes_max
        self._codecs = {
            each.name: ChangeCodec(each, message_bytes_max=limit) for each in entity_types
        }
        self._names = TopicNames(config.log.prefix)
        self._waiting: queue.Queue[_Pending] = queue.Queue(_WAITING_MAX)
        self._remembered: FIFOCache[EntityKey, tuple[str, Future[None]]]
        self._remembered = FIFOCache(_REMEMBERED_MAX)
        self._waiting_bytes = 0
        """Size of the events that are not yet acknowledged."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sender: threading.Thread | None = None

    def __enter__(self) -> EventLog:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Create the missing topics and start sending; raises Unavailable."""
        with Topics(self._config) as topics:
            topics.ensure(self._codecs)
        self._stop.clear()
        self._sender = threading.Thread(target=self._run, name="event-log", daemon=True)
        self._sender.start()

    def close(self) -> None:
        """Send queued events, then close the connection."""
        self._stop.set()
        if self._sender is not None:
            self._sender.join()
            self._sender = None

    @property
    def sending(self) -> bool:
        """Whether the sending thread is running."""
        return self._sender is not None and self._sender.is_alive()

    def append(
        self, entity: str, event: BaseModel, *, provenance: Provenance, occurred_at: datetime | None
    ) -> Future[None]:
        """Send an event; the future is done when it is durable in the log.

        Raises InvalidChange, ChangeTooLarge, EventConflict, and Unavailable when the queue is full.
        The future raises Unavailable when the outcome is unknown: repeating the call is safe.
        """
        codec = self._codecs[entity]
        entity_type = codec.entity_type
        key, state = check_key(entity, entity_type.key_of(event)), entity_type.encode(event)
        content = hashlib.sha256(state).hexdigest()
        recorded_at = datetime.now(UTC)
        if occurred_at is not None:
            check_moment(entity, key, occurred_at, self._config.log.occurred_ahead_hours)
        change = Change(
            id=derived_change_id(f"event:{entity}", f"{key}\n{content}", 0),
            entity=entity,
            schema_version=entity_type.schema_version,
            key=key,
            version=1,
            kind=Kind.EVENT,
            occurred_at=occurred_at or recorded_at,
            recorded_at=recorded_at,
            provenance=provenance,
            current=state,
            original=None,
        )
        encoded = codec.encode(change)
        with self._lock:
            before = self._remembered.get((entity, key))
            if before is not None:
                if before[0] != content:
                    raise EventConflict(entity, key)
                return before[1]
            done: Future[None] = Future()
            # No caller may cancel it from now on: several requests may wait for the same event.
            done.set_running_or_notify_cancel()
            self._enqueue(_Pending((entity, key), self._names.changes(entity), *encoded, done))
            self._remembered[entity, key] = content, done
        return done

    def _enqueue(self, pending: _Pending) -> None:
        if not self.sending:
            said = "events are not accepted: the log is not open."
            raise Unavailable(said, public=said)
        size = len(pending.value)
        try:
            if self._waiting_bytes and self._waiting_bytes + size > _WAITING_BYTES_MAX:
                raise queue.Full
            self._waiting.put_nowait(pending)
        except queue.Full as cause:
            said = (
                f"{_WAITING_MAX:,} events, or {_WAITING_BYTES_MAX:,} bytes, wait for Kafka already;"
                " this one was rejected."
            )
            raise Unavailable(said, public=said) from cause
        self._waiting_bytes += size

    def _run(self) -> None:
        producer = Producer(self._config, client_id="everstate-events")
        try:
            while True:
                # Checked before the queue: events queued before the stop are still sent.
                stopping = self._stop.is_set()
                batch = self._take()
                if batch:
                    self._done(producer, batch)
                elif stopping:
                    return
        finally:
            with suppress(EverstateError):
                producer.close(timeout_s=self._config.api.event_timeout_s)

    def _done(self, producer: Producer, batch: list[_Pending]) -> None:
        """Send a batch, and make room for others."""
        self._send(producer, batch)
        with self._lock:
            self._waiting_bytes -= sum(len(each.value) for each in batch)

    def _take(self) -> list[_Pending]:
        """Queued events as one batch; empty if none arrives within a short wait."""
        batch: list[_Pending] = []
        with suppress(queue.Empty):
            batch.append(self._waiting.get(timeout=_POLL_S))
            while len(batch) < _BATCH_MAX:
                batch.append(self._waiting.get_nowait())
        return batch

    def _send(self, producer: Producer, batch: list[_Pending]) -> None:
        timeout_s = self._config.api.event_timeout_s
        sent: list[_Pending] = []
        try:
            if len(producer):
                # The broker was unreachable and has not acknowledged the last batch; queue no more.
                producer.flush(timeout_s)
            for pending in batch:
                try:
                    producer.send_raw(pending.topic, pending.key, pending.value, pending.headers)
                except RecordRefused as refusal:
                    self._fail(pending, refusal)
                else:
                    sent.append(pending)
            producer.flush(timeout_s)
        except EverstateError as error:
            logger.warning("%d events are not acknowledged: %s", len(batch), error.message)
            for pending in batch:
                if not pending.done.done():
                    self._fail(pending, _unknown(pending, error))
        else:
            for pending in sent:
                pending.done.set_result(None)

    def _fail(self, pending: _Pending, error: EverstateError) -> None:
        with self._lock:
            known = self._remembered.get(pending.place)
            if known is not None and known[1] is pending.done:
                del self._remembered[pending.place]
        pending.done.set_exception(error)


def _unknown(pending: _Pending, error: EverstateError) -> Unavailable:
    entity, key = pending.place
    unsure = "Whether the event is in the log is not known."
    unknown = Unavailable(
        f"{entity} {key!r}: {error.message} {unsure}",
        advice="Send it again unchanged: with its id it counts once.",
        public=f"{entity} {key!r}: Kafka has not acknowledged it. {unsure}",
    )
    unknown.__cause__ = error
    return unknown
