from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, computed_field

import command_cases as bank
from everstate.app import App
from everstate.changes import ChangeCodec, derived_change_id
from everstate.changes.values import model_json
from everstate.declarations.commands import CommandGroup, group_of
from everstate.errors import (
    InvalidChange,
    InvalidCommand,
    InvalidEntityType,
    Rejected,
    UnknownEntity,
)
from everstate.log.record import Record
from everstate.sources.commands.deciding import NOTHING, Decided, Decider, RememberedEntity
from everstate.sources.commands.restoring import _answer_of, _state_rows
from everstate.sources.commands.store import read_state_row, state_name
from everstate.sources.commands.wire import OFFSET, Outcome, WireCommand, decode_answer, encode
from everstate.testing.behaviour import Behaviour

CODEC = ChangeCodec(bank.GROUP.entity_type)


def decide(held: RememberedEntity, asked: Any, **other: Any) -> Decided:
    sent = asked if isinstance(asked, WireCommand) else bank.sent(asked, **other)
    decider = Decider(bank.GROUP, message_bytes_max=1_048_576, ahead_hours=24)
    return decider.decide(held, sent, bank.NOW)


def test_an_accepted_command_makes_one_change_a_fact_in_one_block() -> None:
    opened = decide(NOTHING, bank.Open(account_id="a1", owner="Eva"))
    asked = bank.sent(bank.Split(amounts=[3, 4]))
    decided = decide(opened.held, asked)
    first, second = (CODEC.decode(value) for _, value, _ in decided.changes)
    assert (first.version, second.version, decided.held.version) == (2, 3, 3)
    assert first.original == json.loads(opened.held.text or b"")
    assert second.original == first.current
    assert second.current == {"account_id": "a1", "owner": "Eva", "balance": 7}
    assert [each.event and each.event.data for each in (first, second)] == [
        {"amount": 3},
        {"amount": 4},
    ]
    blocks = [each.transaction for each in (first, second)]
    assert [(b.id, b.index, b.count) for b in blocks if b] == [
        (f"command:{asked.id}", 1, 2),
        (f"command:{asked.id}", 2, 2),
    ]
    assert first.provenance == bank.TELLER
    assert first.id == derived_change_id(f"command:{bank.ENTITY}", str(asked.id), 1)
    answer = decode_answer(decided.answer)
    assert (answer.outcome, answer.version, len(answer.changes)) == (Outcome.ACCEPTED, 3, 2)


@pytest.mark.parametrize("text", [b"restored", None])
def test_a_change_is_not_recorded_before_the_newest_of_its_key(text: bytes | None) -> None:
    """A handler's clock was set back, or another handler's is ahead."""
    ahead = bank.NOW + timedelta(hours=1, microseconds=1)
    decider = Decider(bank.GROUP, message_bytes_max=1_048_576, ahead_hours=24)
    opening = bank.sent(bank.Open(account_id="a1", owner="Eva"))
    held = decider.decide(NOTHING, opening, ahead).held
    if text:
        _, value, _ = decider.decide(NOTHING, opening, ahead).changes[0]
        ((_, row),) = _state_rows(Record("state", 0, 7, 0, b"a1", value, ()))
        _, _, recorded_at = read_state_row(row)
        held = held._replace(recorded_at=recorded_at)
    for now in (bank.NOW, ahead + timedelta(seconds=1)):
        decided = decider.decide(held, bank.sent(bank.Deposit(amount=1)), now)
        assert CODEC.decode(decided.changes[0][1]).recorded_at == max(now, ahead)
        held = decided.held
    assert held.recorded_at == ahead + timedelta(seconds=1)


def test_the_same_command_is_decided_to_the_same_bytes() -> None:
    asked = bank.sent(bank.Open(account_id="a1", owner="Eva"))
    assert decide(NOTHING, asked) == decide(NOTHING, asked)


def test_a_command_whose_answer_is_too_large_without_its_data_is_parked() -> None:
    held = decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).held
    decided = decide(held, bank.Split(amounts=[1] * 15_000))
    assert (decided.changes, decided.held, decided.outcome) == ((), held, Outcome.PARKED)
    assert "without any data" in (decided.parked or "")
    assert len(decided.answer) < 1_000


