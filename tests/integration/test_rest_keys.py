"""Every key that is taken can be named by every route; one that no address can name is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, RootModel
from rest_cases import DESK, MERGE, client, configured

from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes.keys import KEY_BYTES_MAX
from everstate.config import Config
from everstate.http.asgi import Desk
from everstate.http.callers import Callers
from everstate.http.openapi import Schemas
from everstate.sources.crud.event_router import event_router
from everstate.sources.crud.events import EventLog
from kit.models import declare_bell

ODD = (
    *(
        "a\nb",
        "a\n",
        "\n",
        "\r\n",
        " ",
        "a\tb",
        "a/b",
        "a/",
        "/a",
        "//",
        "a/../b",
        "../a",
        "...",
        ".a",
    ),
    *("%2F", "%", "a?b#c", "é✓", "a;b=c", "a&b", "x/commands/Ring", '"', "*", "\x1b[2J", "\u2028"),
    *("🛫", "é" * (KEY_BYTES_MAX // 2)),
)
STEPS = (".", "..")
NEVER = ("a\x00b", "x" * 2_500, *STEPS)

app = App("odd")


@app.entity("thing", key="id")
class Thing(BaseModel):
    id: str
    size: int = 0


@app.entity("seen", key="id", source="log")
class Seen(BaseModel):
    id: str


declare_bell(app)


@pytest.fixture
def api(stack: Any, database: str, topic_prefix: str) -> Iterator[httpx.Client]:
    with client(configured(stack.config, database, topic_prefix), app) as made:
        yield made


def place(entity: str, key: str, rest: str = "") -> str:
    return f"/v1/{entity}/{quote(key, safe='')}{rest}"


def escaped(key: str) -> str:
    """Every byte escaped: what a client sends so that no step of a path is taken out."""
    return "".join(f"%{byte:02X}" for byte in key.encode())


def test_an_entity_of_any_key_is_written_read_changed_and_deleted(api: httpx.Client) -> None:
    for key in ODD:
        made = api.post("/v1/thing", json={"id": key}, headers=DESK)
        assert (made.status_code, made.headers["Location"]) == (201, place("thing", key)), key
    for key in ODD:
        assert api.get(place("thing", key)).json() == {"id": key, "size": 0}, key
        put = api.put(place("thing", key), json={"id": key, "size": 1}, headers=DESK)
        assert put.headers["ETag"] == '"2"', key
        patched = api.patch(place("thing", key), content='{"size": 2}', headers=MERGE)
        assert patched.json() == {"id": key, "size": 2}, key
        assert api.delete(place("thing", key), headers=DESK).status_code == 204, key
    assert api.get("/v1/thing").json()["items"] == []


def test_a_command_to_any_key_reaches_its_entity(api: httpx.Client) -> None:
    """Nobody decides here: the answer is that none came, and it names the key."""
    for key in ODD:
        late = api.post(
            place("bell", key, "/commands/Ring"), json={}, headers={**DESK, "Prefer": "wait=0"}
        )
        assert late.status_code == 504, key
        assert f"bell {key!r}:" in late.json()["detail"], key


def test_an_event_of_any_key_is_taken_and_asked_for(api: httpx.Client) -> None:
    for key in ODD:
        assert api.post("/v1/seen", json={"id": key}, headers=DESK).status_code == 201, key
    asked: list[str] = []

    def find(entity: str, key: str, wait_for: str | None) -> bytes:
        asked.append(key)
        return b"{}"

    async def past(_request: object, _entity: str, _key: str) -> None:
        return None

    desk = Desk(Callers(ApiConfig()), body_bytes_max=1, threads=1)
    entity_type = app.entity_type("seen")
    log, schemas = EventLog(Config(), [entity_type]), Schemas([entity_type])
    routes = event_router("p", entity_type, log, desk, schemas, find, past)
    reading = FastAPI()
    reading.include_router(routes)

    async def ask() -> None:
        transport = httpx.ASGITransport(app=reading)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as reader:
            for key in ODD:
                assert (await reader.get(place("seen", key))).status_code == 200

    asyncio.run(ask())
    assert asked == list(ODD)


def test_a_key_that_no_address_can_name_is_refused_by_every_way_in(api: httpx.Client) -> None:
    for key in NEVER:
        entity = RootModel({"id": key}).model_dump_json()
        sent = {**DESK, "Content-Type": "application/json"}
        refused = [
            api.post("/v1/thing", content=entity, headers=sent),
            api.post("/v1/seen", content=entity, headers=sent),
        ]
        # Some clients leave the steps in; they learn the same.
        raw = httpx.URL(f"{api.base_url}").copy_with(
            raw_path=f"/v1/bell/{escaped(key)}/commands/Ring".encode()
        )
        refused.append(api.post(raw, json={}, headers=DESK))
        for answer in refused:
            assert answer.status_code == 422, (key, answer.text)
            assert re.search(r"NUL|part of a URL|2,500 bytes", answer.text)


def test_a_version_of_five_thousand_digits_is_a_condition_that_never_holds(
    api: httpx.Client,
) -> None:
    for number in ("1" * 5_000, "9" * 19):
        headers = {**DESK, "If-Match": f'"{number}"', "Prefer": f"wait={'0' * 5_000}"}
        answer = api.post("/v1/bell/b1/commands/Ring", json={}, headers=headers)
        # It is as well formed as any other: only a handler, which does not run here, knows more.
        assert answer.status_code == 504, answer.text
