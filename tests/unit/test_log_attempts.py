"""Batches that fail: one record does not hold up the others; without servers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.config import load
from everstate.errors import RecordRefused, Unavailable
from everstate.log import attempt, loop
from everstate.log.attempt import Attempt, Incoming, TookTooLong
from everstate.log.loop import LogPartition, Membership, Send, TransactionalLoop

LIMIT_S = 0.8
"""Time-out of a transaction; a call may take a quarter of it."""


class Broker:
    """A producer without a broker: what was sent is there when it is committed."""

    def __init__(self) -> None:
        self.open: list[bytes] = []
        self.committed: list[bytes] = []
        self.trouble: list[Exception] = []

    def begin(self) -> None:
        self.open = []

    def send_raw(self, _topic: str, _key: bytes | None, value: bytes, *_: object) -> None:
        self.open.append(value)

    def send_offsets(self, offsets: Mapping[LogPartition, int], *_: object) -> None:
        assert offsets

    def commit(self, _timeout_s: float = 0) -> None:
        if self.trouble:
            raise self.trouble.pop()
        self.committed += self.open

    def abort(self, _timeout_s: float = 0) -> None:
        self.open = []


class Numbers:
    """Sends each record again, after ``code`` has been called with its number."""

    def __init__(self) -> None:
        self.code: Callable[[int], None] = lambda _: None
        self.sizes: list[int] = []
        self.settled = 0
        self.tried: list[int] = []

    def open(self, _place: LogPartition, committed: int | None, _: Callable[[], None]) -> int:
        return committed or 0

    def shut(self) -> None:
        return

    def handle(self, batch: Sequence[Incoming], send: Send, attempt: Attempt) -> None:
        self.sizes.append(len(batch))
        for message in batch:
            number = message.offset() or 0
            if reason := attempt.refused(message):
                send("out", None, f"{number} refused: {reason}".encode())
                continue
            attempt.call(message, self.code, number)
            self.tried.append(number)
            send("out", None, b"%d" % number)

    def settle(self) -> None:
        self.settled += 1

    def is_due(self) -> bool:
        return False


class Rig:
    """The loop over ten records, read again from the last commit after each failure."""

    def __init__(self, folder: Path) -> None:
        self.work, self.broker = Numbers(), Broker()
        member = Membership(group="g", instance="i", transaction_timeout_s=LIMIT_S)
        self.loop = TransactionalLoop(
            load(folder), self.work, ["in"], member, batch_records_max=10, batch_wait_s=0
        )
        self.next = 0
        self.errors: list[str] = []

    def run(self, records: int = 10) -> list[str]:
        while self.next < records:
            loop: Any = self.loop
            loop._producer = self.broker
            loop._consumer = SimpleNamespace(consumer_group_metadata=lambda: None)
            batch = [
                message(at) for at in range(self.next, min(records, self.next + loop._at_most))
            ]
            try:
                loop._transact(batch)
                self.next += len(batch)
            except Unavailable as error:
                self.errors.append(error.message)
                assert len(self.errors) < 30, self.errors
        return [value.decode() for value in self.broker.committed]


def message(offset: int) -> Any:
    return SimpleNamespace(topic=lambda: "in", partition=lambda: 0, offset=lambda: offset)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_record_on_which_the_projects_code_is_slow_is_refused_alone(rig: Rig) -> None:
    woken = threading.Event()

    def waits(number: int) -> None:
        if number == 7:
            woken.wait(60)

    rig.work.code = waits
    began = time.monotonic()
    found = rig.run()
    assert time.monotonic() - began < 10 * LIMIT_S
    assert found == [
        *"0123456",
        "7 refused: its code took longer than 0.2 s",
        *"89",
    ]
    assert any(error.startswith("in[0]@7: its code took longer than 0.2 s") for error in rig.errors)
    # The threads that were left behind end when the function returns, and change nothing.
    woken.set()
    for each in threading.enumerate():
        if each.daemon and each.name == threading.current_thread().name:
            each.join(10)
            assert not each.is_alive()
    assert 7 not in rig.work.tried
    assert len(rig.broker.committed) == 10


def test_code_that_was_slow_once_is_tried_again(rig: Rig) -> None:
    """The machine may have slept: nothing is refused for that."""
    pauses = {3: [0.5]}
    rig.work.code = lambda number: time.sleep(pauses[number].pop() if pauses.get(number) else 0)
    assert rig.run() == [*"0123456789"]
    assert len(rig.errors) == 1


def test_a_batch_that_is_slow_in_all_becomes_smaller_and_nothing_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def takes_a_while(_number: int) -> None:
        now[0] += 0.06

    # A clock of its own: a busy machine makes no call longer.
    for module in (attempt, loop):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rig.work.code = takes_a_while
    assert rig.run(20) == [str(number) for number in range(20)]
    assert rig.errors == ["a batch took longer than 0.4 s. A smaller batch is tried."]
    assert rig.work.sizes[:2] == [10, 5]
    assert max(rig.work.sizes[1:]) <= 6, "it does not grow until it fails again"


def test_code_that_works_without_end_is_ended(rig: Rig) -> None:
    ended = threading.Event()

    def works(number: int) -> None:
        try:
            while number == 2:
                pass
        finally:
            if number == 2:
                ended.set()

    rig.work.code = works
    assert rig.run(4) == ["0", "1", "2 refused: its code took longer than 0.2 s", "3"]
    assert ended.wait(10)


def test_code_that_catches_what_ends_it_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_AGAIN_S", 0.02)
    tried, ended, enough = Attempt(batch_s=0.2), threading.Event(), threading.Event()

    def catches() -> None:
        for _ in range(3):
            try:
                while not enough.is_set():
                    pass
            except BaseException:
                continue

    def works() -> None:
        try:
            tried.call(message(0), catches)
        finally:
            ended.set()

    with pytest.raises(TookTooLong):
        tried.run(works)
    try:
        assert ended.wait(10)
    finally:
        enough.set()


def test_what_follows_a_call_that_was_given_up_is_not_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call ends while it is interrupted; a work that goes on can call nothing more."""
    tried, interrupt = Attempt(batch_s=0.2), attempt._interrupt
    may_end, called, cleaned = threading.Event(), threading.Event(), threading.Event()

    def late(thread: int, error: type[BaseException] | None) -> None:
        may_end.set()
        time.sleep(0.2)
        interrupt(thread, error)

    def works() -> None:
        try:
            tried.call(message(0), may_end.wait, 60)
        finally:
            with pytest.raises(attempt._LeftBehind):
                tried.call(message(1), called.set)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
            cleaned.set()

    monkeypatch.setattr(attempt, "_interrupt", late)
    with pytest.raises(TookTooLong):
        tried.run(works)
    assert cleaned.wait(10)
    assert not called.is_set()


def test_batches_become_smaller_after_any_failure(rig: Rig) -> None:
    rig.broker.trouble = [Unavailable("the transaction was aborted") for _ in range(3)]
    assert rig.run() == [*"0123456789"]
    assert rig.work.sizes[:5] == [10, 5, 2, 1, 2]


def test_a_record_whose_results_the_log_refuses_is_found_by_halves(rig: Rig) -> None:
    send = rig.broker.send_raw

    def small(_topic: str, _key: bytes | None, value: bytes, *_: object) -> None:
        if value == b"5":
            raise RecordRefused(_topic, None, "too large")
        send(_topic, _key, value)

    rig.broker.send_raw = small  # type: ignore[method-assign]
    assert rig.run() == [*"01234", "5 refused: the log refuses it: too large", *"6789"]


def test_an_error_of_the_work_is_raised_as_it_is(rig: Rig) -> None:
    def leaves(_number: int) -> None:
        sys.exit(3)

    rig.work.code = leaves
    with pytest.raises(SystemExit):
        rig.run()
