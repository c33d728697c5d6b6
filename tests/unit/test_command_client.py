"""The client of commands on a log that is only played: what it does when something is wrong."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest

import command_cases as bank
from everstate.api.health import Health
from everstate.config import load
from everstate.errors import EverstateError, IdempotencyKeyReused, Unavailable
from everstate.log.record import Record
from everstate.sources.commands import client as module
from everstate.sources.commands.answer import Answer
from everstate.sources.commands.client import CommandClient
from everstate.sources.commands.wire import (
    CLIENT,
    Outcome,
    WireAnswer,
    WireCommand,
    decode_command,
    encode,
)
from served_cases import WithoutRoutes

DEPOSIT = bank.Deposit(amount=1)


class Log:
    """What is sent to it, and the answers and errors that a test has it give."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_full = False
        self.is_away = False

    def opened(self, *_: Any, **__: Any) -> Log:
        if self.is_away:
            raise Unavailable("the log is still away")
        return self

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def ensure_commands(self, names: Any) -> None:
        """The topics are there."""

    def offer(self, topic: str, key: bytes, value: bytes, headers: Any) -> bool:
        if not self.is_full:
            self.client = dict(headers)[CLIENT]
            self.sent.append(value)
        return not self.is_full

    def stable_ends(self, topics: Any) -> dict[tuple[str, int], int]:
        """Nothing is in the topics of answers."""
        return {}

    def poll(self, records_max: int = 0, timeout_s: float = 0.0) -> list[Record]:
        try:
            found = self.answers.get(timeout=timeout_s) if timeout_s else None
        except queue.Empty:
            return []
        if isinstance(found, EverstateError):
            raise found
        return [] if found is None else [self._record(found)]

    def _record(self, content: bytes) -> Record:
        return Record("replies", 0, 7, 0, b"key", content, ((CLIENT, self.client),))

    def discard(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""

    def answer(self, command: WireCommand, **more: Any) -> None:
        self.answers.put(
            encode(
                WireAnswer(
                    id=command.id,
                    entity=command.entity,
                    key=command.key,
                    outcome=Outcome.ACCEPTED,
                    version=1,
                    **more,
                )
            )
        )

    def command(self, at: int = -1) -> WireCommand:
        return decode_command(self.sent[at])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    for name in ("Topics", "Offsets", "Follower", "Producer"):
        monkeypatch.setattr(module, name, made.opened)
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    return made


@pytest.fixture
def client(log: Log) -> Iterator[CommandClient]:
    with CommandClient(load(), bank.app) as made:
        yield made


async def send(client: CommandClient, command_id: UUID, timeout_s: float) -> Answer:
    return await client.send_async(
        bank.ENTITY,
        "a1",
        DEPOSIT,
        provenance=bank.TELLER,
        command_id=command_id,
        timeout_s=timeout_s,
    )


def test_a_request_that_gives_up_does_not_end_another_one_with_its_id(
    log: Log, client: CommandClient
) -> None:
    async def both() -> tuple[Answer, Answer, bool]:
        command_id = uuid4()
        patient = asyncio.create_task(send(client, command_id, 10))
        hasty = asyncio.create_task(send(client, command_id, 0.05))
        gone = asyncio.create_task(send(client, command_id, 10))
        await asyncio.sleep(0.02)
        gone.cancel()
        late = await hasty
        log.answer(log.command())
        return late, await patient, gone.cancelled()

    late, answered, cancelled = asyncio.run(both())
    assert (late.outcome, answered.outcome) == (Outcome.TIMED_OUT, Outcome.ACCEPTED)
    assert cancelled


def test_the_answer_to_another_request_with_the_id_is_nobodys(
    log: Log, client: CommandClient
) -> None:
    async def reused() -> None:
        sent = asyncio.create_task(send(client, uuid4(), 10))
        await asyncio.sleep(0.02)
        log.answer(log.command(), fingerprint="of another request")
        await sent

    with pytest.raises(IdempotencyKeyReused):
        asyncio.run(reused())


def test_an_answer_that_cannot_be_read_is_passed_over(log: Log, client: CommandClient) -> None:
    async def answered() -> Answer:
        sent = asyncio.create_task(send(client, uuid4(), 10))
        await asyncio.sleep(0.02)
        log.answers.put(b"no answer")
        log.answer(log.command())
        return await sent

    assert asyncio.run(answered()).outcome is Outcome.ACCEPTED
    client.check()


def test_when_answers_cannot_be_read_who_waits_is_told_and_the_client_reads_them_again(
    log: Log, client: CommandClient
) -> None:
    async def broken() -> Answer:
        sent = asyncio.create_task(send(client, uuid4(), 10))
        await asyncio.sleep(0.02)
        log.is_away = True
        log.answers.put(Unavailable("the log is away"))
        with pytest.raises(Unavailable, match="the log is away"):
            await sent
        ready = Health(load(), [WithoutRoutes(("no commands.", client.check))])
        with pytest.raises(Unavailable):
            ready.check()
        log.is_away = False
        while True:
            try:
                client.check()
                break
            except Unavailable:
                await asyncio.sleep(0.01)
        sent = asyncio.create_task(send(client, uuid4(), 10))
        await asyncio.sleep(0.02)
        log.answer(log.command())
        return await sent

    assert asyncio.run(broken()).outcome is Outcome.ACCEPTED


def test_the_event_loop_goes_on_while_the_queue_is_full(log: Log, client: CommandClient) -> None:
    log.is_full = True

    async def stuck() -> tuple[Answer, float]:
        longest_s, last = 0.0, time.monotonic()
        sent = asyncio.create_task(send(client, uuid4(), 10))
        for _ in range(50):
            await asyncio.sleep(0.002)
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
        log.is_full = False
        while not log.sent:
            await asyncio.sleep(0.002)
        log.answer(log.command())
        return await sent, longest_s

    answer, longest_s = asyncio.run(stuck())
    assert answer.outcome is Outcome.ACCEPTED
    assert longest_s < 5


def test_a_full_queue_is_not_waited_for_longer_than_the_time_out(
    log: Log, client: CommandClient
) -> None:
    log.is_full = True
    assert asyncio.run(send(client, uuid4(), 0.05)).outcome is Outcome.TIMED_OUT
    assert log.sent == []


def test_a_caller_who_does_not_wait_sends_its_command_all_the_same(
    log: Log, client: CommandClient
) -> None:
    answer = asyncio.run(
        client.send_async(bank.ENTITY, "a1", DEPOSIT, provenance=bank.TELLER, timeout_s=0)
    )
    assert answer.outcome is Outcome.TIMED_OUT
    assert len(log.sent) == 1


def test_the_event_loop_does_not_wait_for_a_thread_that_sends(
    log: Log, client: CommandClient
) -> None:
    """Another thread has the lock while the answer of a request is given up."""

    async def once() -> Answer:
        sending = client.send_async(
            bank.ENTITY, "a1", DEPOSIT, provenance=bank.TELLER, timeout_s=0.01
        )
        task = asyncio.create_task(sending)
        while not log.sent:
            await asyncio.sleep(0)
        with client._lock:
            answer = await task
        while client._waiting:
            await asyncio.sleep(0.01)
        return answer

    assert asyncio.run(asyncio.wait_for(once(), 30)).outcome is Outcome.TIMED_OUT


def test_a_command_at_a_time_whose_offset_has_seconds_keeps_its_instant(
    log: Log, client: CommandClient
) -> None:
    noon = datetime(1960, 6, 1, 12, tzinfo=ZoneInfo("Africa/Monrovia"))
    with suppress(EverstateError):
        client.send(
            bank.ENTITY,
            "a1",
            DEPOSIT,
            provenance=bank.TELLER,
            occurred_at=noon,
            timeout_s=0.01,
        )
    assert log.command().occurred_at == noon
