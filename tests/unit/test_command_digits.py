"""Numbers in commands and answers keep all digits, wherever they are shown."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast
from uuid import uuid4

import httpx
import msgspec
import pytest
from fastapi import FastAPI

import command_cases as bank
from everstate.cli.commands import answer_record, parked_record
from everstate.cli.console import print_json
from everstate.sources.commands.answer import Answer, answer_of
from everstate.sources.commands.client import CommandClient
from everstate.sources.commands.parked import Parked
from everstate.sources.commands.router import router
from everstate.sources.commands.wire import (
    AnsweredChange,
    Outcome,
    WireAnswer,
    WireCommand,
    decode_answer,
    encode,
)

LONG = "12345678901234567890.12"
COMMAND = WireCommand(
    id=uuid4(),
    entity="account",
    key="a1",
    command="Deposit",
    data=msgspec.Raw(f'{{"amount": {LONG}}}'.encode()),
    occurred_at=datetime(2026, 1, 1, tzinfo=UTC),
    provenance=msgspec.Raw(b"{}"),
)


def read_answer(outcome: Outcome = Outcome.ACCEPTED) -> Answer:
    change = AnsweredChange(
        id=uuid4(), version=1, kind="event", type="Paid", data=msgspec.Raw(f"[{LONG}]".encode())
    )
    wire = WireAnswer(
        id=uuid4(), entity="account", key="a1", outcome=outcome, version=1, changes=[change]
    )
    written = encode(wire)
    return answer_of(decode_answer(written[:-1] + f',"data":{{"short":{LONG}}}}}'.encode()))


def test_a_parked_command_is_shown_with_all_digits(capsys: pytest.CaptureFixture[str]) -> None:
    parked = Parked(
        parked_id="1",
        key="a1",
        command="Deposit",
        reason="",
        place="0@1",
        parked_at_ms=0,
        value=encode(COMMAND),
    )
    assert parked.data == {"amount": Decimal(LONG)}
    print_json(parked_record(parked))
    assert f'"amount": {LONG}' in capsys.readouterr().out


def test_an_answer_is_shown_with_all_digits(capsys: pytest.CaptureFixture[str]) -> None:
    answer = read_answer()
    assert answer.changes[0].data == [Decimal(LONG)]
    assert answer.data == {"short": Decimal(LONG)}
    print_json(answer_record(answer))
    assert capsys.readouterr().out.count(LONG) == 2


def test_an_answer_that_was_read_is_written_again_with_all_digits() -> None:
    changes = read_answer().changes
    assert LONG.encode() in encode(changes)


@pytest.mark.parametrize("outcome", [Outcome.ACCEPTED, Outcome.REJECTED])
def test_an_answer_over_http_has_all_digits(outcome: Outcome) -> None:
    class Sender:
        async def send_async(self, *_: Any, **__: Any) -> Answer:
            return read_answer(outcome)

    api = FastAPI()
    client = cast(CommandClient, Sender())
    api.include_router(router(bank.app, lambda: client, lambda _request: bank.TELLER))

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            path = "/v1/account/a1/commands/Deposit"
            form = {"content-type": "application/json"}
            return await client.post(path, content=b'{"amount":1}', headers=form)

    said = asyncio.run(once())
    assert said.status_code == (200 if outcome is Outcome.ACCEPTED else 422)
    exact = json.loads(said.content, parse_float=Decimal)
    if outcome is Outcome.ACCEPTED:
        assert exact["changes"][0]["event"]["data"] == [Decimal(LONG)]
    else:
        assert exact["data"] == {"short": Decimal(LONG)}
