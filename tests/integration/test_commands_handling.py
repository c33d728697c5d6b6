from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from commands_rig import owned, running
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pydantic import BaseModel

import command_cases as bank
from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.config import Config
from everstate.errors import (
    MissingProvenance,
    NotFound,
    Rejected,
    StateStoreFailed,
    TopicResized,
)
from everstate.log.client import admin_settings
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands import (
    Answer,
    CommandClient,
    CommandHandler,
    Outcome,
    read_parked,
    replay,
    wait_all,
)
from everstate.sources.commands.store import PartitionStore
from everstate.testing.command_checker import check_commands, read_command_log
from kit.settings import commanding
from kit.waiting import until

pytestmark = commanding(bank.ENTITY, session_timeout_s=6)


@pytest.fixture
def client(config: Config) -> Iterator[CommandClient]:
    with CommandClient(config, bank.app) as made:
        yield made


def send(client: CommandClient, key: str, command: Any, **more: Any) -> Answer:
    return client.send(bank.ENTITY, key, command, provenance=bank.TELLER, timeout_s=30, **more)


def opened(client: CommandClient, key: str) -> Answer:
    return send(client, key, bank.Open(account_id=key, owner="Eva"))


def problems(config: Config) -> list[str]:
    report = check_commands(bank.GROUP, read_command_log(config, bank.ENTITY), [])
    assert report.commands > 0
    return report.problems


def test_commands_are_accepted_rejected_or_in_conflict(
    config: Config, client: CommandClient
) -> None:
    with running(config, bank.app):
        assert opened(client, "a1").or_raise().version == 1
        split = send(client, "a1", bank.Split(amounts=[2, 3]), expected_version=1)
        assert (split.outcome, split.version) == (Outcome.ACCEPTED, 3)
        assert [(c.version, c.kind, c.type, c.data) for c in split.changes] == [
            (2, "updated", "Deposited", {"amount": 2}),
            (3, "updated", "Deposited", {"amount": 3}),
        ]
        refused = send(client, "a1", bank.Withdraw(amount=9))
        assert (refused.outcome, refused.code, refused.data) == (
            Outcome.REJECTED,
            "balance",
            {"balance": 5},
        )
        with pytest.raises(Rejected, match="not enough money"):
            refused.or_raise()
        conflict = send(client, "a1", bank.Withdraw(amount=1), expected_version=2)
        assert (conflict.outcome, conflict.expected_version, conflict.version) == (
            Outcome.CONFLICT,
            2,
            3,
        )
        assert send(client, "a1", bank.Close()).changes[0].kind == "deleted"
        assert opened(client, "a1").version == 5
        with pytest.raises(MissingProvenance):
            client.send(bank.ENTITY, "a1", bank.Close(), provenance=None)  # type: ignore[arg-type]
    assert problems(config) == []
    codec = ChangeCodec(bank.GROUP.entity_type)
    for record in read_command_log(config, bank.ENTITY).changes:
        assert codec.decode(record.value or b"").provenance == bank.TELLER


@pytest.mark.parametrize("lost", ["nothing", "memory", "disk"])
def test_the_same_command_id_is_decided_once(
    config: Config, client: CommandClient, lost: str
) -> None:
    """Peers' matrix: the same id with the right, a wrong and any expected version."""
    ids = [uuid4() for _ in range(3)]

    def rounds() -> list[Answer]:
        return [
            send(client, "a1", bank.Deposit(amount=1), command_id=ids[0], expected_version=1),
            send(client, "a1", bank.Deposit(amount=1), command_id=ids[1], expected_version=9),
            send(client, "a1", bank.Withdraw(amount=99), command_id=ids[2]),
        ]

    with running(config, bank.app):
        opened(client, "a1")
        first = rounds()
        if lost == "nothing":
            assert rounds() == first
    if lost == "disk":
        shutil.rmtree(config.commands_path / config.log.prefix)
    with running(config, bank.app):
        assert rounds() == first
        other = send(client, "a2", bank.Deposit(amount=1), command_id=ids[0])
        assert other.code == "unknown"
        assert send(client, "a1", bank.Deposit(amount=1)).version == 3
    assert problems(config) == []


def test_many_commands_are_awaited_together_and_in_coroutines(
    config: Config, client: CommandClient
) -> None:
    async def several() -> list[Answer]:
        return await asyncio.gather(
            *(
                client.send_async(
                    bank.ENTITY, f"c{n % 5}", bank.Deposit(amount=1), provenance=bank.TELLER
                )
                for n in range(50)
            )
        )

    with running(config, bank.app):
        for number in range(5):
            opened(client, f"c{number}")
        answers = asyncio.run(several())
        assert {answer.outcome for answer in answers} == {Outcome.ACCEPTED}
        futures = [
            client.submit(bank.ENTITY, f"c{n % 5}", bank.Deposit(amount=1), provenance=bank.TELLER)
            for n in range(2_000)
        ]
        found = wait_all(futures, 60)
        assert max(answer.version or 0 for answer in found) == 411
        # One thread's commands to one key are decided in their order.
        ordered = [answer.version or 0 for answer in found[::5]]
        assert ordered == sorted(ordered)
    assert problems(config) == []


