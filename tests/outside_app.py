"""A project with every way in that others reach; one of three defects can be planted into it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import command_cases as bank
from everstate.app import App
from everstate.changes import Change, DomainEvent
from everstate.changes.accepting import accept
from everstate.declarations.captures import Table
from everstate.declarations.processes import Effect
from everstate.sources.commands.wire import decode_command

PLANT = "OUTSIDE_PLANT"
PLANTS = ("relay", "commands", "serve")
"""Where the defects are: one for each role that answers to somebody outside."""
VISITORS = "visitors"
"""The account that has a deposit for each visit."""

app = App("outside")


@app.entity("order", key="order_id")
class Order(BaseModel):
    order_id: str
    note: str = ""
    amount: int | None = None
    price: float | None = None
    lines: list[dict[str, str]] = []


@app.entity("visit", key="visit_id", source="log")
class Visit(BaseModel):
    visit_id: str
    page: str = ""


@app.entity("item", key="id", source="capture")
class Item(BaseModel):
    id: str
    name: str


app.entity(bank.ENTITY, key="account_id", source="commands")(bank.Account)
app.commands(
    bank.ENTITY,
    decide=bank.decide,
    evolve=bank.evolve,
    commands=[bank.Open, bank.Deposit, bank.Withdraw, bank.Split, bank.Audit],
)
app.capture(
    "shop",
    kind="postgresql",
    tables={"public.item": Table(entity="item", key_columns=("id",))},
    transactions=False,
)
app.view("orders_by_amount", sql="SELECT amount, count(*) AS orders FROM order GROUP BY amount")


def count(change: Change[dict[str, Any]]) -> Iterator[Effect]:
    """One deposit for each visit."""
    yield Effect(entity=bank.ENTITY, key=VISITORS, command=bank.Deposit(amount=1))


app.process("counter", on=["visit"], react=count)


def accept_text(model: Any, body: bytes, **options: Any) -> Any:
    """A body is accepted, unless it is no text."""
    if b"\xff" in body:
        raise RuntimeError("planted")
    return accept(model, body, **options)


def decode_text(value: bytes) -> Any:
    """A command is read, unless it is no text."""
    if b"\xff" in value:
        raise RuntimeError("planted")
    return decode_command(value)


def event_without_data(text: str) -> Any:
    """An event is read, unless it has data."""
    if json.loads(text).get("data") is not None:
        raise RuntimeError("planted")
    return DomainEvent(type=json.loads(text)["type"])


_DEFECTS = {
    "relay": ("everstate.sources.outbox.compose._event", event_without_data),
    "commands": ("everstate.sources.commands.worker.decode_command", decode_text),
    "serve": ("everstate.sources.crud.bodies.accept", accept_text),
}
if where := os.environ.get(PLANT):
    # For as long as the process lives.
    pytest.MonkeyPatch().setattr(*_DEFECTS[where])