def test_a_command_of_a_time_that_is_far_ahead_is_parked() -> None:
    """A record in Kafka may name any time; a request's is checked before."""
    opening = bank.Open(account_id="a1", owner="Eva")
    decided = decide(NOTHING, bank.sent(opening, occurred_at=bank.NOW + timedelta(hours=25)))
    assert (decided.changes, decided.outcome) == ((), Outcome.PARKED)
    assert "24 hours ahead" in (decided.parked or "")
    near = decide(NOTHING, bank.sent(opening, occurred_at=bank.NOW + timedelta(hours=23)))
    assert near.outcome is Outcome.ACCEPTED


def test_records_that_no_handler_wrote_stop_no_handler() -> None:
    """An unreadable answer is skipped; an unreadable state parks the commands of its entity."""
    for value, headers in ((b"{", []), (b"[" * 9_000, [(OFFSET, b"1")]), (b"{}", [(OFFSET, b"x")])):
        assert _answer_of(Record("replies", 0, 7, 0, b"a1", value, tuple(headers))) is None
    opened = decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).changes[0][1]
    far = opened.replace(b'"version":1,', b'"version":%d,' % 2**64)
    assert far != opened
    for value in (b"{", b"[" * 9_000, b'{"account_id":"a1","owner":"Eva","balance":1}', far):
        ((name, row),) = _state_rows(Record("state", 0, 7, 0, b"a1", value, ()))
        assert name == state_name(b"a1")
        with pytest.raises(InvalidChange):
            bank.GROUP.entity_type.validate_json(read_state_row(row)[1] or b"")


def test_a_rejection_changes_nothing_and_says_why() -> None:
    held = decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).held
    decided = decide(held, bank.Withdraw(amount=1))
    answer = decode_answer(decided.answer)
    assert (decided.changes, decided.held) == ((), held)
    assert (answer.outcome, answer.reason, answer.code, answer.data) == (
        Outcome.REJECTED,
        "not enough money",
        "balance",
        {"balance": 0},
    )
    returned = decode_answer(decide(held, bank.Open(account_id="a1", owner="Tom")).answer)
    assert (returned.outcome, returned.code) == (Outcome.REJECTED, "open")


@pytest.mark.parametrize(("expected", "outcome"), [(0, "accepted"), (1, "conflict")])
def test_an_expected_version_is_checked_before_anything_is_decided(
    expected: int, outcome: str
) -> None:
    asked = bank.Open(account_id="a1", owner="Eva")
    answer = decode_answer(decide(NOTHING, asked, expected_version=expected).answer)
    assert answer.outcome == outcome
    if outcome == "conflict":
        assert (answer.expected_version, answer.version) == (1, 0)


def test_C7_a_deleted_entity_goes_on_counting() -> None:
    held = decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).held
    closed = decide(held, bank.Close())
    assert CODEC.decode(closed.changes[0][1]).kind == "deleted"
    again = decide(closed.held, bank.Open(account_id="a1", owner="Eva"))
    change = CODEC.decode(again.changes[0][1])
    assert (change.kind, change.version, change.original) == ("created", 3, None)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (bank.sent(bank.Audit()), "ZeroDivisionError: the audit is broken"),
        (bank.sent(bank.Deposit(amount=1), data=msgspec.Raw(b'{"amount":0}')), "Deposit: amount:"),
        (bank.sent(bank.Deposit(amount=1), command="Steal"), "takes no 'Steal'"),
        (bank.sent(bank.Deposit(amount=1), occurred_at=datetime(2026, 1, 1)), "UTC offset"),  # noqa: DTZ001
        (bank.sent(bank.Deposit(amount=1), key="a2"), "the state of 'a1'"),
    ],
)
def test_what_cannot_be_decided_is_parked_and_changes_nothing(
    asked: WireCommand, reason: str
) -> None:
    held = decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).held
    decided = decide(held, asked)
    assert reason in (decided.parked or "")
    assert (decided.changes, decided.held) == ((), held)
    assert decode_answer(decided.answer).outcome is Outcome.PARKED


class Aliased(BaseModel):
    by: int = Field(1, alias="byHow")


class Chosen(BaseModel):
    by: int = Field(1, validation_alias=AliasChoices("byHow", "much"), serialization_alias="BY")


