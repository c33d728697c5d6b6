"""The routes of commands with a sender that only notes what it is to send."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime, timedelta, timezone
from typing import Any, cast
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI

import command_cases as bank
from everstate.errors import Unavailable
from everstate.sources.commands.answer import Answer
from everstate.sources.commands.client import TIMEOUT_S, CommandClient
from everstate.sources.commands.router import router
from everstate.sources.commands.wire import Outcome
from everstate.telemetry import RateLimitedLogger

JSON = {"content-type": "application/json"}


class Sender:
    """Accepts every command."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_away = False

    async def send_async(self, entity: str, key: str, command: Any, **more: Any) -> Answer:
        if self.is_away:
            raise Unavailable("Kafka is away")
        self.sent.append({"key": key, "command": command, **more})
        return Answer(
            outcome=Outcome.ACCEPTED, command_id=uuid4(), entity=entity, key=key, version=1
        )


@pytest.fixture
def sender() -> Sender:
    return Sender()


def post(sender: Sender, name: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    api = FastAPI()
    api.include_router(
        router(bank.app, lambda: cast(CommandClient, sender), lambda _request: bank.TELLER)
    )

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            path = f"/v1/account/a1/commands/{name}"
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(once())


def test_a_command_has_the_time_of_its_header(sender: Sender) -> None:
    said = {**JSON, "Everstate-Occurred-At": "2026-01-01T10:00:00+01:00"}
    assert post(sender, "Deposit", b'{"amount":1}', said).status_code == 200
    at = datetime(2026, 1, 1, 10, tzinfo=timezone(timedelta(hours=1)))
    assert sender.sent[0]["occurred_at"] == at
    assert post(sender, "Deposit", b'{"amount":1}', JSON).status_code == 200
    assert sender.sent[1]["occurred_at"] is None
    said = {**JSON, "Everstate-Occurred-At": "yesterday"}
    assert post(sender, "Deposit", b'{"amount":1}', said).status_code == 400


@pytest.mark.parametrize(
    ("prefer", "waited_s"),
    [
        ("wait=0", 0.0),
        ("respond-async, wait=5", 5.0),
        ("wait=999999", 60.0),
        ("wait=-1", TIMEOUT_S),
    ],
)
def test_a_client_says_how_long_it_waits(sender: Sender, prefer: str, waited_s: float) -> None:
    assert post(sender, "Deposit", b'{"amount":1}', {**JSON, "Prefer": prefer}).status_code == 200
    assert sender.sent[0]["timeout_s"] == waited_s


@pytest.mark.parametrize("form", ["text/plain", "application/xml", "application/json; charset=x"])
def test_a_body_that_is_not_declared_as_json_is_refused(sender: Sender, form: str) -> None:
    answer = post(sender, "Deposit", b'{"amount":1}', {"content-type": form})
    assert (answer.status_code, sender.sent) == (415, [])


def test_a_misspelt_field_of_a_command_is_refused_and_named(sender: Sender) -> None:
    answer = post(sender, "Deposit", b'{"amount":1,"amuont":2}', JSON)
    assert (answer.status_code, sender.sent) == (422, [])
    assert "amuont: there is no field of this name" in answer.json()["detail"]


def test_a_large_body_with_very_many_faults_is_answered_briefly(sender: Sender) -> None:
    body = json.dumps({"amounts": ["x"] * 100_001}).encode()
    answer = post(sender, "Split", body, JSON)
    assert (answer.status_code, sender.sent) == (422, [])
    assert "100,001 values are wrong" in answer.json()["detail"]


def test_an_error_of_the_server_leaves_a_line_in_the_log(
    sender: Sender, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The lines of a minute are counted for the whole process, and other tests have used them up.
    fresh = RateLimitedLogger(logging.getLogger("everstate.api"), logging.WARNING)
    monkeypatch.setattr("everstate.sources.commands.router._failed", fresh)
    sender.is_away = True
    with caplog.at_level(logging.WARNING, "everstate.api"):
        assert post(sender, "Deposit", b'{"amount":1}', JSON).status_code == 503
    assert "Kafka is away" in caplog.text
    assert sender.sent == []
