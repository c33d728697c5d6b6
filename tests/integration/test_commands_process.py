from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from commands_rig import running

import command_cases as bank
from everstate.app import App
from everstate.changes import Change, ChangeCodec
from everstate.config import Config
from everstate.errors import LogIdentityChanged, TopicResized, Unavailable
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.retrying import within
from everstate.sources.commands import CommandClient, Effect, ProcessRunner
from everstate.testing.command_checker import check_commands, read_command_log
from everstate.testing.log_checker import read_topic
from kit.changes import change_of
from kit.settings import altered, commanding
from kit.waiting import until
from log_cases import grow

pytestmark = commanding()

SEATS = Path(__file__).parents[2] / "examples" / "seats"


@pytest.fixture
def seats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SEATS))
    seats = importlib.import_module("seats")
    yield seats
    del sys.modules["seats"]


def history(config: Config, seats: Any) -> list[Change[dict[str, Any]]]:
    codec = ChangeCodec(seats.app.entity_type("show"))
    records = read_topic(config, TopicNames(config.log.prefix).changes("show"))
    return [codec.decode(record.value or b"") for record in records]


def facts(config: Config, seats: Any) -> list[str]:
    return [each.event.type for each in history(config, seats) if each.event is not None]


def test_a_free_seat_is_offered_and_an_offer_expires(config: Config, seats: Any) -> None:
    """A process manager with a timer; forgotten by Kafka it fires nothing twice."""

    later = timedelta()

    def clock() -> datetime:
        return datetime.now(UTC) + later

    def send(command: Any) -> None:
        client.send("show", "s1", command, provenance=bank.TELLER, timeout_s=60).or_raise()

    handler = running(config, seats.app, processes=True, clock=clock)
    with handler, CommandClient(config, seats.app) as client:
        send(seats.OpenShow(show_id="s1", title="Hamlet", seats=1))
        for guest in ("eva", "tom", "ida"):
            send(seats.BookSeat(guest=guest))
        send(seats.CancelSeat(guest="eva"))
        until(lambda: facts(config, seats).count("SeatOffered") == 1)
        # Tom does not answer; Ida does.
        later += timedelta(minutes=16)
        until(lambda: facts(config, seats).count("SeatOffered") == 2)
        send(seats.AcceptOffer(guest="ida"))
        assert len(read_command_log(config, "show").commands) == 9
        # Ida's offer expires too, for nothing.
        later += timedelta(minutes=16)
        until(lambda: len(read_command_log(config, "show").commands) == 10)
    wanted = [
        "ShowOpened",
        "SeatBooked",
        "GuestQueued",
        "GuestQueued",
        "SeatFreed",
        "SeatOffered",
        "OfferExpired",
        "SeatOffered",
        "SeatBooked",
    ]
    assert facts(config, seats) == wanted
    last = history(config, seats)[-1].current
    assert last is not None
    assert (last["booked"], last["offers"], last["waiting"]) == (["ida"], [], [])
    offered = history(config, seats)[5].provenance
    assert offered.service_name == "process:waiting_list"
    assert offered.causation_id == str(history(config, seats)[4].id)
    forgotten_by_kafka(config, seats)
    assert facts(config, seats) == [*wanted, "ShowOpened"]
    group = seats.app.command_groups["show"]
    assert check_commands(group, read_command_log(config, "show"), []).problems == []


def forgotten_by_kafka(config: Config, seats: Any) -> None:
    """A process manager of the same name whose group has no offsets, and whose disk is new."""
    before = len(read_command_log(config, "show").commands)
    forgotten = altered(
        config, commands={"group": "again"}, project={"data_dir": config.project.data_dir / "new"}
    )
    later = datetime.now(UTC) + timedelta(hours=1)
    opened = seats.OpenShow(show_id="s2", title="Lear", seats=1)
    with running(config, seats.app), CommandClient(config, seats.app) as client:
        client.send("show", "s2", opened, provenance=bank.TELLER, timeout_s=60).or_raise()
    with ProcessRunner(forgotten, seats.app, "waiting_list", clock=lambda: later) as runner:
        until(lambda: runner.step(0.2) > 0)
        assert runner.records == 1
    assert len(read_command_log(config, "show").commands) == before + 1


