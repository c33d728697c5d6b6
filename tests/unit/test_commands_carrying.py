"""What follows from changes that were replayed, without servers: states and answers (C8)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import pytest
from test_commands_whole import CHANGES, NAMES, STATE, Log

import command_cases as bank
from everstate.config import Config
from everstate.errors import LogError
from everstate.log.positions import Ends
from everstate.sources.commands.carrying import Carrying
from everstate.sources.commands.deciding import NOTHING, Decider
from everstate.sources.commands.wire import WireAnswer, decode_answer

REPLIES = NAMES.replies(bank.ENTITY)
Headers = Sequence[tuple[str, bytes]]


class Replayed(Log):
    """A log whose changes were replayed; it is its own reader and writer, and may die."""

    def __init__(self) -> None:
        super().__init__()
        self.records[REPLIES] = []
        self.lives: float = float("inf")
        self.wanted: dict[UUID, WireAnswer] = {}

    def stable_ends(self, topics: Iterable[str]) -> Ends:
        return {(topic, 0): self.ends[topic] for topic in topics}

    def send_raw(self, topic: str, key: bytes, value: bytes, _: Headers, number: int) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise KeyboardInterrupt
        assert number == 0
        self.add(topic, key, value)

    def flush(self) -> None:
        return

    def decide(self, key: str, commands: Sequence[Any]) -> None:
        """Write the changes of commands to one account, and keep their answers aside."""
        decider, held = Decider(bank.GROUP, message_bytes_max=1_048_576), NOTHING
        for asked in commands:
            sent = bank.sent(asked, key=key)
            decided = decider.decide(held, sent, bank.NOW)
            held = decided.held
            self.wanted[sent.id] = decode_answer(decided.answer)
            for _, value, _ in decided.changes:
                self.add(CHANGES, key.encode(), value)

    def carry(self) -> bool:
        carrying = object.__new__(Carrying)
        carrying._names, carrying._config = NAMES, Config()
        carrying._offsets = self  # type: ignore[assignment]
        return carrying._carry(self, self, bank.ENTITY, 0)  # type: ignore[arg-type]

    def check(self) -> None:
        carrying = object.__new__(Carrying)
        carrying._names, carrying._entities, carrying._new = NAMES, [bank.ENTITY], []
        carrying._offsets = self  # type: ignore[assignment]
        carrying.check(())

    @property
    def states(self) -> list[tuple[bytes | None, int]]:
        """Key and version of each record of `.state`."""
        records = self.records[STATE]
        return sorted((each.key, json.loads(each.value or b"")["version"]) for each in records)

    @property
    def answers(self) -> dict[UUID, WireAnswer]:
        found = [decode_answer(record.value or b"") for record in self.records[REPLIES]]
        return {each.id: each for each in found}


STATES = [(b"a1", 4), (b"a2", 1), (b"a3", 3)]


@pytest.fixture
def log() -> Replayed:
    made = Replayed()
    for key, more in (
        ("a1", [bank.Split(amounts=[100, 12]), bank.Withdraw(amount=1)]),
        ("a2", []),
        ("a3", [bank.Deposit(amount=7), bank.Close()]),
    ):
        made.decide(key, [bank.Open(account_id=key, owner="Eva"), *more])
    return made


def test_the_newest_states_and_all_answers_of_accepted_commands_are_written(log: Replayed) -> None:
    assert log.carry()
    assert log.states == STATES
    assert log.answers == log.wanted
    assert not log.carry()


def test_it_goes_on_wherever_it_died(log: Replayed) -> None:
    for lives in itertools.count():
        log.records[STATE], log.records[REPLIES], log.lives = [], [], lives
        try:
            log.carry()
            break
        except KeyboardInterrupt:
            log.lives = float("inf")
        assert log.carry()
        assert dict(log.states) == dict(STATES)
        assert log.answers == log.wanted
        assert not log.carry()
    assert lives == len(STATES) + len(log.wanted)


def test_of_a_version_the_first_counts_and_what_cannot_be_read_counts_not(log: Replayed) -> None:
    first = next(each.value or b"" for each in log.records[CHANGES] if each.key == b"a2")
    for again in (b"{no change", first, first.replace(b'"Eva"', b'"Tom"')):
        log.add(CHANGES, b"a2", again)
    log.carry()
    assert log.states == STATES
    assert log.answers == log.wanted
    assert not any(b"Tom" in (record.value or b"") for record in log.records[STATE])


def test_a_command_whose_last_changes_are_lost_has_no_answer(log: Replayed) -> None:
    log.decide("a4", [bank.Open(account_id="a4", owner="Eva"), bank.Split(amounts=[1, 2, 3])])
    lost = list(log.wanted)[-1]
    log.records[CHANGES].pop()
    log.carry()
    assert log.states == [*STATES, (b"a4", 3)]
    assert log.answers == {name: answer for name, answer in log.wanted.items() if name != lost}


def test_a_changelog_that_lost_its_oldest_changes_is_refused(log: Replayed) -> None:
    log.check()
    log.begin = 3
    with pytest.raises(LogError, match=r"lost its oldest changes.*new `log\.prefix`"):
        log.check()
    log.carry()
    log.check()
