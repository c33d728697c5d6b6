"""What stands before and behind the routes: whom a request is for, HEAD, what an answer tells."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, MutableMapping
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from callers import caller_entry
from everstate.api.application import create_api
from everstate.api.headers import secure_headers
from everstate.api.health import Health
from everstate.api.only_admitted import OnlyAdmitted
from everstate.api.problems import handle_errors
from everstate.api.server import _listen, certificate_of, check_reach
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.config import Config, LogConfig
from everstate.errors import (
    ArchiveError,
    EverstateError,
    InvalidConfig,
    NotFound,
    TooManyRequests,
    Unavailable,
)
from everstate.http.limits import Limits
from everstate.telemetry import RateLimitedLogger
from kit.models import declare_bell, declare_visit
from served_cases import WithoutRoutes

TLS = Path(__file__).parents[1] / "tls"
TOKEN = "correct-horse-battery"
ADDRESS = "postgresql://clerk:***@db.internal:5432/hotel"
app = App("hotel")
declare_visit(app)
declare_bell(app)


def ask(api: FastAPI, method: str, path: str, **more: object) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)  # type: ignore[arg-type]

    return asyncio.run(once())


def test_a_parameter_that_a_read_of_the_past_does_not_have_is_refused(local: FastAPI) -> None:
    refused = ask(local, "GET", "/v1/visit/v1?version=1&vresion=2")
    assert refused.status_code == 400
    assert refused.json()["advice"] == "There are: at, recorded_at, version."


TYPES = ("bell", "visit")


def test_a_header_that_is_no_text_is_told_as_such(local: FastAPI) -> None:
    refused = ask(local, "GET", "/v1/visit/v1", headers={"Everstate-Service": " "})
    assert (refused.status_code, refused.json()["title"]) == (400, "Invalid request")


@pytest.fixture
def local() -> FastAPI:
    return create_api(Config(), app)


@pytest.fixture
def secured() -> FastAPI:
    desk = caller_entry(TOKEN)
    return create_api(Config(api=ApiConfig(tokens={"desk": desk})), app)


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
    below = ("/history", "/diff", "/explain", "/explain/{field}", "/provenance")
    reading = {
        name: [
            f"GET /stream/v1/{name}",
            *(f"GET /feed/v1/{name}{path}" for path in ("", "/{feed}", "/{feed}/{page}")),
            f"POST /query/v1/{name}/keys",
            *(f"GET /query/v1/{name}{path}" for path in ("", "/deleted", "/changes")),
            *(f"GET /v1/{name}/{{key}}{path}" for path in below),
        ]
        for name in TYPES
    }
    assert {name: set(paths) for name, paths in listed["entities"].items()} == {
        "bell": {
            "POST /v1/bell/{key}/commands/Ring",
            "GET /v1/bell/{key}",
            *reading["bell"],
        },
        "visit": {"POST /v1/visit", "GET /v1/visit/{key}", *reading["visit"]},
    }
    for name in ("openapi", "health"):
        assert ask(local, "GET", listed[name]).status_code == 200


def test_an_address_that_leads_nowhere_names_what_there_is(local: FastAPI) -> None:
    unknown = ask(local, "GET", "/v1/visti/v1")
    assert (unknown.status_code, unknown.json()["type"]) == (
        404,
        "urn:everstate:error:UnknownEntity",
    )
    assert "visit, bell" in unknown.json()["detail"]
    other = ask(local, "POST", "/v1/bell")
    assert (other.status_code, other.json()["title"]) == (404, "Not Found")
    assert "POST /v1/bell/{key}/commands/Ring" in other.json()["detail"]
    assert "GET /" in ask(local, "GET", "/somewhere").json()["detail"]


def test_an_answer_does_not_repeat_all_of_a_long_request(local: FastAPI) -> None:
    answer = ask(local, "GET", "/query/v1/bell", params={"limit": "a" * 30_000 + "z"})
    assert answer.status_code == 400
    assert len(answer.content) < 3_000
    assert "characters …" in answer.json()["detail"]
    assert answer.json()["detail"].startswith("limit is 'aaa")


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (Unavailable(f"PostgreSQL at {ADDRESS}", advice="Look."), 503, "a server that is needed"),
        (Unavailable(ADDRESS, advice="Again.", public="taken by others"), 503, "taken by others"),
        (ArchiveError(f"/lake at {ADDRESS}", advice="Look."), 500, "everstate failed"),
        (InvalidConfig("store.dsn", ADDRESS, "another"), 500, "everstate failed"),
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
    health = Health(Config(log=log), [WithoutRoutes(needs_log=True)])
    for _ in range(2):
        with pytest.raises(Unavailable) as away:
            health.check()
        assert away.value.public == "the log does not answer."
    health.close()
    assert Health(Config(log=log), [WithoutRoutes()]).check().status == 200


def test_a_failed_login_is_logged_without_what_was_tried(
    secured: FastAPI, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over every kind of route, and before the body is read."""
    # Other tests of this process may have used up the ten lines of this minute.
    fresh = RateLimitedLogger(logging.getLogger("everstate.api"), logging.WARNING)
    monkeypatch.setattr("everstate.api.problems._refused", fresh)
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
    said = RateLimitedLogger(logging.getLogger("everstate.api"), logging.WARNING)
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