class Written(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    by: int = Field(1, alias="byHow")


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by: int = Field(1, alias="byHow")

    @computed_field
    def doubled(self) -> int:
        return 2 * self.by


class Holding(BaseModel):
    inner: Aliased
    many: list[Closed] = []

    @property
    def by(self) -> int:
        return self.inner.by


class Pathed(BaseModel):
    by: int = Field(1, validation_alias=AliasPath("many", 0))


class Swapped(BaseModel):
    by: int = Field(1, alias="other")
    other: int = Field(2, alias="by")


class Unread(BaseModel):
    model_config = ConfigDict(serialize_by_alias=True)
    by: int = Field(1, serialization_alias="byHow")


def _decided(asked: BaseModel, data: bytes) -> Decided:
    def decide(account: bank.Account | None, asked: Any) -> Any:
        return bank.Opened(account_id="a1", owner=str(asked.by))

    models: list[type[BaseModel]] = [
        Aliased,
        Chosen,
        Written,
        Closed,
        Holding,
        Pathed,
        Swapped,
        Unread,
    ]
    group = CommandGroup(bank.GROUP.entity_type, decide, bank.GROUP.evolve, models)
    sent = bank.sent(asked, data=msgspec.Raw(data))
    return Decider(group, message_bytes_max=1_048_576).decide(NOTHING, sent, bank.NOW)


@pytest.mark.parametrize("model", [Aliased, Chosen, Written, Closed, Holding, Pathed])
def test_a_command_with_aliases_is_decided_as_it_was_asked(model: type[BaseModel]) -> None:
    body = {
        Holding: '{"inner":{"byHow":5},"many":[{"byHow":5}]}',
        Pathed: '{"many":[5]}',
    }.get(model, '{"byHow":5}')
    asked = CommandGroup(bank.GROUP.entity_type, bank.decide, bank.evolve, [model]).read(
        model.__name__, body
    )
    for data in (model_json(asked), body.encode()):
        decided = _decided(asked, data)
        assert decided.parked is None
        assert isinstance(decided.held.state, bank.Account)
        assert decided.held.state.owner == "5"


@pytest.mark.parametrize("asked", [Swapped(by=5, other=6), Unread(by=5)])
def test_a_command_that_would_be_read_otherwise_than_it_was_written_is_parked(
    asked: BaseModel,
) -> None:
    decided = _decided(asked, model_json(asked))
    assert f"{type(asked).__name__}.by" in (decided.parked or "")


def test_facts_are_all_or_nothing() -> None:
    def evolve(account: bank.Account | None, fact: Any) -> bank.Account | None:
        if isinstance(fact, bank.Deposited) and fact.amount == 13:
            raise ValueError("unlucky")
        return bank.evolve(account, fact)

    group = CommandGroup(bank.GROUP.entity_type, bank.decide, evolve, bank.GROUP.commands)
    decider = Decider(group, message_bytes_max=1_048_576)
    held = decider.decide(
        NOTHING, bank.sent(bank.Open(account_id="a1", owner="Eva")), bank.NOW
    ).held
    decided = decider.decide(held, bank.sent(bank.Split(amounts=[1, 13])), bank.NOW)
    assert (decided.changes, decided.held) == ((), held)
    assert "unlucky" in (decided.parked or "")


def test_an_answer_too_large_for_the_log_leaves_its_data_out() -> None:
    held = decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).held
    decider = Decider(bank.GROUP, message_bytes_max=10_000)
    decided = decider.decide(held, bank.sent(bank.Split(amounts=list(range(1, 60)))), bank.NOW)
    answer = decode_answer(decided.answer)
    assert answer.version == 60
    assert all(each.data is None for each in answer.changes)


def test_a_group_knows_its_commands_and_its_code() -> None:
    assert bank.GROUP.check(bank.Deposit(amount=1)) == "Deposit"
    with pytest.raises(InvalidCommand, match="takes no command 'Opened'"):
        bank.GROUP.check(bank.Opened(account_id="a", owner="b"))
    other = CommandGroup(
        bank.GROUP.entity_type, lambda s, c: None, bank.evolve, bank.GROUP.commands
    )
    assert other.fingerprint != bank.GROUP.fingerprint
    with pytest.raises(UnknownEntity):
        group_of(bank.app.command_groups, "ship")


