"""Sending commands and awaiting their answers: one by one, in coroutines, or many at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from pydantic import BaseModel

from everstate.changes import Provenance, new_change_id
from everstate.changes.codec import check_provenance
from everstate.config import Config
from everstate.errors import EverstateError, InvalidChange, Unavailable
from everstate.log.producer import Producer
from everstate.log.record import Header
from everstate.log.tail import Tail
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands.answer import Answer, answer_of
from everstate.sources.commands.group import CommandGroup, TakesCommands, group_of
from everstate.sources.commands.wire import (
    CLIENT,
    Outcome,
    WireCommand,
    decode_answer,
    encode,
    provenance_text,
)

TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1
_FLUSH_S: Final = 60.0


_Name = tuple[str, str, UUID]
"""Entity type, key and command id: an id belongs to one entity."""


class CommandClient:
    """Sends commands to entities and hears their answers; safe for many threads.

    It reads the answers of all partitions and keeps its own: a client is an object for the life
    of a process, not for one command. A command whose answer did not come is sent again with the
    same ``command_id``: it is decided once within ``commands.remember_hours``.
    """

    def __init__(
        self,
        config: Config,
        app: TakesCommands,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._app = app
        self._clock = clock
        self._names = TopicNames(config.log.prefix)
        self._bytes_max = config.log.message_bytes_max
        self._id = str(new_change_id()).encode()
        self._headers: list[Header] = [(CLIENT, self._id)]
        self._waiting: dict[_Name, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: EverstateError | None = None
        # A client may be there before the first handler.
        with Topics(config) as topics:
            topics.ensure_commands(app.command_groups)
        replies = [self._names.replies(name) for name in app.command_groups]
        # From here on: an answer cannot come before its command is sent.
        self._tail = Tail(config, replies, client_id="everstate-command-client")
        self._producer = Producer(config, client_id="everstate-command-client")
        self._listener = threading.Thread(target=self._listen, name="answers", daemon=True)
        self._listener.start()

    def __enter__(self) -> CommandClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connections; who still waits is told that no answer came."""
        self._stop.set()
        self._listener.join()
        with self._lock:
            self._producer.discard()
            waiting, self._waiting = self._waiting, {}
        self._tail.close()
        for name, future in waiting.items():
            _answer(future, _timed_out(*name, 0.0))

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
        """Send a command and wait for its answer, an outcome TIMED_OUT included.

        ``expected_version`` 0: the entity must not have existed ever. The same ``command_id`` to
        the same entity is the same command, whatever it says. Raises UnknownEntity,
        InvalidCommand, MissingProvenance or InvalidChange when nothing was sent, and Unavailable
        when the log cannot be written or read.
        """
        command_id = command_id or new_change_id()
        future = self.submit(
            entity,
            key,
            command,
            provenance=provenance,
            expected_version=expected_version,
            command_id=command_id,
            occurred_at=occurred_at,
        )
        self.flush(0)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            self._forget((entity, key, command_id))
            return _timed_out(entity, key, command_id, timeout_s)

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
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """As :meth:`send`, for coroutines: the event loop goes on while the answer is awaited."""
        command_id = command_id or new_change_id()
        future = self.submit(
            entity,
            key,
            command,
            provenance=provenance,
            expected_version=expected_version,
            command_id=command_id,
            occurred_at=occurred_at,
        )
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            self._forget((entity, key, command_id))
            return _timed_out(entity, key, command_id, timeout_s)

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
        """Send a command and go on; the future gets its answer. Raises as :meth:`send` does.

        Commands of one thread to one key are decided in the order in which they were submitted.
        Cost: about 15 µs. A full queue waits.
        """
        if self._failure is not None:
            raise self._failure
        group = group_of(self._app, entity)
        command_id = command_id or new_change_id()
        value = self._encode(
            group, key, command, provenance, expected_version, command_id, occurred_at
        )
        topic = self._names.commands(entity)
        with self._lock:
            future = self._waiting.setdefault((entity, key, command_id), Future())
            self._producer.send_raw(topic, key.encode(), value, self._headers)
        return future

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Hand everything submitted to the log; with 0 it is only hurried on."""
        with self._lock:
            if timeout_s <= 0:
                self._producer.poll()
            else:
                self._producer.flush(timeout_s)

    def _encode(
        self,
        group: CommandGroup,
        key: str,
        command: BaseModel,
        provenance: Provenance,
        expected_version: int | None,
        command_id: UUID,
        occurred_at: datetime | None,
    ) -> bytes:
        name = group.check(command)
        check_provenance(group.name, key, provenance)
        if not key:
            raise InvalidChange(group.name, None, "key", "the key is empty")
        moment = occurred_at or self._clock()
        if moment.tzinfo is None:
            raise InvalidChange(group.name, key, "occurredAt", "the time has no UTC offset")
        data = command.__pydantic_serializer__.to_json(command)
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
        return value

    def _forget(self, name: _Name) -> None:
        with self._lock:
            self._waiting.pop(name, None)

    def _listen(self) -> None:
        """Hand answers to those who wait; ends when the client is closed."""
        try:
            while not self._stop.is_set():
                self._hear(self._tail.poll(_POLL_S))
        except EverstateError as error:
            self._failure = error
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                with suppress(InvalidStateError):
                    future.set_exception(error)

    def _hear(self, messages: Iterable[Any]) -> None:
        mine = self._id
        for message in messages:
            headers = message.headers() or ()
            if not any(name == CLIENT and value == mine for name, value in headers):
                continue
            try:
                wire = decode_answer(message.value() or b"")
            except msgspec.DecodeError as cause:
                raise Unavailable(f"an answer cannot be read: {cause}") from cause
            with self._lock:
                future = self._waiting.pop((wire.entity, wire.key, wire.id), None)
            if future is not None:
                _answer(future, answer_of(wire))


def _answer(future: Future[Answer], answer: Answer) -> None:
    # Cancelled: a coroutine has given up waiting.
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
