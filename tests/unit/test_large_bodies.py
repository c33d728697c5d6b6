"""Bodies as large as they may be: read beside the event loop, and refused in few words."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from pydantic import AfterValidator, BaseModel, Field

from everstate.api.application import create_api
from everstate.app import App
from everstate.changes import EntityType
from everstate.config import load
from everstate.declarations.commands import CommandGroup
from everstate.errors import EverstateError, InvalidBody
from everstate.sources.crud.bodies import check_key, read_entity
from everstate.sources.crud.events import EventLog
from everstate.sources.stores.postgres import EntityStore

read_by: set[int] = set()
"""Threads that validated a note."""
encoded_by: set[int] = set()
"""Threads that made a message of an event."""


def seen(note: str) -> str:
    read_by.add(threading.get_ident())
    return note


app = App("large")


class Noted(BaseModel):
    id: str
    note: Annotated[str, AfterValidator(seen)] = ""


@app.entity("stored", key="id")
class Stored(Noted): ...


@app.entity("happened", key="id", source="log")
class Happened(Noted): ...


@app.entity("decided", key="id", source="commands")
class Decided(Noted): ...


app.commands("decided", decide=lambda state, command: None, evolve=lambda s, f: s, commands=[Noted])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/stored"),
        ("PUT", "/v1/stored/a"),
        ("POST", "/v1/happened"),
        ("POST", "/v1/decided/a/commands/Noted"),
    ],
)
def test_a_large_body_is_validated_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """Its servers are away; what was validated is known before one is asked."""
    append = EventLog.append

    def noted(*arguments: Any, **more: Any) -> Any:
        encoded_by.add(threading.get_ident())
        return append(*arguments, **more)

    monkeypatch.setattr(EventLog, "append", noted)
    monkeypatch.setattr(EntityStore, "install", lambda *_: None)
    config = load(tmp_path, store={"dsn": "postgresql://u@127.0.0.1:1/x"})
    api = create_api(config, app)
    body = json.dumps({"id": "a", "note": "x" * 500_000})
    headers = {
        "content-type": "application/json",
        "everstate-service": "desk",
        "everstate-identifier": "clerk",
    }

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=body, headers=headers)

    read_by.clear()
    encoded_by.clear()
    assert asyncio.run(once()).status_code == 503
    assert read_by
    assert bool(encoded_by) == (path == "/v1/happened")
    assert threading.get_ident() not in read_by | encoded_by


def wrong(given: str) -> str:
    raise ValueError(f"{given!r} is wrong")


class Place(BaseModel):
    text: str


class Typed(BaseModel):
    id: str
    at: datetime | None = None
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)] | None = None
    weight: float | None = None
    count: int | None = None
    checked: Annotated[str, AfterValidator(wrong)] | None = None
    places: dict[str, Place] = {}


class Ask(Typed):
    more: Any = None


TYPED = EntityType("typed", Typed, "id")
GROUP = CommandGroup(TYPED, lambda state, command: None, lambda state, fact: state, [Ask])
LARGE = "7" * 1_048_576


@pytest.mark.parametrize(
    "given",
    [
        f'"at":"{LARGE}"',
        f'"at":"2026-01-02T03:04:05.{LARGE}"',
        f'"at":{LARGE}',
        f'"amount":"_{LARGE}"',
        f'"amount":"{LARGE}e"',
        f'"weight":{LARGE}.5',
        f'"weight":1e{LARGE}',
        f'"weight":0.{LARGE}',
        f'"count":{LARGE}',
        f'"count":"{LARGE}"',
        f'"checked":"{LARGE}"',
        f'"places":{{"{LARGE}":{{"text":1}}}}',
        f'"places":{{"{LARGE}":{{"{LARGE}":"a"}}}}',
        f'"more":0.{LARGE}',
        f'"{LARGE}":1',
        f'"{LARGE}',
        f'"more":{{{LARGE}:1}}',
        '"id":' + "[" * 1_048_576,
        f'"more":[{",".join(["0.12345678901234567890123"] * 40_000)}]',
    ],
    ids=lambda given: given.replace(LARGE, "…")[:40],
)
def test_a_refusal_has_few_words_however_large_the_value_is(given: str) -> None:
    body = f'{{"id":"a",{given}}}'.encode()
    for read in (partial(read_entity, TYPED), partial(GROUP.read, "Ask")):
        with pytest.raises(EverstateError) as refused:
            read(body)
        assert len(str(refused.value)) < 30_000, read


def test_a_key_that_differs_from_the_path_is_shown_in_part() -> None:
    with pytest.raises(InvalidBody, match="the path says 'a'") as refused:
        check_key(TYPED, "a", Typed(id=LARGE))
    assert len(str(refused.value)) < 200