def test_an_answer_of_a_route_that_did_not_check_its_caller_is_not_sent(
    secured: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    def forgets() -> dict[str, str]:
        return {"secret": TOKEN}

    async def streams() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield TOKEN
            yield TOKEN

        return StreamingResponse(parts())

    def finds_nothing() -> None:
        raise NotFound("guest 'eva' does not exist.")

    for path, route in (("/a", forgets), ("/b", streams), ("/c", finds_nothing)):
        secured.add_api_route(path, route)
        answer = ask(secured, "GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 500
        assert TOKEN not in answer.text
        assert "eva" not in answer.text
        assert f"{path} has not checked its caller" in caplog.text
    assert ask(secured, "GET", "/health").status_code == 200
    assert ask(secured, "GET", "/nowhere").status_code == 404
    assert ask(secured, "PUT", "/a").status_code == 405


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_caller_has_a_burst_and_then_its_share_of_requests() -> None:
    clock = Clock()
    limits = Limits(2, 3, clock)
    for _ in range(3):
        limits.take("desk")
    with pytest.raises(TooManyRequests) as refused:
        limits.take("desk")
    assert refused.value.wait_s == 0.5
    limits.take("web")
    clock.now += 0.5
    limits.take("desk")
    with pytest.raises(TooManyRequests):
        limits.take("desk")
    clock.now += 3_600
    for _ in range(3):
        limits.take("desk")
    with pytest.raises(TooManyRequests):
        limits.take("desk")
    for _ in range(1_000):
        Limits(None, 1, clock).take("desk")


def limited(**api: object) -> FastAPI:
    given = {"tokens": {"desk": caller_entry(TOKEN), "web": caller_entry(f"{TOKEN}2")}, **api}
    return create_api(Config(api=ApiConfig.model_validate(given)), app)


def test_a_request_over_the_limit_says_when_to_come_back() -> None:
    api = limited(requests_per_s=0.1, requests_burst=2)
    answers = [
        ask(api, "GET", "/console", headers={"Authorization": f"Bearer {token}"})
        for token in (TOKEN, TOKEN, TOKEN, f"{TOKEN}2", f"{TOKEN}3")
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200, 401]
    assert 1 <= int(answers[2].headers["Retry-After"]) <= 10
    by_api = ask(api, "GET", "/v1/visit/v1", headers={"Authorization": f"Bearer {TOKEN}"})
    assert by_api.json()["type"] == "urn:everstate:error:TooManyRequests"
    assert 1 <= int(by_api.headers["Retry-After"]) <= 10


@pytest.mark.parametrize("place", ["log", "file"])
def test_reads_are_noted_without_tokens_and_values(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "reads.jsonl"
    caplog.set_level(logging.INFO, "everstate.audit")
    api = limited(audit_reads="log" if place == "log" else file)
    known = {"Authorization": f"Bearer {TOKEN}"}
    ask(api, "GET", "/health")
    ask(api, "GET", "/v1/visit/v%2F1/history?before=x", headers=known)
    ask(api, "POST", "/v1/visit", headers=known, content=b"no JSON")
    ask(api, "GET", "/query/v1/bell?where=id=hidden", headers={"Authorization": "Bearer wrong"})
    told = [each.getMessage() for each in caplog.records if each.name == "everstate.audit"]
    lines = told if place == "log" else file.read_text("utf-8").splitlines()
    text = "\n".join(lines)
    first, second = (json.loads(line) for line in lines)
    assert datetime.fromisoformat(first.pop("at")).tzinfo is not None
    assert first == {
        "caller": "desk",
        "method": "GET",
        "route": "/v1/visit/{key}/history",
        "entities": ["visit"],
        "key": "v/1",
        "status": 400,
    }
    assert (second["caller"], second["status"]) == (None, 401)
    assert TOKEN not in text
    assert "hidden" not in text
    if place == "file":
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_read_that_cannot_be_noted_is_refused(tmp_path: Path) -> None:
    api = limited(audit_reads=tmp_path / "nowhere" / "reads.jsonl")
    refused = ask(api, "GET", "/console", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert "cannot record this one" in refused.json()["detail"]
    assert ask(api, "GET", "/health").status_code == 200


def test_every_answer_has_the_headers_that_keep_browsers_safe(
    secured: FastAPI, local: FastAPI
) -> None:
    async def fails(request: Request) -> None:
        raise ValueError("a mistake")

    secured.add_api_route("/fails", fails)
    known = {"Authorization": f"Bearer {TOKEN}"}
    for path in ("/", "/health", "/nowhere", "/v1/visit/v1", "/console", "/fails"):
        for headers in ({}, known):
            answer = ask(secured, "GET", path, headers=headers)
            assert answer.headers["X-Content-Type-Options"] == "nosniff", path
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["Referrer-Policy"] in ("no-referrer", "same-origin")
            assert "Strict-Transport-Security" not in answer.headers
    read = ask(secured, "GET", "/v1/visit/v1/history?before=x", headers=known)
    assert read.headers["Cache-Control"] == "private, no-cache"
    assert "Authorization" in read.headers["Vary"]
    assert "Cache-Control" not in ask(local, "GET", "/v1/visit/v1/history?before=x").headers
    assert "no-store" in ask(secured, "GET", "/console", headers=known).headers["Cache-Control"]


def test_over_tls_browsers_are_told_to_come_back_by_tls_only() -> None:
    assert secure_headers("https")["Strict-Transport-Security"].startswith("max-age=")
    assert "Strict-Transport-Security" not in secure_headers("http")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "api.example"])
def test_without_tokens_a_server_is_for_this_machine_only(host: str) -> None:
    with pytest.raises(InvalidConfig, match=r"api\.host"):
        check_reach(Config(api=ApiConfig(host=host)))
    check_reach(Config(api=ApiConfig(host=host, tokens={"desk": caller_entry(TOKEN)})))
    for own in ("127.0.0.1", "localhost", "::1"):
        check_reach(Config(api=ApiConfig(host=own)))


def test_a_websocket_of_a_route_that_did_not_check_its_caller_is_not_opened() -> None:
    sent: list[MutableMapping[str, object]] = []

    async def forgets(scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint"] = forgets
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": TOKEN})

    async def receive() -> MutableMapping[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, object]) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/a", "headers": [], "scheme": "ws"}
    asyncio.run(OnlyAdmitted(forgets)(scope, receive, send))
    assert [message["type"] for message in sent] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert sent[0]["status"] == 500


def test_an_answer_is_sent_at_once_and_not_when_its_beginning_was_noted() -> None:
    """Without it each request on an open connection takes 40 ms (Nagle, delayed ACK)."""
    with _listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