def test_nobody_answers_and_the_same_id_settles_it(config: Config, client: CommandClient) -> None:
    command_id = uuid4()
    opening = bank.Open(account_id="a1", owner="Eva")
    lost = client.send(
        bank.ENTITY, "a1", opening, provenance=bank.TELLER, command_id=command_id, timeout_s=0.1
    )
    assert (lost.outcome, lost.command_id, lost.version) == (Outcome.TIMED_OUT, command_id, None)
    with running(config, bank.app):
        settled = send(client, "a1", opening, command_id=command_id)
        assert (settled.outcome, settled.version) == (Outcome.ACCEPTED, 1)
        # It may be the answer to the first copy of the command; the second one is answered, too.
        until(lambda: problems(config) == [])


def test_poison_is_parked_alone_shown_and_replayed(config: Config, client: CommandClient) -> None:
    topic = TopicNames(config.log.prefix).commands(bank.ENTITY)
    with running(config, bank.app):
        opened(client, "a1")
        audit_id = uuid4()
        stuck = send(client, "a1", bank.Audit(), command_id=audit_id)
        assert (stuck.outcome, stuck.version) == (Outcome.PARKED, 1)
        assert send(client, "a1", bank.Audit(), command_id=audit_id) == stuck
        with Producer(config) as producer:
            producer.send_raw(topic, b"a1", b"{not a command")
        assert send(client, "a1", bank.Deposit(amount=4)).or_raise().version == 2
        until(lambda: len(read_parked(config, bank.ENTITY)) == 2)
        audit, unreadable = read_parked(config, bank.ENTITY)
        assert (audit.parked_id, audit.key, audit.command) == (str(audit_id), "a1", "Audit")
        assert "ZeroDivisionError" in audit.reason
        assert (unreadable.command, unreadable.parked_id) == ("?", unreadable.place)
        with pytest.raises(NotFound, match="not parked: other"):
            replay(config, bank.ENTITY, ["other"])
        assert len(replay(config, bank.ENTITY)) == 2
        # Nothing was mended: they are parked as they were.
        until(lambda: read_parked(config, bank.ENTITY)[0].parked_at_ms > audit.parked_at_ms)
        assert {each.parked_id for each in read_parked(config, bank.ENTITY)} == {
            audit.parked_id,
            unreadable.parked_id,
        }
        bank.broken.clear()
        try:
            replay(config, bank.ENTITY, [str(audit_id)])
            until(lambda: len(read_parked(config, bank.ENTITY)) == 1)
            settled = send(client, "a1", bank.Audit(), command_id=audit_id)
        finally:
            bank.broken.add("Audit")
        assert (settled.outcome, settled.version) == (Outcome.ACCEPTED, 3)
        assert settled.changes[0].data == {"balance": 4}
        replay(config, bank.ENTITY, give_up=True)
        until(lambda: read_parked(config, bank.ENTITY) == [])


def test_a_parked_command_that_is_given_up_is_answered(
    config: Config, client: CommandClient
) -> None:
    audit_id = uuid4()
    with running(config, bank.app):
        opened(client, "a1")
        send(client, "a1", bank.Audit(), command_id=audit_id)
        replay(config, bank.ENTITY, [str(audit_id)], give_up=True)
        until(lambda: read_parked(config, bank.ENTITY) == [])
        answer = send(client, "a1", bank.Audit(), command_id=audit_id)
    assert (answer.outcome, answer.code) == (Outcome.REJECTED, "discarded")


def test_code_that_takes_long_parks_its_command_and_holds_up_no_other(config: Config) -> None:
    woken, app = threading.Event(), App("bank")
    app.entity(bank.ENTITY, key="account_id", source="commands")(bank.Account)

    def decide(account: bank.Account | None, command: Any) -> Any:
        if isinstance(command, bank.Audit):
            woken.wait(60)
        return bank.decide(account, command)

    kinds: list[type[BaseModel]] = [bank.Open, bank.Deposit, bank.Audit]
    app.commands(bank.ENTITY, decide=decide, evolve=bank.evolve, commands=kinds)
    quick = {"transaction_timeout_s": 2, "batch_wait_ms": 300}
    changed = config.model_copy(update={"commands": config.commands.model_copy(update=quick)})
    keys = [f"a{number}" for number in range(6)]
    with running(changed, app), CommandClient(changed, app) as client:
        for key in keys:
            opened(client, key)
        began = time.monotonic()
        asked = [
            client.submit(bank.ENTITY, key, command, provenance=bank.TELLER)
            for key in keys
            for command in (bank.Audit() if key == "a3" else bank.Deposit(amount=1),) * 2
        ]
        answers = wait_all(asked, 60)
        took_s = time.monotonic() - began
        after = send(client, "a3", bank.Deposit(amount=1))
        woken.set()
    told = [(each.outcome, each.version, each.reason) for each in answers]
    accepted = [(Outcome.ACCEPTED, version, None) for version in (2, 3)]
    parked = [(Outcome.PARKED, 1, "its code took longer than 0.5 s")] * 2
    assert told == [*accepted * 3, *parked, *accepted * 2]
    assert (after.outcome, after.version) == (Outcome.ACCEPTED, 2)
    assert took_s < 30
    assert [each.key for each in read_parked(config, bank.ENTITY)] == ["a3", "a3"]


