"""Sending commands and awaiting their answers: one by one, in coroutines, or many at once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
from pydantic import BaseModel

from everstate.changes import Provenance, new_change_id
from everstate.changes.codec import check_provenance
from everstate.changes.keys import check_key
from everstate.changes.moments import check_moment, with_minutes
from everstate.closing import Closing
from everstate.config import Config
from everstate.declarations.commands import group_of
from everstate.errors import (
    EverstateError,
    IdempotencyKeyReused,
    InvalidChange,
    InvalidCommand,
    Unavailable,
)
from everstate.log.consumer import Follower
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import Header, Record
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.answer import Answer, answer_of
from everstate.sources.commands.wire import (
    CLIENT,
    Outcome,
    WireCommand,
    command_json,
    decode_answer,
    encode,
    fingerprint_of,
    provenance_text,
)
from everstate.telemetry import RateLimitedLogger
from everstate.views.project import Project

TIMEOUT_S: Final = 10.0
logger = logging.getLogger(__name__)
_unreadable: Final = RateLimitedLogger(logger, logging.ERROR)

_POLL_S: Final = 0.1
_ANSWERS_MAX: Final = 5_000
_AGAIN_S: Final = 1.0
_FULL_S: Final = 0.005
_SLICE_S: Final = 0.05
_FLUSH_S: Final = 60.0

_Name = tuple[str, str, UUID]
"""Entity type, key and command id: an id belongs to one entity."""


class _Waiter(NamedTuple):
    """A caller that waits for an answer; several may wait for one, each with its own future."""

    name: _Name
    fingerprint: str
    future: Future[Answer]


class CommandClient(Closing):
    """Sends commands to entities and receives their answers; safe for many threads.

    It reads the answers of all partitions and keeps its own: make one client for the life of a
    process, not for one command. If no answer came, send the command again with the same
    ``command_id``: it is decided once within ``commands.remember_hours``. When answers cannot be
    read, all waiting callers get an error, and the client starts to read answers again.
    """

    def __init__(
        self,
        config: Config,
        app: Project,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config, self._app = config, app
        self._clock = clock
        self._names = TopicNames(config.log.prefix)
        self._bytes_max = config.log.message_bytes_max
        self._id = str(new_change_id()).encode()
        self._headers: list[Header] = [(CLIENT, self._id)]
        self._waiting: dict[_Name, list[_Waiter]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: EverstateError | None = None
        # A client may start before the first handler.
        with Topics(config) as topics:
            topics.ensure_commands(app.command_groups)
        # Read answers from here on: no answer can come before its command is sent.
        self._answers = self._follow()
        self._producer = Producer(config, client_id="everstate-command-client")
        self._listener = threading.Thread(target=self._listen, name="answers", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Close the connections; callers that still wait get the outcome that no answer came."""
        self._stop.set()
        self._listener.join()
        with self._lock:
            self._producer.discard()
        self._answers.close()
        for each in self._taken():
            _answer(each.future, _timed_out(*each.name, 0.0))

    def check(self) -> None:
        """Raise an everstate error when commands cannot be answered now."""
        if self._failure is not None:
            raise self._failure
        if not self._listener.is_alive():
            raise Unavailable("answers to commands are not read.")

    def send(
        self,
        entity: str,
        key: str,
        command: BaseModel,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        command_id: UUID | None = None,
        occurred_at: datetime | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Send a command and wait for its answer, which may have the outcome TIMED_OUT.

        ``expected_version`` 0: the entity must never have existed. The same ``command_id`` for the
        same entity is the same command: raises IdempotencyKeyReused when it was sent before by
        another sender, or with another content or expected version; nothing is decided then.
        Raises UnknownEntity, InvalidCommand, MissingProvenance or InvalidChange when nothing was
        sent, and Unavailable when the log cannot be written or read.
        """
        waiter, message = self._prepare(
            entity, key, command, provenance, expected_version, command_id, occurred_at
        )
        try:
            self._send(waiter, message)
            self.flush(0)
            return waiter.future.result(timeout_s)
        except FutureTimeout:
            return _timed_out(*waiter.name, timeout_s)
        finally:
            self._forget(waiter)

    async def send_async(
        self,
        entity: str,
        key: str,
        command: BaseModel,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        command_id: UUID | None = None,
        occurred_at: datetime | None = None,
        if_match: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Like :meth:`send`, for coroutines: does not block the event loop, even with a full queue.

        ``if_match`` is a condition on the present entity, in the form of an If-Match header.
        """
        waiter, message = self._prepare(
            entity, key, command, provenance, expected_version, command_id, occurred_at, if_match
        )

        # It is sent also when the caller does not want to wait.
        is_sent = self._offer(waiter, message)

        async def answered() -> Answer:
            while not is_sent and not self._offer(waiter, message):
                await asyncio.sleep(_FULL_S)
            return await asyncio.wrap_future(waiter.future)

        try:
            return await asyncio.wait_for(answered(), timeout_s)
        except TimeoutError:
            return _timed_out(*waiter.name, timeout_s)
        finally:
            if not self._forget(waiter, wait=False):
                asyncio.get_running_loop().run_in_executor(None, self._forget, waiter)

    def submit(
        self,
        entity: str,
        key: str,
        command: BaseModel,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        command_id: UUID | None = None,
        occurred_at: datetime | None = None,
    ) -> Future[Answer]:
        """Send a command without waiting; the future gets its answer. Raises like :meth:`send`.

        Commands of one thread to one key are decided in the order in which they were submitted.
        Cost: about 20 µs. Waits while the queue is full.
        """
        waiter, message = self._prepare(
            entity, key, command, provenance, expected_version, command_id, occurred_at
        )
        self._send(waiter, message)
        return waiter.future

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until Kafka has acknowledged all submitted commands; with 0, do not wait."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            # In short slices, so that other threads can send meanwhile.
            with self._lock:
                if timeout_s <= 0:
                    self._producer.poll()
                    return
                try:
                    self._producer.flush(max(0.0, min(_SLICE_S, left_s)))
                    return
                except Unavailable as cause:
                    if left_s <= 0:
                        raise Unavailable(
                            f"Kafka has not acknowledged all commands within {timeout_s:g} s; they"
                            " stay queued."
                        ) from cause

    def _prepare(
        self,
        entity: str,
        key: str,
        command: BaseModel,
        provenance: Provenance,
        expected_version: int | None,
        command_id: UUID | None,
        occurred_at: datetime | None,
        if_match: str | None = None,
    ) -> tuple[_Waiter, bytes]:
        """The waiting caller, and the message to send."""
        self.check()
        group = group_of(self._app.command_groups, entity)
        name = group.check(command)
        check_provenance(group.name, key, provenance)
        check_key(group.name, key)
        moment = with_minutes(occurred_at or self._clock())
        check_moment(group.name, key, moment, self._config.log.occurred_ahead_hours)
        try:
            data = command_json(command)
        except ValueError as cause:
            raise InvalidCommand(f"{name}: {cause}") from cause
        fingerprint = fingerprint_of(provenance, name, data, expected_version, if_match)
        command_id = command_id or new_change_id()
        value = encode(
            WireCommand(
                id=command_id,
                entity=group.name,
                key=key,
                command=name,
                data=msgspec.Raw(data),
                occurred_at=moment,
                provenance=provenance_text(provenance),
                expected_version=expected_version,
                if_match=if_match,
                fingerprint=fingerprint,
            )
        )
        if len(value) > self._bytes_max:
            raise InvalidChange(
                group.name,
                key,
                "size",
                f"the command is {len(value):,} bytes; log.message_bytes_max is "
                f"{self._bytes_max:,}",
            )
        return _Waiter((entity, key, command_id), fingerprint, Future()), value

    def _send(self, waiter: _Waiter, message: bytes) -> None:
        """Queue a command; waits while the queue is full."""
        while not self._offer(waiter, message, wait=True):
            time.sleep(_FULL_S)

    def _offer(self, waiter: _Waiter, message: bytes, *, wait: bool = False) -> bool:
        """Queue a command and register its waiter; ``False``: the queue is full, or in use."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            entity, key, _ = waiter.name
            topic = self._names.commands(entity)
            if not self._producer.offer(topic, key.encode(), message, self._headers):
                return False
            self._waiting.setdefault(waiter.name, []).append(waiter)
        finally:
            self._lock.release()
        return True

    def _forget(self, waiter: _Waiter, *, wait: bool = True) -> bool:
        """Unregister a waiter; others may wait for the same answer. ``False``: it is locked."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            left = [each for each in self._waiting.pop(waiter.name, []) if each is not waiter]
            if left:
                self._waiting[waiter.name] = left
        finally:
            self._lock.release()
        return True

    def _taken(self) -> list[_Waiter]:
        """Unregister and return all waiters."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return [each for waiters in waiting.values() for each in waiters]

    def _follow(self) -> Follower:
        replies = [self._names.replies(name) for name in self._app.command_groups]
        with Offsets(self._config) as offsets:
            ends = offsets.stable_ends(replies)
        return Follower(self._config, ends, client_id="everstate-command-client")

    def _listen(self) -> None:
        """Pass answers to their waiters; ends when the client is closed."""
        while not self._stop.is_set():
            try:
                if self._failure is not None:
                    self._answers.close()
                    self._answers = self._follow()
                    self._failure = None
                self._hear(self._answers.poll(_ANSWERS_MAX, _POLL_S))
            except EverstateError as error:
                logger.warning("answers to commands cannot be read: %s", error)
                self._failure = error
                for each in self._taken():
                    with suppress(InvalidStateError):
                        each.future.set_exception(error)
                self._stop.wait(_AGAIN_S)

    def _hear(self, answers: Iterable[Record]) -> None:
        mine = self._id
        for record in answers:
            if (CLIENT, mine) not in record.headers:
                continue
            try:
                wire = decode_answer(record.value or b"")
            except (msgspec.DecodeError, UnicodeDecodeError) as cause:
                # Its waiters get the outcome that no answer came in time.
                place = (record.topic, record.partition, record.offset)
                _unreadable.log("the answer at %s[%s]@%s cannot be read: %s", *place, cause)
                continue
            with self._lock:
                waiters = self._waiting.pop((wire.entity, wire.key, wire.id), [])
            for each in waiters:
                if wire.fingerprint in (None, each.fingerprint):
                    _answer(each.future, answer_of(wire))
                else:
                    with suppress(InvalidStateError):
                        each.future.set_exception(IdempotencyKeyReused(str(wire.id)))


def _answer(future: Future[Answer], answer: Answer) -> None:
    # Cancelled: a coroutine has stopped waiting.
    with suppress(InvalidStateError):
        future.set_result(answer)


def _timed_out(entity: str, key: str, command_id: UUID, timeout_s: float) -> Answer:
    return Answer(
        outcome=Outcome.TIMED_OUT,
        command_id=command_id,
        entity=entity,
        key=key,
        timeout_s=timeout_s,
    )


def wait_all(futures: Iterable[Future[Answer]], timeout_s: float = TIMEOUT_S) -> list[Answer]:
    """Answers of many submitted commands, in their order.

    Raises Unavailable when one did not come within ``timeout_s`` of this call.
    """
    deadline = time.monotonic() + timeout_s
    found = []
    for future in futures:
        try:
            found.append(future.result(max(0.0, deadline - time.monotonic())))
        except FutureTimeout as cause:
            raise Unavailable(f"no answer within {timeout_s:g} s.") from cause
    return found
