from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from commands_rig import running, until

import command_cases as bank
from everstate.changes import Change, ChangeCodec
from everstate.config import Config
from everstate.log.topics import TopicNames
from everstate.sources.commands import CommandClient, ProcessRunner, wait_all
from everstate.testing.command_checker import check_commands, read_command_log
from everstate.testing.log_checker import read_topic

SEATS = Path(__file__).parents[2] / "examples" / "seats"


@pytest.fixture
def seats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SEATS))
    seats = importlib.import_module("seats")
    yield seats
    del sys.modules["seats"]


@pytest.fixture
def config(stack: Any, topic_prefix: str) -> Config:
    return bank.of_prefix(stack.config, topic_prefix, batch_wait_ms=5)


def history(config: Config, seats: Any) -> list[Change[dict[str, Any]]]:
    codec = ChangeCodec(seats.app.entity_type("show"))
    records = read_topic(config, TopicNames(config.log.prefix).changes("show"))
    return [codec.decode(record.value or b"") for record in records]


def facts(config: Config, seats: Any) -> list[str]:
    return [each.event.type for each in history(config, seats) if each.event is not None]


def test_a_free_seat_is_offered_and_an_offer_expires(config: Config, seats: Any) -> None:
    """A process manager with a timer; replayed from the beginning it fires nothing twice."""

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
    replay_from_the_beginning(config, seats)
    assert facts(config, seats) == wanted
    group = seats.app.command_groups["show"]
    assert check_commands(group, read_command_log(config, "show"), []).problems == []


def replay_from_the_beginning(config: Config, seats: Any) -> None:
    """A process manager of the same name that has forgotten everything but its name."""
    before = len(read_command_log(config, "show").commands)
    forgetful = config.model_copy(
        update={"commands": config.commands.model_copy(update={"group": "again"})}
    )
    later = datetime.now(UTC) + timedelta(hours=1)
    with running(config, seats.app):
        with ProcessRunner(forgetful, seats.app, "waiting_list", clock=lambda: later) as runner:
            until(lambda: runner.loop.step(0.2) > 0)
        # What it sent before: two offers of a seat, two ends of an offer.
        until(lambda: len(read_command_log(config, "show").commands) == before + 4)
        with CommandClient(config, seats.app) as client:
            futures = [
                client.submit(
                    "show", f"none-{n}", seats.BookSeat(guest="x"), provenance=bank.TELLER
                )
                for n in range(30)
            ]
            wait_all(futures, 30)


def test_ids_of_effects_are_derived(seats: Any) -> None:
    process = seats.app.processes["waiting_list"]
    change_id = UUID(int=7)
    assert process.id_of(change_id, 1) == process.id_of(change_id, 1)
    assert process.id_of(change_id, 1) != process.id_of(change_id, 2)
    assert process.id_of(change_id, 1) != process.id_of(UUID(int=8), 1)
