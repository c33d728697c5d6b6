"""Whatever a client writes to a topic of commands: each record is answered or parked."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import pytest

import command_cases as bank
from clean_cases import CONFIG
from everstate.errors import RecordRefused, Rejected
from everstate.log.attempt import Attempt, place_of
from everstate.log.client import record_bytes_max
from everstate.sources.commands import deciding
from everstate.sources.commands import worker as module
from everstate.sources.commands.store import open_store
from everstate.sources.commands.wire import Outcome, WireCommand, decode_answer
from everstate.sources.commands.worker import CommandPartition, CommandWork
from everstate.telemetry import RateLimitedLogger

ROUNDS = 300
SEEDS = [pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20)]
SMALL = CONFIG.model_copy(
    update={"log": CONFIG.log.model_copy(update={"message_bytes_max": 65_536})}
)
_DEEP = "[" * 20_000 + "]" * 20_000
_VALUES = (
    *("null", "1", "-1", "1e400", "123456789012345678901234567890", '""', "[]", "{}", "true"),
    *(json.dumps("x" * 3_000), '"\\u0000"', '"\\ud800"', '"🙂"', '"2026-01-01T24:00:00Z"'),
    *("[" * 150 + "]" * 150, _DEEP, '{"a":' * 2_000 + "1" + "}" * 2_000, "NaN", '"', "{"),
)


def command(random: random.Random) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    """Key, value and headers of a command, of which something is often wrong."""
    kind, data = random.choice(
        (
            ("Open", '{"account_id":"a1","owner":"Eva"}'),
            ("Deposit", '{"amount":1}'),
            ("Withdraw", '{"amount":1000000}'),
            ("Split", json.dumps({"amounts": [1] * random.choice((1, 3, 6_000))})),
            ("Audit", "{}"),
        )
    )
    key = random.choice((*["a1"] * 7, "a2", "x" * 3_000, ""))
    fields = {
        "id": json.dumps(str(uuid4())),
        "entity": f'"{bank.ENTITY}"',
        "key": json.dumps(key),
        "command": f'"{kind}"',
        "data": data,
        "occurredAt": '"2026-01-01T00:00:00Z"',
        "provenance": '{"api_version":"v1","service_name":"s","identifier":"i"}',
    }
    for _ in range(random.choice((0, 0, 1, 2))):
        optional = ("expectedVersion", "ifMatch", "fingerprint", "more")
        fields[random.choice((*fields, *optional))] = random.choice(_VALUES)
    value = ("{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}").encode()
    if random.random() < 0.1:
        at = random.randrange(len(value))
        value = random.choice((value[:at], value[:at] + b"\xff" + value[at:], b""))
    names = ("replay", "discard", "client", "other")
    headers = [(random.choice(names), random.choice((b"", b"x", b"\xff"))) for _ in range(2)]
    return key.encode(), value, headers if random.random() < 0.2 else []


class Fuzz:
    """A partition of accounts, and what its handler sends."""

    def __init__(self, folder: Path) -> None:
        self.work = CommandWork(SMALL, bank.app.command_groups, folder)
        (self.topic,) = self.work.topics
        decider = self.work._deciders[bank.ENTITY]
        store = open_store(folder / "0", "fuzz", {})
        self.partition = CommandPartition(bank.ENTITY, 0, store, decider)
        self.work._partitions[self.topic, 0] = self.partition
        self.sent: list[tuple[str, bytes | None, bytes | None]] = []

    def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Any = (), *_: object
    ) -> None:
        texts = [key, value, *(text for header in headers for text in header)]
        if sum(len(text or b"") for text in texts) > record_bytes_max(SMALL):
            raise RecordRefused(topic, None, "too large")
        self.sent.append((topic, key, value))

    def message(
        self, offset: int, key: bytes, value: bytes | None, headers: list[tuple[str, bytes]]
    ) -> Any:
        """A command as Kafka's client gives it."""
        return SimpleNamespace(
            topic=lambda: self.topic,
            partition=lambda: 0,
            offset=lambda: offset,
            key=lambda: key,
            value=lambda: value,
            headers=lambda: headers,
        )

    def run(self, seed: int) -> Iterator[list[str]]:
        """The topics to which the results of each command were sent."""
        source = random.Random(seed)
        for offset in range(ROUNDS):
            key, value, headers = command(source)
            self.sent.clear()
            self.work.handle([self.message(offset, key, value, headers)], self.send, Attempt())
            self.work.settle()
            for topic, _, answer in self.sent:
                if topic.endswith(".replies.g1"):
                    decode_answer(answer or b"")
            yield [topic.split(".")[-2] for topic, _, _ in self.sent]


@pytest.fixture
def fuzz(tmp_path: Path) -> Iterator[Fuzz]:
    made = Fuzz(tmp_path)
    yield made
    made.work.shut()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))]
)
def test_every_command_is_answered_or_parked(fuzz: Fuzz, seed: int) -> None:
    found = list(fuzz.run(seed))
    assert all({"replies", "parked"} & {*topics} for topics in found)
    assert {"changes", "replies", "parked"} <= {topic for topics in found for topic in topics}


