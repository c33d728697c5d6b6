"""Accounts that take commands: what the tests of commands share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
from pydantic import BaseModel, Field

from everstate.app import App
from everstate.changes import Provenance
from everstate.errors import Rejected
from everstate.sources.commands.wire import WireCommand, provenance_text

ENTITY = "account"
TELLER = Provenance(api_version="v1", service_name="bank", identifier="teller-1")
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)

app = App("bank")
broken = {"Audit"}
"""Commands whose code fails; a test mends it."""


@app.entity(ENTITY, key="account_id", source="commands")
class Account(BaseModel):
    """An account."""

    account_id: str
    owner: str
    balance: int = 0


class Open(BaseModel):
    account_id: str
    owner: str


class Deposit(BaseModel):
    amount: int = Field(ge=1)


class Withdraw(BaseModel):
    amount: int = Field(ge=1)


class Split(BaseModel):
    """Several deposits at once."""

    amounts: list[int]


class Audit(BaseModel):
    """Its code has an error."""


class Close(BaseModel):
    pass


class Opened(BaseModel):
    account_id: str
    owner: str


class Deposited(BaseModel):
    amount: int


class Withdrawn(BaseModel):
    amount: int


class Audited(BaseModel):
    balance: int


class Closed(BaseModel):
    pass


def decide(account: Account | None, command: BaseModel) -> Any:
    if isinstance(command, Open):
        if account is not None:
            return Rejected("the account is open", code="open", owner=account.owner)
        return Opened(account_id=command.account_id, owner=command.owner)
    if account is None:
        raise Rejected("there is no such account", code="unknown")
    match command:
        case Deposit(amount=amount):
            return Deposited(amount=amount)
        case Split(amounts=amounts):
            return [Deposited(amount=amount) for amount in amounts]
        case Withdraw(amount=amount):
            if amount > account.balance:
                raise Rejected("not enough money", code="balance", balance=account.balance)
            return [Withdrawn(amount=amount)]
        case Audit():
            if "Audit" in broken:
                raise ZeroDivisionError("the audit is broken")
            return Audited(balance=account.balance)
        case Close():
            return Closed()
    raise AssertionError(f"a command that the group does not take: {command!r}")


def evolve(account: Account | None, fact: BaseModel) -> Account | None:
    match fact:
        case Opened(account_id=account_id, owner=owner):
            return Account(account_id=account_id, owner=owner)
        case Deposited(amount=amount):
            assert account is not None
            return account.model_copy(update={"balance": account.balance + amount})
        case Withdrawn(amount=amount):
            assert account is not None
            return account.model_copy(update={"balance": account.balance - amount})
        case Closed():
            return None
    return account


GROUP = app.commands(
    ENTITY, decide=decide, evolve=evolve, commands=[Open, Deposit, Withdraw, Split, Audit, Close]
)


def sent(asked: BaseModel, *, key: str = "a1", **other: Any) -> WireCommand:
    """A command as its client sends it; ``other``: fields with other values."""
    made: dict[str, Any] = {
        "id": uuid4(),
        "entity": ENTITY,
        "key": key,
        "command": type(asked).__name__,
        "data": msgspec.Raw(asked.model_dump_json().encode()),
        "occurred_at": NOW,
        "provenance": provenance_text(TELLER),
    }
    return WireCommand(**{**made, **other})
