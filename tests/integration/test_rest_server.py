"""The server as a process has it: OpenAPI under fuzzing, its address, its stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, computed_field
from rest_cases import DESK, EVA, HOTEL, configured, hotel

from everstate.api.server import is_loopback, serve
from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidConfig

FULL = bool(os.environ.get("EVERSTATE_FULL"))
_SETTINGS = """
[generation]
allow-x00 = false

[checks.positive_data_acceptance]
# A condition may not hold; a body may name another key than the path, a patch may not fit.
expected-statuses = ["2xx", "3xx", "404", "409", "412", "422"]
"""


@pytest.fixture
def config(stack: Any, database: str, topic_prefix: str) -> Config:
    return configured(stack.config, database, topic_prefix, port=0)


@contextmanager
def serving(config: Config, app: App) -> Iterator[str]:
    """A server in a thread; gives its address."""
    stop, ready, addresses = threading.Event(), threading.Event(), list[str]()

    def told(address: str) -> None:
        addresses.append(address)
        ready.set()

    thread = threading.Thread(target=serve, args=(config, app, stop, told))
    thread.start()
    try:
        assert ready.wait(30)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


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
    examples = "50" if FULL else "4"
    with serving(config, hotel()) as address:
        done = fuzz(address, "--max-examples", examples, "--seed", "1")
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

        @computed_field
        def share(self) -> float:
            return 1 / (self.size if self.size > 0 else 0)

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
        taken = config.model_copy(update={"api": config.api.model_copy(update={"port": port})})
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