@pytest.mark.parametrize(
    ("value", "headers"),
    [
        (b"x" * 150_000, []),
        (b"x" * (record_bytes_max(SMALL) - 100), []),
        (b"x", [("replay", b"r" * 200_000)]),
        (None, [("client", b"c" * 200_000)]),
        (b"", [("client", b"c" * 200_000), ("discard", b"d" * 200_000)]),
    ],
)
def test_a_command_that_is_too_large_to_be_parked_stops_no_handler(
    fuzz: Fuzz, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    """Kafka takes it: the limit of a topic is that of compressed records."""
    fields = {
        "id": str(uuid4()),
        "entity": bank.ENTITY,
        "key": "a1",
        "command": "Nothing",
        "data": {"a": (value or b"").decode()},
        "occurredAt": "2026-01-01T00:00:00Z",
        "provenance": {"api_version": "v1", "service_name": "s", "identifier": "i"},
    }
    for sent in (value, json.dumps(fields).encode()):
        message = fuzz.message(0, b"a1", sent, headers)
        fuzz.work.handle([message], fuzz.send, Attempt())
        fuzz.work.handle([message], fuzz.send, Attempt({place_of(message): "it is too large"}))
        fuzz.work.settle()
    assert {topic.split(".")[-2] for topic, _, _ in fuzz.sent} >= {"parked", "replies"}


class Unsayable(Exception):
    """An error that fails when it is asked for its text."""

    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), Unsayable()])
@pytest.mark.parametrize("where", ["decide", "evolve", "command", "state"])
def test_whatever_the_projects_code_raises_parks_its_command_only(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch, failure: BaseException, where: str
) -> None:
    def fails(*_: object) -> None:
        raise failure

    def opening(key: str) -> Any:
        fields = {
            "id": str(uuid4()),
            "entity": bank.ENTITY,
            "key": key,
            "command": "Open",
            "data": {"account_id": key, "owner": "Eva"},
            "occurredAt": "2026-01-01T00:00:00Z",
            "provenance": {"api_version": "v1", "service_name": "s", "identifier": "i"},
        }
        return fuzz.message(0, key.encode(), json.dumps(fields).encode(), [])

    fuzz.work.handle([opening("a1")], fuzz.send, Attempt())
    fuzz.work.settle()
    fuzz.partition.cache.clear()
    with monkeypatch.context() as patched:
        if where in ("decide", "evolve"):
            changed: Any = {where: fails}
            changed = replace(bank.GROUP, **changed)
            patched.setattr(fuzz.partition.decider, "group", changed)
        elif where == "command":
            patched.setattr(deciding, "read_exactly", fails)
        else:
            patched.setattr(type(bank.GROUP.entity_type), "validate_json", fails)
        fuzz.sent.clear()
        fuzz.work.handle([opening("a1" if where == "state" else "a2")], fuzz.send, Attempt())
        fuzz.work.handle([opening("a3")], fuzz.send, Attempt())
    outcomes = [
        decode_answer(value or b"") for topic, _, value in fuzz.sent if topic.endswith("replies.g1")
    ]
    assert outcomes[0].outcome is Outcome.PARKED
    assert type(failure).__name__ in (outcomes[0].reason or "")
    assert outcomes[1].outcome is (Outcome.ACCEPTED if where == "state" else Outcome.PARKED)


def test_the_reason_of_an_unreadable_command_is_logged_in_part(
    fuzz: Fuzz, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have used up the ten lines of this minute.
    monkeypatch.setattr(module, "_unreadable", RateLimitedLogger(module.logger, logging.ERROR))
    fields = {
        "id": str(uuid4()),
        "entity": "x" * 50_000,
        "key": "a1",
        "command": "Deposit",
        "data": {"amount": 1},
        "occurredAt": "2026-01-01T00:00:00Z",
        "provenance": {"api_version": "v1", "service_name": "s", "identifier": "i"},
    }
    message = fuzz.message(0, b"a1", json.dumps(fields).encode(), [])
    fuzz.work.handle([message], fuzz.send, Attempt())
    assert [topic.split(".")[-2] for topic, _, _ in fuzz.sent] == ["parked"]
    assert "unreadable: it is to xxx" in caplog.text
    assert len(caplog.text) < 3_000


def test_a_planted_decoder_without_the_bound_is_found(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "decode_command", msgspec.json.Decoder(WireCommand).decode)
    with pytest.raises(RecursionError):
        list(fuzz.run(0))


def test_a_planted_answer_without_the_bound_is_found(fuzz: Fuzz) -> None:
    fuzz.partition.decider._message_bytes_max = 10**9
    with pytest.raises(RecordRefused):
        list(fuzz.run(0))


def test_a_planted_handler_that_lets_errors_of_the_project_pass_is_found(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    decider = fuzz.partition.decider
    monkeypatch.setattr(decider, "decide", lambda held, command, now: decider.group.decide(None, 1))
    with pytest.raises(Rejected):
        list(fuzz.run(0))