def test_an_entity_type_has_one_source_of_truth() -> None:
    app = App("shop")

    @app.entity("order", key="account_id")
    class Order(bank.Account):
        pass

    with pytest.raises(InvalidEntityType, match="source of truth is 'store'"):
        app.commands("order", decide=bank.decide, evolve=bank.evolve, commands=[bank.Open])
    with pytest.raises(InvalidEntityType, match="declared already"):
        bank.app.commands(bank.ENTITY, decide=bank.decide, evolve=bank.evolve, commands=[bank.Open])
    assert bank.app.source_of(bank.ENTITY) == "commands"


def test_an_answer_goes_through_the_log_unchanged() -> None:
    answer = decode_answer(decide(NOTHING, bank.Open(account_id="a1", owner="Eva")).answer)
    assert decode_answer(encode(answer)) == answer
    assert isinstance(answer.changes[0].id, UUID)


# ---- the kit


BANK = Behaviour.of(bank.GROUP)
OPEN = bank.Opened(account_id="a1", owner="Eva")


def test_the_kit_says_what_follows() -> None:
    given = BANK.given(OPEN, bank.Deposited(amount=5))
    given.when(bank.Withdraw(amount=5)).then(bank.Withdrawn(amount=5)).then_state(
        bank.Account(account_id="a1", owner="Eva", balance=0)
    )
    given.when(bank.Withdraw(amount=6)).then_rejected("not enough", code="balance")
    BANK.given().when(bank.Deposit(amount=1)).then_rejected(code="unknown")


def test_the_kit_sees_what_is_wrong() -> None:
    given = BANK.given(OPEN)
    with pytest.raises(AssertionError, match="expected"):
        given.when(bank.Deposit(amount=1)).then(bank.Deposited(amount=2))
    with pytest.raises(AssertionError, match="was rejected: not enough money"):
        given.when(bank.Withdraw(amount=1)).then(bank.Withdrawn(amount=1))
    with pytest.raises(AssertionError, match="was not rejected"):
        given.when(bank.Deposit(amount=1)).then_rejected()
    with pytest.raises(AssertionError, match="the code is"):
        given.when(bank.Withdraw(amount=1)).then_rejected(code="other")


def test_the_kit_sees_functions_that_are_not_pure() -> None:
    calls: list[int] = []

    def counting(_state: Any, _command: Any) -> Any:
        calls.append(1)
        return bank.Deposited(amount=len(calls))

    with pytest.raises(AssertionError, match="not pure"):
        Behaviour(counting, bank.evolve).given(OPEN).when(bank.Deposit(amount=1))

    def greedy(account: bank.Account, _command: Any) -> Any:
        account.balance += 1
        return Rejected("no")

    with pytest.raises(AssertionError, match="changed its state"):
        Behaviour(greedy, bank.evolve).given(OPEN).when(bank.Deposit(amount=1))


@dataclass
class Hidden:
    n: int = field(default=0, repr=False)


@dataclass(frozen=True)
class Told:
    value: int | float | bool | Decimal | datetime


def test_a_function_that_changes_its_state_where_no_text_shows_it_is_seen() -> None:
    def spoiling(state: Hidden, _: Any) -> list[Told]:
        state.n = 99
        return [Told(1.0)]

    def adding(state: Hidden | None, fact: Told) -> Hidden:
        state = state or Hidden()
        state.n += 1
        return state

    with pytest.raises(AssertionError, match="decide changed its state"):
        Behaviour(spoiling, adding).given_state(Hidden()).when("go")
    with pytest.raises(AssertionError, match="evolve changed its state"):
        Behaviour(spoiling, adding).given(Told(1.0), Told(1.0))
    fine = Behaviour(lambda *_: [Told(1.0)], adding).given_state(Hidden()).when("go")
    with pytest.raises(AssertionError, match="evolve changed its state"):
        fine.then_state(Hidden(1))


def test_true_is_not_one_among_the_facts() -> None:
    decided = Behaviour(lambda *_: [Told(True)], lambda *_: None).given().when("go")
    with pytest.raises(AssertionError, match="expected"):
        decided.then(Told(1.0))
    decided.then(Told(True))


def test_facts_that_are_equal_in_another_form_are_the_same() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    there = noon.astimezone(timezone(timedelta(hours=2)))
    for decided, expected in ((Decimal("1.0"), Decimal("1.00")), (noon, there), (1, 1.0)):
        decide = Behaviour(lambda *_, told=decided: [Told(told)], lambda *_: None)
        decide.given().when("go").then(Told(expected))
