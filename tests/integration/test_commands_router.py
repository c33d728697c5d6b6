from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
from commands_rig import running
from fastapi import FastAPI, Request

import command_cases as bank
from everstate.api.application import create_api
from everstate.changes import Provenance
from everstate.config import Config
from everstate.errors import MissingProvenance
from everstate.sources.commands import CommandClient
from everstate.sources.commands.router import router
from kit.settings import commanding
from kit.verbs import verbs
from kit.waiting import until

pytestmark = commanding(bank.ENTITY)


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
        api.include_router(router(bank.app, lambda: client, caller))
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
        for tag in ('"7"', 'W/"1"', '"2", "3"'):
            conflict = post(http, "Deposit", {"amount": 1}, if_match=tag)
            assert (conflict.status_code, conflict.json()["version"]) == (412, 1), tag
        assert conflict.headers["content-type"] == "application/problem+json"
        assert conflict.json()["title"] == "PreconditionFailed"
        for tag in ('"1"', "*", '"1", "3"'):
            met = post(http, "Deposit", {"amount": 1}, if_match=tag)
            assert met.status_code == 200, tag
        assert post(http, "Deposit", {"amount": 1}, "a2", if_match="*").status_code == 412
        refused = post(http, "Withdraw", {"amount": 9})
        assert (refused.status_code, refused.json()["code"]) == (422, "balance")
        assert refused.json()["data"] == {"balance": 3}
        parked = post(http, "Audit", {})
        assert (parked.status_code, parked.json()["title"]) == (500, "CommandParked")
        for repeated in (str(uuid4()), "my own text"):
            first = post(http, "Deposit", {"amount": 1}, idempotency_key=repeated)
            again = post(http, "Deposit", {"amount": 1}, idempotency_key=repeated)
            assert first.status_code == 200
            assert again.json() == first.json()


def test_an_idempotency_key_answers_only_the_request_that_it_came_with(
    config: Config, http: Http
) -> None:
    with running(config, bank.app):
        post(http, "Open", {"account_id": "a1", "owner": "Eva"}, prefer="wait=30")
        for key in (str(uuid4()), "my own text"):
            mine = post(http, "Deposit", {"amount": 5}, idempotency_key=key)
            assert mine.status_code == 200
            others: list[tuple[str, dict[str, Any]]] = [
                ("Deposit", {"amount": 6}),
                ("Withdraw", {"amount": 5}),
            ]
            for name, body in others:
                reused = post(http, name, body, idempotency_key=key)
                assert (reused.status_code, reused.json()["title"]) == (422, "IdempotencyKeyReused")
            again = post(http, "Deposit", {"amount": 5}, idempotency_key=key, x_caller="tom")
            if key == "my own text":
                # Of another caller it is another key.
                assert again.json()["version"] == mine.json()["version"] + 1
            else:
                assert (again.status_code, "changes" in again.json()) == (422, False)


def test_what_nobody_answers_and_what_is_wrong(http: Http) -> None:
    key = str(uuid4())
    late = post(http, "Deposit", {"amount": 1}, prefer="wait=0", idempotency_key=key)
    assert (late.status_code, late.json()["commandId"]) == (504, key)
    assert late.headers["retry-after"] == "1"
    invalid = post(http, "Deposit", {"amount": 0})
    assert (invalid.status_code, invalid.json()["title"]) == (422, "InvalidCommand")
    assert "amount" in invalid.json()["detail"]
    assert post(http, "Deposit", {"amount": 1}, if_match="seven").status_code == 400
    assert post(http, "Deposit", {"amount": 1}, x_caller="").status_code == 422
    assert post(http, "Steal", {}).status_code == 404
    assert post(http, "Deposit", [1]).status_code == 422


def test_the_openapi_names_every_command(http: Http) -> None:
    paths = http.request("GET", "/openapi.json").json()["paths"]
    assert set(paths) == {f"/v1/account/{{key}}/commands/{name}" for name in bank.GROUP.by_name}
    described = paths["/v1/account/{key}/commands/Deposit"]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["amount"]["minimum"] == 1
    assert set(described["responses"]) >= {"200", "400", "412", "422", "500", "504"}


def test_the_api_of_a_project_takes_commands(config: Config) -> None:
    api = create_api(config, bank.app)
    named = {"Everstate-Service": "web", "Everstate-Identifier": "eva", "Prefer": "wait=60"}

    async def twice() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app=api)
        async with (
            api.router.lifespan_context(api),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            path, body = "/v1/account/a1/commands/Open", {"account_id": "a1", "owner": "Eva"}
            nobody = await client.post(path, json=body)
            return nobody, await client.post(path, json=body, headers=named)

    with running(config, bank.app):
        nobody, opened = asyncio.run(twice())
    assert (nobody.status_code, nobody.json()["title"]) == (422, "MissingProvenance")
    assert (opened.status_code, opened.json()["version"]) == (200, 1)
    document = api.openapi()
    assert {"CommandAnswered", "CommandProblem"} <= set(document["components"]["schemas"])


def test_the_command_line_sends_shows_and_replays(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    everstate = verbs(config, monkeypatch, "commands", app="command_cases:app")
    opening = '{"account_id":"a1","owner":"Eva"}'
    with running(config, bank.app):
        code, out, _ = everstate("send", "account", "a1", "Open", opening)
        assert (code, "accepted: Opened; account a1 is at version 1" in out) == (0, True)
        code, out, _ = everstate("send", "account", "a1", "Withdraw", '{"amount":1}', "--json")
        assert (code, orjson.loads(out)["code"]) == (5, "balance")
        assert everstate("send", "account", "a1", "Audit")[0] == 1
        assert everstate("send", "account", "a1", "Steal")[0] == 2
        code, out, _ = everstate("parked", "account", "--json")
        parked = orjson.loads(out)
        assert (code, parked[0]["command"], parked[0]["key"]) == (0, "Audit", "a1")
        assert everstate("replay", "account")[0] == 2
        assert everstate("discard", "account", parked[0]["id"])[0] == 0
        until(lambda: everstate("parked", "account", "--json")[1].strip() == "[]")
