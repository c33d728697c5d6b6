"""A cluster was lost: its archive has the changes, and nothing else of what commands own (C8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from commands_rig import running
from pydantic import BaseModel

import command_cases as bank
from everstate.app import App
from everstate.changes import Change
from everstate.cli.log import begin_log
from everstate.config import Config
from everstate.declarations.processes import ProcessStart
from everstate.errors import LogError, LogTruncated
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.archiving.selection import Selection, replay_to_topic
from everstate.sources.commands import (
    Answer,
    CommandClient,
    CommandHandler,
    Effect,
    ProcessRunner,
)
from everstate.sources.stores.postgres import EntityStore, bound
from everstate.sources.stores.postgres.database import connect
from everstate.testing.command_checker import read_command_log
from everstate.testing.log_checker import read_topic
from everstate.testing.store_contract import ORDER, StoredOrder
from hand_archive import HandArchive
from kit.waiting import until

pytestmark = pytest.mark.settings(log={"partitions": 3}, commands={"batch_wait_ms": 5})


def bonus(change: Change[dict[str, Any]]) -> Iterator[Effect]:
    """A command for each withdrawal."""
    if change.event is not None and change.event.type == "Withdrawn":
        yield Effect(entity=bank.ENTITY, key="bonus", command=bank.Deposit(amount=1))


def bank_of(start: ProcessStart = "beginning", on: str = bank.ENTITY) -> App:
    app = App("bank")
    app.entity(bank.ENTITY, key="account_id", source="commands")(bank.Account)
    app.entity(ORDER.name, key=ORDER.key)(StoredOrder)
    kinds: list[type[BaseModel]] = [bank.Open, bank.Deposit, bank.Withdraw, bank.Split]
    app.commands(bank.ENTITY, decide=bank.decide, evolve=bank.evolve, commands=kinds)
    app.process("bonus", on=[on], react=bonus, start=start)
    return app


def another_log(config: Config) -> Config:
    prefix = f"{config.log.prefix}b"
    views = config.views.model_copy(update={"schema_name": f"views_{prefix}"})
    archive = config.archive.model_copy(update={"path": f"{config.archive_path}-{prefix}"})
    log = config.log.model_copy(update={"prefix": prefix})
    return config.model_copy(update={"log": log, "views": views, "archive": archive})


def replayed(config: Config, other: Config) -> None:
    """Archive the changes, and write them again: `everstate replay --to`."""
    old, new = (TopicNames(each.log.prefix).changes(bank.ENTITY) for each in (config, other))
    with Topics(config) as topics, Offsets(config) as offsets:
        identity, ends = topics.identity(old), offsets.stable_ends([old])
    archive = HandArchive(config, bank.ENTITY, (identity.cluster_id, identity.topic_id))
    archive.begin({number: 0 for _, number in ends})
    archive.append(read_topic(config, old), {number: end for (_, number), end in ends.items()})
    replay_to_topic(config, bank.ENTITY, Selection(), new)


def send(client: CommandClient, key: str, command: Any, command_id: UUID | None = None) -> Answer:
    return client.send(
        bank.ENTITY, key, command, provenance=bank.TELLER, timeout_s=30, command_id=command_id
    )


def sent(config: Config) -> list[str]:
    """The accounts of the commands in the log, in the order of their partitions."""
    found = read_command_log(config, bank.ENTITY).commands
    return sorted(json.loads(record.value or b"")["key"] for record in found)


def topics_written(config: Config) -> set[str]:
    """The topics of a log that have records."""
    with Topics(config) as topics, Offsets(config) as offsets:
        names = {name for name in topics.existing() if name.startswith(f"{config.log.prefix}.")}
        return {name for (name, _), end in offsets.stable_ends(names).items() if end}


def publishes_to(config: Config) -> set[str]:
    """The changelogs to which the store publishes."""
    with connect(config.store_dsn, "test") as connection:
        return {each.topic for each in bound.read_bound(connection).values()}


def test_states_answers_and_positions_are_carried_or_all_is_refused(config: Config) -> None:
    app, other, asked = bank_of(), another_log(config), [uuid4() for _ in range(2)]
    with EntityStore(config, ORDER) as store:
        store.install()
    begin_log(config, app)
    with running(config, app, processes=True), CommandClient(config, app) as client:
        for key in ("a1", "bonus"):
            send(client, key, bank.Open(account_id=key, owner="Eva"))
        answers = [
            send(client, "a1", bank.Split(amounts=[100, 12]), asked[0]),
            send(client, "a1", bank.Withdraw(amount=1), asked[1]),
        ]
        until(lambda: sent(config).count("bonus") == 2)
    assert [each.version for each in answers] == [3, 4]
    replayed(config, other)
    changes = TopicNames(other.log.prefix).changes(bank.ENTITY)
    orders = [TopicNames(each.log.prefix).changes(ORDER.name) for each in (config, other)]
    # Nobody goes on from changes alone.
    with CommandHandler(other, app) as handler:
        with pytest.raises(LogTruncated, match="log begin --again"):
            until(lambda: handler.step(0.2) > 0)
    with ProcessRunner(other, app, "bonus") as runner:
        with pytest.raises(LogTruncated, match="log begin --again"):
            until(lambda: runner.step(0.2) > 0)
    with pytest.raises(LogError, match=r'react again.*start="end".*begin --again'):
        begin_log(other, app, again=True)
    assert topics_written(other) == {changes, TopicNames(other.log.prefix).parked(bank.ENTITY)}
    assert publishes_to(other) == {orders[0]}
    app = bank_of("end")
    assert begin_log(other, app, again=True) == {
        bank.ENTITY: ("its changes", changes),
        ORDER.name: tuple(
            TopicNames(each.log.prefix).changes(ORDER.name) for each in (config, other)
        ),
    }
    assert begin_log(other, app, again=True) == {}
    with running(other, app), CommandClient(other, app) as client:
        again = [
            send(client, "a1", bank.Split(amounts=[100, 12]), asked[0]),
            send(client, "a1", bank.Withdraw(amount=1), asked[1]),
        ]
        assert again == answers
        assert send(client, "a1", bank.Open(account_id="a1", owner="Tom")).code == "open"
        assert send(client, "a1", bank.Withdraw(amount=112)).data == {"balance": 111}
        assert send(client, "a1", bank.Deposit(amount=1)).version == 5
        assert send(client, "a1", bank.Withdraw(amount=112)).version == 6
    # What came before the process manager ran here is not the past.
    with running(other, app, processes=True):
        until(lambda: sent(other).count("bonus") == 1)
    assert sent(other) == ["a1"] * 6 + ["bonus"]


def test_a_process_manager_that_would_read_a_store_again_is_refused(config: Config) -> None:
    with pytest.raises(LogError, match=r"publishes them.*everstate drift repair .*begin --again"):
        begin_log(config, bank_of("end", on=ORDER.name))
