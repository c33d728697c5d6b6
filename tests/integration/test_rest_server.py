"""The server as a process has it: OpenAPI under fuzzing, its address, its stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel, field_validator
from rest_cases import DESK, EVA, HOTEL, client, configured, hotel

import command_cases as bank
from everstate.api.server import serve
from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidConfig
from everstate.loopback import is_loopback
from kit.serving import serving
from kit.settings import altered
from tiers import TIER

pytestmark = pytest.mark.settings(api={"port": 0})

TLS = Path(__file__).parents[1] / "tls"
_SETTINGS = """
[generation]
allow-x00 = false

[checks.positive_data_acceptance]
# A condition may not hold; a body may name another key than the path, a patch may not fit.
expected-statuses = ["2xx", "3xx", "404", "409", "410", "412", "422"]

[[operations]]
# `where` and `order` are languages, and no schema tells what has a meaning in them.
include-path-regex = "^/query/v1/[a-z]+$|^/views/v1/[^/]+$"
checks.positive_data_acceptance.expected-statuses = [
    "2xx", "3xx", "400", "404", "409", "410", "412", "422",
]
"""


@pytest.fixture
def fuzz(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs schemathesis on an address: every check, positive and negative data."""
    (tmp_path / "schemathesis.toml").write_text(_SETTINGS)

    def run(address: str, *options: str) -> subprocess.CompletedProcess[str]:
        schemathesis = Path(sys.executable).with_name("schemathesis")
        return subprocess.run(
            [str(schemathesis), "run", f"{address}/openapi.json", "--no-color", *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.mark.timeout(700)
def test_no_request_gets_a_500_and_every_answer_is_as_openapi_says(
    config: Config, fuzz: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    options = ["--max-examples", "3", "--phases", "coverage,fuzzing"]
    if TIER.is_full:
        options = ["--max-examples", "50"]
    with serving(config, hotel()) as address:
        # A session has the routes of a guest, and a stream does not end.
        left_out = ("--exclude-path-regex", "session|/stream")
        done = fuzz(address, *options, "--seed", "1", *left_out)
    print(done.stdout[-2_000:])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


def test_a_500_is_found(
    config: Config, fuzz: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The planted defect: a model whose own code fails on some input."""
    app = App("planted")

    @app.entity("thing", key="thing_id")
    class Thing(BaseModel):
        thing_id: str
        size: int

        @field_validator("size")
        @classmethod
        def share(cls, size: int) -> int:
            return size // max(0, size)

    with serving(config, app) as address:
        options = ["--include-path", "/v1/thing", "--max-examples", "10", "--phases", "fuzzing"]
        done = fuzz(address, *options, "--checks", "not_a_server_error", "--seed", "1")
    assert done.returncode == 1
    assert "Server error" in done.stdout


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.4", False),
        ("example.org", False),
    ],
)
def test_only_this_machine_reaches_a_server_without_tokens(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    if not loopback:
        config = configured(Config(), "", "t", host=host)
        with pytest.raises(InvalidConfig, match=r"api\.host"):
            serve(config, App("none"), threading.Event())


def test_a_port_that_is_taken_is_told(config: Config) -> None:
    with serving(config, hotel()) as address:
        port = int(address.rpartition(":")[2])
        taken = altered(config, api={"port": port})
        with pytest.raises(InvalidConfig, match=r"api\.port"):
            serve(taken, hotel(), threading.Event())


def test_everstate_serve_answers_and_stops_cleanly(config: Config, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "everstate.cli", "serve", "--port", "0", "--app", "hotel:app"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(HOTEL.parent),
            "EVERSTATE_LOG_BOOTSTRAP_SERVERS": config.bootstrap_servers,
            "EVERSTATE_LOG_PREFIX": config.log.prefix,
            "EVERSTATE_STORE_DSN": config.store_dsn,
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "serving" in line)
        address = re.search(r"http://\S+", line)
        assert address is not None
        with httpx.Client(base_url=address[0]) as client:
            assert client.post("/v1/guest", json=EVA, headers=DESK).status_code == 201
            assert client.get("/ready").json() == {"status": "ready"}
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert "stopped" in rest


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/guest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


SLOW = {
    "nothing": [b""],
    "half a header": [GET],
    "a header that never ends": [GET, *[b"X-Slow: 1\r\n"] * 100],
    "half a body": [POST + b"Content-Length: 50\r\n\r\n", *[b" "] * 49],
    "half a second request": [GET + b"\r\n", *[b"G"] * 100],
}


def test_a_request_that_does_not_come_loses_its_connection(config: Config) -> None:
    """Each byte comes in time; all together do not."""
    quick = altered(config, api={"receive_timeout_s": 0.5})
    with serving(quick, App("none")) as address:
        for what, parts in SLOW.items():
            # The server counts from the connection on, and this thread may wait behind it.
            begun = time.monotonic()
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as slow:
                slow.settimeout(0.05)
                closed = any(_is_closed(slow, part) for part in [*parts, *[b""] * 200])
                assert closed, what
                assert time.monotonic() - begun >= 0.4, what
        with httpx.Client(base_url=address) as steady:
            for _ in range(2):
                assert steady.get("/health").status_code == 200
                time.sleep(0.6)  # between requests a connection may rest


def _is_closed(connection: socket.socket, sent: bytes) -> bool:
    try:
        connection.sendall(sent)
        return connection.recv(4096) == b""
    except TimeoutError:
        return False
    except (ConnectionResetError, BrokenPipeError):
        return True


def test_with_a_certificate_the_server_speaks_https_only(config: Config) -> None:
    secured = altered(
        config, api={"ssl_certfile": TLS / "certificate.pem", "ssl_keyfile": TLS / "key.pem"}
    )
    with serving(secured, hotel()) as address:
        assert address.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
        with httpx.Client(base_url=address, verify=trusted) as api:
            assert api.post("/v1/guest", json=EVA, headers=DESK).status_code == 201
            assert api.get("/v1/guest/g1").json() == EVA
        with httpx.Client(base_url=address) as doubting, pytest.raises(httpx.ConnectError):
            doubting.get("/health")
        with (
            httpx.Client(base_url=address.replace("https", "http")) as plain,
            pytest.raises(httpx.HTTPError),
        ):
            plain.get("/health")


def test_commands_are_among_the_routes(config: Config) -> None:
    """Nobody decides here: the answer is that none came, with the id to repeat it by."""
    with client(config, bank.app) as api:
        place = "/v1/account/a1/commands/Deposit"
        late = api.post(place, json={"amount": 1}, headers={**DESK, "Prefer": "wait=0"})
        assert late.status_code == 504
        assert late.json()["commandId"]
        refused = api.post(place, json={"amount": 1})
        assert refused.status_code == 422
        described = api.get("/openapi.json").json()
        assert place.replace("a1", "{key}") in described["paths"]
        assert {"CommandAnswered", "Problem"} <= set(described["components"]["schemas"])