class Greeter(NamedTuple):
    """An app whose process manager answers each change of an account with a command."""

    app: App
    changes: str
    codec: ChangeCodec


@pytest.fixture
def greeter(config: Config) -> Greeter:
    app = App("greeter")
    app.entity(bank.ENTITY, key="account_id", source="commands")(bank.Account)
    app.commands(bank.ENTITY, decide=bank.decide, evolve=bank.evolve, commands=[bank.Deposit])
    app.process("greet", on=[bank.ENTITY], react=greet)
    return Greeter(
        app,
        TopicNames(config.log.prefix).changes(bank.ENTITY),
        ChangeCodec(app.entity_type(bank.ENTITY)),
    )


def greet(change: Change[dict[str, Any]]) -> Iterator[Effect]:
    yield Effect(entity=change.entity, key=change.key, command=bank.Deposit(amount=change.version))


def account(version: int) -> Change[Any]:
    state = bank.Account(account_id="a1", owner="eva", balance=version)
    before = None if version == 1 else state
    return change_of(
        bank.ENTITY, "a1", version, state, before, who=bank.TELLER, id=UUID(int=version)
    )


def reactions(config: Config, greeter: Greeter, versions: list[int]) -> list[int]:
    """Publish these versions of an account, have them read, and return all commands so far."""
    state = TopicNames(config.log.prefix).state(bank.ENTITY)
    with ProcessRunner(config, greeter.app, "greet") as runner:
        with Producer(config) as producer:
            for version in versions:
                record = greeter.codec.encode(account(version))
                for topic in (greeter.changes, state):
                    producer.send(OutRecord(topic, *record))
        until(lambda: runner.step(0.2) >= 0 and runner.records == len(versions))
    commands = read_command_log(config, bank.ENTITY).commands
    return [json.loads(record.value or b"")["data"]["amount"] for record in commands]


def test_a_change_that_is_published_again_has_no_second_effect_however_late(
    config: Config, greeter: Greeter
) -> None:
    assert reactions(config, greeter, [1, 2]) == [1, 2]
    assert reactions(config, greeter, [2, 1, 3]) == [1, 2, 3]
    # A disk was lost: the memory is in the log.
    config = altered(config, project={"data_dir": config.project.data_dir / "other"})
    assert reactions(config, greeter, [1, 2, 3]) == [1, 2, 3]
    # The log had lost version 4 and 5, and gets them back.
    assert reactions(config, greeter, [6, 5]) == [1, 2, 3, 6, 5]
    assert reactions(config, greeter, [4, 5, 6]) == [1, 2, 3, 6, 5, 4]


def test_a_changelog_that_was_made_again_and_has_grown_past_the_position_is_refused(
    config: Config, greeter: Greeter
) -> None:
    assert reactions(config, greeter, [1]) == [1]
    with Topics(config) as topics:
        topics.delete([greeter.changes])
        within(30, Unavailable, pause_s=0.05)(lambda: topics.ensure([bank.ENTITY]))
    with pytest.raises(LogIdentityChanged, match="the stored positions belong to"):
        reactions(config, greeter, [1, 2, 3])


def test_a_changelog_that_grew_is_refused(config: Config, greeter: Greeter) -> None:
    """Timers and seen versions are in as many partitions, so a key's would be in another one."""
    assert reactions(config, greeter, [1]) == [1]
    grow(config, greeter.changes, 8)
    with pytest.raises(TopicResized, match=greeter.changes):
        reactions(config, greeter, [2])


def test_ids_of_effects_are_derived(seats: Any) -> None:
    process = seats.app.processes["waiting_list"]
    change_id = UUID(int=7)
    assert process.id_of(change_id, 1) == process.id_of(change_id, 1)
    assert process.id_of(change_id, 1) != process.id_of(change_id, 2)
    assert process.id_of(change_id, 1) != process.id_of(UUID(int=8), 1)
