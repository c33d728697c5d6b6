"""What stands before and behind the routes: whom a request is for, HEAD, what an answer tells."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, SecretStr

from everstate.api.application import create_api
from everstate.api.health import Health
from everstate.api.problems import handle_errors
from everstate.api.server import certificate_of
from everstate.app import App
from everstate.config import ApiConfig, Config, LogConfig, TokenConfig
from everstate.errors import ArchiveError, EverstateError, InvalidConfig, NotFound, Unavailable
from everstate.telemetry import Sparingly

TLS = Path(__file__).parents[1] / "tls"
TOKEN = "correct-horse-battery"
ADDRESS = "postgresql://clerk:***@db.internal:5432/hotel"
app = App("hotel")


@app.entity("visit", key="id", source="log")
class Visit(BaseModel):
    id: str


@app.entity("bell", key="id", source="commands")
class Bell(BaseModel):
    id: str


class Ring(BaseModel):
    pass


app.commands("bell", decide=lambda state, command: None, evolve=lambda s, f: s, commands=[Ring])


def ask(api: FastAPI, method: str, path: str, **more: object) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)  # type: ignore[arg-type]

    return asyncio.run(once())


@pytest.fixture
def local() -> FastAPI:
    return create_api(Config(), app, stores={})


@pytest.fixture
def secured() -> FastAPI:
    desk = TokenConfig(token=SecretStr(TOKEN), service="desk", identifier="clerk-7")
    return create_api(Config(api=ApiConfig(tokens={"desk": desk})), app, stores={})


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8080", "127.3.2.1", "[::1]:8080", "LOCALHOST:1"]
)
def test_a_request_for_this_machine_is_answered(local: FastAPI, host: str) -> None:
    assert ask(local, "GET", "/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.1", "", "[::1", "@"],
)
def test_a_request_for_another_host_is_refused_in_local_mode(local: FastAPI, host: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/openapi.json"), ("POST", "/v1/visit")):
        refused = ask(local, method, path, headers={"Host": host})
        assert (refused.status_code, refused.json()["title"]) == (421, "Misdirected Request")


def test_with_tokens_a_server_has_any_name(secured: FastAPI) -> None:
    assert ask(secured, "GET", "/health", headers={"Host": "api.example"}).status_code == 200


def test_head_is_get_without_the_body(local: FastAPI) -> None:
    for path in ("/health", "/", "/openapi.json"):
        got, head = ask(local, "GET", path), ask(local, "HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
        assert dict(head.headers) == dict(got.headers)
    assert ask(local, "HEAD", "/v1/nothing").status_code == 404
    assert ask(local, "HEAD", "/v1/visit").status_code == 405


def test_the_root_lists_what_there_is(local: FastAPI) -> None:
    listed = ask(local, "GET", "/").json()
    assert listed["name"] == "hotel"
    assert listed["entities"] == {
        "bell": ["POST /v1/bell/{key}/commands/Ring"],
        "visit": ["POST /v1/visit", "GET /v1/visit/{key}"],
    }
    for name in ("openapi", "health"):
        assert ask(local, "GET", listed[name]).status_code == 200


def test_an_address_that_leads_nowhere_names_what_there_is(local: FastAPI) -> None:
    unknown = ask(local, "GET", "/v1/visti/v1")
    assert (unknown.status_code, unknown.json()["type"]) == (
        404,
        "urn:everstate:error:UnknownEntity",
    )
    assert "bell, visit" in unknown.json()["detail"]
    other = ask(local, "GET", "/v1/bell/b1")
    assert (other.status_code, other.json()["title"]) == (404, "Not Found")
    assert "POST /v1/bell/{key}/commands/Ring" in other.json()["detail"]
    assert "GET /" in ask(local, "GET", "/somewhere").json()["detail"]


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (Unavailable(f"PostgreSQL at {ADDRESS}", advice="Look."), 503, "a server that is needed"),
        (Unavailable(ADDRESS, advice="Again.", public="taken by others"), 503, "taken by others"),
        (ArchiveError(f"/lake at {ADDRESS}", advice="Look."), 500, "an error of everstate's own"),
        (InvalidConfig("store.dsn", ADDRESS, "another"), 500, "an error of everstate's own"),
        (NotFound("guest 'g1' does not exist."), 404, "guest 'g1'"),
    ],
)
def test_an_answer_names_none_of_our_servers(
    error: EverstateError, status: int, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    api = FastAPI()
    handle_errors(api)

    @api.get("/")
    def fail() -> None:
        raise error

    answer = ask(api, "GET", "/")
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(detail)
    assert "db.internal" not in answer.text
    assert "Look." not in answer.text
    if status >= 500:
        assert error.message in caplog.text


def test_ready_asks_a_broker_and_names_no_address() -> None:
    log = LogConfig(bootstrap_servers="127.0.0.1:1")
    health = Health(Config(log=log), {}, None, needs_log=True)
    for _ in range(2):
        with pytest.raises(Unavailable) as away:
            health.check()
        assert away.value.public == "the log does not answer."
    health.close()
    assert Health(Config(log=log), {}, None, needs_log=False).check().status == 200


def test_a_failed_login_is_logged_without_what_was_tried(
    secured: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    """Over every kind of route, and before the body is read."""
    for path in ("/v1/visit", "/v1/bell/b1/commands/Ring"):
        wrong = {"Authorization": f"Bearer {TOKEN}x", "Content-Length": "99999999"}
        refused = ask(secured, "POST", path, headers=wrong, content=b"{}")
        assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert f"login refused: POST {path} from 127.0.0.1" in caplog.text
    assert TOKEN not in caplog.text


def test_a_log_that_others_can_fill_has_ten_lines_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr("everstate.telemetry.time.monotonic", lambda: now[0])
    said = Sparingly(logging.getLogger("everstate.api"), logging.WARNING)
    for number in range(25):
        said.log("refused %d", number)
    assert len(caplog.records) == 10
    now[0] += 61
    said.log("refused %d", 25)
    assert [record.getMessage() for record in caplog.records[10:]] == [
        "15 more lines like the next were left out",
        "refused 25",
    ]


@pytest.mark.parametrize(
    ("certificate", "key", "password"),
    [
        (None, "key.pem", None),
        ("certificate.pem", None, None),
        ("nowhere.pem", "key.pem", None),
        ("key.pem", "key.pem", None),
        ("certificate.pem", "locked_key.pem", None),
        ("certificate.pem", "locked_key.pem", "open-barley"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_anything_listens(
    certificate: str | None, key: str | None, password: str | None
) -> None:
    api = ApiConfig(
        ssl_certfile=TLS / certificate if certificate else None,
        ssl_keyfile=TLS / key if key else None,
        ssl_keyfile_password=SecretStr(password) if password else None,
    )
    with pytest.raises(InvalidConfig, match=r"api\.ssl_certfile") as refusal:
        certificate_of(api)
    assert "barley" not in str(refusal.value)


def test_a_certificate_with_a_locked_key_is_used() -> None:
    api = ApiConfig(
        ssl_certfile=TLS / "certificate.pem",
        ssl_keyfile=TLS / "locked_key.pem",
        ssl_keyfile_password=SecretStr("open-sesame"),
    )
    assert set(certificate_of(api)) == {"ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"}
