"""The checker of commands sees what it must see: planted defects, one by one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

import command_cases as bank
from everstate.log.record import Record
from everstate.sources.commands.deciding import NOTHING, Decider, RememberedEntity
from everstate.sources.commands.wire import decode_answer, encode
from everstate.testing.command_checker import CommandLog, Sent, check_commands

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


class World:
    """A right history: commands in one partition, what follows from them, and what was heard."""

    def __init__(self) -> None:
        rng = random.Random(11)
        self.log = CommandLog([], [], [], [])
        self.history: list[Sent] = []
        self._held: dict[str, RememberedEntity] = {}
        self._answers: dict[tuple[str, UUID], bytes] = {}
        self._decider = Decider(bank.GROUP, message_bytes_max=1_048_576)
        newest: dict[str, Record] = {}
        for number in range(200):
            key = f"k{rng.randrange(8)}"
            asked: Any = bank.Open(account_id=key, owner="Eva")
            if rng.random() < 0.7:
                asked = rng.choice([bank.Deposit(amount=3), bank.Withdraw(amount=2)])
            # Each tenth command is the one before it again.
            again = number % 10 == 9
            self._step(number, key, asked, rng, newest, again)
        self.log = replace(self.log, state=list(newest.values()))

    def _step(
        self,
        number: int,
        key: str,
        asked: Any,
        rng: random.Random,
        newest: dict[str, Record],
        again: bool,
    ) -> None:
        commands, changes, replies = self.log.commands, self.log.changes, self.log.replies
        assert isinstance(commands, list)
        assert isinstance(changes, list)
        assert isinstance(replies, list)
        expected = rng.randrange(4) if rng.random() < 0.2 else None
        command = bank.sent(asked, key=key, id=UUID(int=number), expected_version=expected)
        value = commands[-1].value if again else encode(command)
        name = json.loads(value)
        key, command_id = name["key"], UUID(name["id"])
        commands.append(self._record("commands", len(commands), key, value))
        if (key, command_id) not in self._answers:
            decided = self._decider.decide(self._held.get(key, NOTHING), command, NOW)
            self._held[key] = decided.held
            self._answers[key, command_id] = decided.answer
            for _, change, _ in decided.changes:
                newest[key] = self._record("changes", len(changes), key, change)
                changes.append(newest[key])
        answer = self._answers[key, command_id]
        headers = (("command", str(len(commands) - 1).encode()),)
        record = self._record("replies", len(replies), key, answer)
        replies.append(msgspec.structs.replace(record, headers=headers))
        told = decode_answer(answer)
        self.history.append(
            Sent(
                command_id=str(command_id),
                key=key,
                sent_ns=number * 10,
                answered_ns=number * 10 + 5,
                outcome=told.outcome.value,
                version=told.version,
            )
        )

    @staticmethod
    def _record(topic: str, offset: int, key: str, value: bytes) -> Record:
        return Record(topic, 0, offset, 0, key.encode(), value, ())

    def problems(self) -> list[str]:
        return check_commands(bank.GROUP, self.log, self.history).problems


@pytest.fixture
def world() -> World:
    return World()


def changed(record: Record, **fields: Any) -> Record:
    value = json.dumps({**json.loads(record.value or b""), **fields}).encode()
    return msgspec.structs.replace(record, value=value)


def pop(records: Any, at: int) -> Record:
    found: Record = records.pop(at)
    return found


def test_a_right_world_has_no_problems(world: World) -> None:
    outcomes = {each.outcome for each in world.history}
    assert outcomes == {"accepted", "rejected", "conflict"}
    assert world.problems() == []


def test_a_lost_answer_is_seen(world: World) -> None:
    pop(world.log.replies, 50)
    assert world.problems() == ["command at 0@50 was never answered"]


def test_a_command_that_was_processed_twice_is_seen(world: World) -> None:
    world.log.replies.append(world.log.replies[50])  # type: ignore[attr-defined]
    assert world.problems() == ["command at 0@50 was answered 2 times"]


def test_another_answer_to_the_same_command_is_seen(world: World) -> None:
    again = next(n for n in range(9, 200, 10))
    other = changed(world.log.replies[again], version=77)
    world.log.replies[again] = other  # type: ignore[index]
    found = world.problems()
    assert any("answered b" in each for each in found)
    assert any("at version 77, the model says" in each for each in found)


def test_a_lost_change_is_seen(world: World) -> None:
    pop(world.log.changes, 20)
    found = world.problems()
    assert any("follows version" in each for each in found)
    assert any("changes, the model says" in each for each in found)


def test_a_lost_last_change_is_seen(world: World) -> None:
    pop(world.log.changes, -1)
    found = world.problems()
    assert any("changes, the model says" in each for each in found)
    assert any(".state is not the newest change" in each for each in found)


def test_a_doubled_change_is_seen(world: World) -> None:
    world.log.changes.append(world.log.changes[-1])  # type: ignore[attr-defined]
    assert any("is in the log 2 times" in each for each in world.problems())


def test_a_command_that_was_decided_twice_is_seen(world: World) -> None:
    """The same fact again as the next version, with an id of its own."""
    last = world.log.changes[-1]
    message = json.loads(last.value or b"")
    again = changed(
        last,
        id="another",
        version=message["version"] + 1,
        originalEntityState=message["currentEntityState"],
    )
    world.log.changes.append(again)  # type: ignore[attr-defined]
    assert any("changes, the model says" in each for each in world.problems())


def test_a_state_that_the_functions_do_not_make_is_seen(world: World) -> None:
    at = len(world.log.changes) // 2
    wrong = {"account_id": "k0", "owner": "Eva", "balance": 1_000_000}
    world.log.changes[at] = changed(world.log.changes[at], currentEntityState=wrong)  # type: ignore[index]
    assert any("currentEntityState is" in each for each in world.problems())


def test_what_a_client_was_told_and_the_log_does_not_say_is_seen(world: World) -> None:
    world.history[3] = replace(world.history[3], version=99)
    world.history.append(replace(world.history[0], command_id="never", sent_ns=1, answered_ns=2))
    found = world.problems()
    assert any("got the answer" in each and "at version 99" in each for each in found)
    assert any("the log has no such command" in each for each in found)


def test_a_command_that_overtook_one_that_was_answered_is_seen(world: World) -> None:
    key = world.history[100].key
    at = next(n for n in range(101, 200) if world.history[n].key == key and n % 10 != 9)
    # The later one in the log says that it was sent, and answered, long before.
    late = world.history[at]
    world.history[at] = replace(late, sent_ns=-20, answered_ns=-10)
    found = world.problems()
    assert any("before one that was answered before it was sent" in each for each in found)
    assert all("stands at" in each for each in found)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kind": "deleted"}, "kind is 'deleted'"),
        ({"entity": "other"}, "entity is 'other'"),
        ({"occurredAt": "2026-11-21T13:00:00.000Z"}, "occurredAt is"),
        ({"provenance": {"apiVersion": "1", "serviceName": "other"}}, "provenance is"),
        ({"event": {"type": "Deposited", "data": {"amount": 3.0}}}, "event is"),
        ({"event": {"type": "Deposited", "data": {"amount": True}}}, "event is"),
    ],
)
def test_a_change_that_says_something_else_is_seen(
    world: World, fields: dict[str, Any], what: str
) -> None:
    changes = world.log.changes
    at = next(n for n, each in enumerate(changes) if b'"Deposited"' in (each.value or b""))
    changes[at] = changed(changes[at], **fields)  # type: ignore[index]
    assert any(what in problem for problem in world.problems())


def test_a_change_under_another_key_or_in_another_partition_is_seen(world: World) -> None:
    changes = world.log.changes
    changes[7] = msgspec.structs.replace(changes[7], key=b"other")  # type: ignore[index]
    changes[9] = msgspec.structs.replace(changes[9], partition=5)  # type: ignore[index]
    found = world.problems()
    assert any("record key is 'other'" in problem for problem in found)
    assert any("changes in partition 5, others in 0" in problem for problem in found)
