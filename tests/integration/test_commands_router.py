from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
from commands_rig import running
from fastapi import FastAPI, Request

import command_cases as bank
from everstate.changes import Provenance
from everstate.config import Config
from everstate.errors import MissingProvenance
from everstate.log.topics import Topics
from everstate.sources.commands import CommandClient
from everstate.sources.commands.router import router


@pytest.fixture
def config(stack: Any, topic_prefix: str) -> Config:
    made = bank.of_prefix(stack.config, topic_prefix, batch_wait_ms=5)
    with Topics(made) as topics:
        topics.ensure_commands([bank.ENTITY])
    return made


def caller(request: Request) -> Provenance:
    if "x-caller" not in request.headers:
        raise MissingProvenance(bank.ENTITY, None, "x-caller")
    return Provenance(api_version="v1", service_name="web", identifier=request.headers["x-caller"])


class Http:
    """Requests to an application in this process."""

    def __init__(self, api: FastAPI) -> None:
        self._api = api

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._api)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.request(method, path, **more)

        return asyncio.run(once())


@pytest.fixture
def http(config: Config) -> Iterator[Http]:
    with CommandClient(config, bank.app) as client:
        api = FastAPI()
        api.include_router(router(bank.app, client, caller))
        yield Http(api)


def post(http: Http, name: str, body: Any, key: str = "a1", **headers: str) -> Any:
    named = {each.replace("_", "-"): value for each, value in headers.items()}
    named = {"x-caller": "eva", **named}
    return http.request("POST", f"/v1/account/{key}/commands/{name}", json=body, headers=named)


def test_commands_over_rest(config: Config, http: Http) -> None:
    with running(config, bank.app):
        opened = post(http, "Open", {"account_id": "a1", "owner": "Eva"}, prefer="wait=30")
        assert (opened.status_code, opened.headers["etag"]) == (200, '"1"')
        body = opened.json()
        assert (body["outcome"], body["version"], body["changes"][0]["event"]["type"]) == (
            "accepted",
            1,
            "Opened",
        )
        conflict = post(http, "Deposit", {"amount": 1}, if_match='"7"')
        assert conflict.status_code == 409
        assert conflict.headers["content-type"] == "application/problem+json"
        assert (conflict.json()["expectedVersion"], conflict.json()["version"]) == (7, 1)
        refused = post(http, "Withdraw", {"amount": 1})
        assert (refused.status_code, refused.json()["code"]) == (422, "balance")
        assert refused.json()["data"] == {"balance": 0}
        parked = post(http, "Audit", {})
        assert (parked.status_code, parked.json()["title"]) == (500, "CommandParked")
        for repeated in (str(uuid4()), "my own text"):
            first = post(http, "Deposit", {"amount": 1}, idempotency_key=repeated)
            again = post(http, "Deposit", {"amount": 1}, idempotency_key=repeated)
            assert first.status_code == 200
            assert again.json() == first.json()


def test_what_nobody_answers_and_what_is_wrong(http: Http) -> None:
    key = str(uuid4())
    late = post(http, "Deposit", {"amount": 1}, prefer="wait=0", idempotency_key=key)
    assert (late.status_code, late.json()["commandId"]) == (504, key)
    assert late.headers["retry-after"] == "1"
    invalid = post(http, "Deposit", {"amount": 0})
    assert (invalid.status_code, invalid.json()["title"]) == (422, "InvalidCommand")
    assert "amount" in invalid.json()["detail"]
    assert post(http, "Deposit", {"amount": 1}, if_match="seven").status_code == 422
    assert post(http, "Deposit", {"amount": 1}, x_caller="").status_code == 422
    assert post(http, "Steal", {}).status_code == 404
    assert post(http, "Deposit", [1]).status_code == 422


def test_the_openapi_names_every_command(http: Http) -> None:
    paths = http.request("GET", "/openapi.json").json()["paths"]
    assert set(paths) == {f"/v1/account/{{key}}/commands/{name}" for name in bank.GROUP.by_name}
    described = paths["/v1/account/{key}/commands/Deposit"]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["amount"]["minimum"] == 1
    assert set(described["responses"]) >= {"200", "409", "422", "500", "504"}


def test_the_command_line_sends_shows_and_replays(config: Config, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": config.bootstrap_servers,
        "EVERSTATE_STORE_DSN": config.store_dsn,
        "EVERSTATE_LOG_PREFIX": config.log.prefix,
        "PYTHONPATH": str(Path(bank.__file__).parent),
    }

    def everstate(*words: str) -> tuple[int, str, str]:
        verb = [sys.executable, "-m", "everstate.cli", "commands", *words]
        argv = [*verb, "--app", "command_cases:app"]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, check=False)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    opening = '{"account_id":"a1","owner":"Eva"}'
    with running(config, bank.app):
        code, out, _ = everstate("send", "account", "a1", "Open", opening)
        assert (code, out) == (0, "accepted: Opened; account a1 is at version 1\n")
        code, out, err = everstate("send", "account", "a1", "Withdraw", '{"amount":1}', "--json")
        assert (code, orjson.loads(out)["code"]) == (5, "balance")
        assert "not enough money" in err
        code, _, err = everstate("send", "account", "a1", "Audit")
        assert (code, "is parked" in err) == (1, True)
        code, out, _ = everstate("parked", "account", "--json")
        parked = orjson.loads(out)
        assert (parked[0]["command"], parked[0]["key"]) == ("Audit", "a1")
        code, _, err = everstate("discard", "account", "--all")
        assert (code, err) == (0, "1 commands given up\n")