def test_two_handlers_share_the_partitions_and_hand_them_over(
    config: Config, client: CommandClient
) -> None:
    """A second handler comes and goes under load: nothing is lost, doubled or reordered."""
    keys = [f"r{n}" for n in range(12)]
    futures = []

    def load(count: int) -> None:
        for key in itertools.islice(itertools.cycle(keys), count):
            futures.append(
                client.submit(bank.ENTITY, key, bank.Deposit(amount=1), provenance=bank.TELLER)
            )
            time.sleep(0.001)

    with running(config, bank.app) as first:
        for key in keys:
            opened(client, key)
        load(200)
        with running(config, bank.app, owning=1) as second:
            load(400)
            # A partition is between the two while the one that gets it reads its state.
            until(lambda: len(owned(first)) + len(owned(second)) == 3)
            assert set(owned(first)).isdisjoint(owned(second))
            assert owned(second) != []
            load(200)
        # A static member that left is given up after its session; its partitions wait for that.
        load(200)
        answers = wait_all(futures, 60)
    assert {answer.outcome for answer in answers} == {Outcome.ACCEPTED}
    assert problems(config) == []


def test_other_code_rebuilds_the_local_state_from_the_log(
    config: Config, client: CommandClient
) -> None:
    with running(config, bank.app):
        opened(client, "a1")
        send(client, "a1", bank.Deposit(amount=5))
    changed = App("bank")
    changed.entity(bank.ENTITY, key="account_id", source="commands")(bank.Account)
    changed.commands(
        bank.ENTITY,
        decide=lambda state, command: bank.decide(state, command),
        evolve=bank.evolve,
        commands=bank.GROUP.commands,
    )
    assert changed.command_groups[bank.ENTITY].fingerprint != bank.GROUP.fingerprint
    with running(config, changed):
        assert send(client, "a1", bank.Withdraw(amount=5)).version == 3
    assert problems(config) == []


def test_a_failed_snapshot_is_made_again_from_the_log(
    config: Config, client: CommandClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses a write after the commit: the answer counts, the store is caught up."""
    settle, failures = PartitionStore.settle, [1, 2]

    def fail(store: PartitionStore, *arguments: Any) -> None:
        if failures and arguments[0].command_offset >= 0:
            failures.pop()
            raise StateStoreFailed("the disk is full")
        settle(store, *arguments)

    with running(config, bank.app):
        opened(client, "a1")
        monkeypatch.setattr(PartitionStore, "settle", fail)
        assert send(client, "a1", bank.Deposit(amount=1)).version == 2
        assert send(client, "a1", bank.Deposit(amount=1)).version == 3
        assert send(client, "a1", bank.Deposit(amount=1)).version == 4
        assert failures == []
    assert problems(config) == []


def test_topics_that_grew_are_refused_before_anything_is_decided(
    config: Config, client: CommandClient
) -> None:
    """In a new partition no account is known: one that goes there could be opened again."""
    names = TopicNames(config.log.prefix)
    with running(config, bank.app) as handler, Consumer(config) as consumer:
        opened(client, "a1")
        tail = consumer.tail([names.changes(bank.ENTITY)], from_end=False)
        assert next(tail).key == b"a1"
        of_entity = [
            name(bank.ENTITY)
            for name in (names.changes, names.state, names.commands, names.replies, names.parked)
        ]
        grow(config, of_entity[:1], 5)
        with pytest.raises(TopicResized, match="has 5 partitions"):
            handler.work.check_topics()
        with pytest.raises(TopicResized, match="has 5 partitions"):
            next(tail)
        grow(config, of_entity[1:], 5)
    with pytest.raises(TopicResized, match="has 5 partitions"):
        CommandHandler(config, bank.app)
    assert read_parked(config, bank.ENTITY) == []


def grow(config: Config, topics: list[str], partitions: int) -> None:
    """Add partitions, and wait until the broker has them."""
    admin = AdminClient(admin_settings(config))
    for future in admin.create_partitions(
        [NewPartitions(topic, partitions) for topic in topics]
    ).values():
        future.result(30)
    with Topics(config) as known:
        until(lambda: all(known.partitions(topic) == partitions for topic in topics))


def test_a_group_that_was_forgotten_goes_on_where_the_answers_end(
    config: Config, client: CommandClient
) -> None:
    """The group's offsets are gone (a week of rest): nothing is decided again."""
    with running(config, bank.app):
        opened(client, "a1")
        first = send(client, "a1", bank.Deposit(amount=1))
    changed = config.model_copy(
        update={"commands": config.commands.model_copy(update={"group": "other"})}
    )
    with CommandHandler(changed, bank.app) as handler:
        until(lambda: handler.step(0.2) == 0 and len(owned(handler)) == 3)
        assert handler.records == 0
    with running(changed, bank.app):
        assert send(client, "a1", bank.Deposit(amount=1)).version == 3
    assert first.version == 2
    assert problems(config) == []
