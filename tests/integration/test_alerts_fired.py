"""The role `alerts` on real servers: what is planted fires once, and is resolved once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from console_cases import fill, fill_log, hotel
from everstate.config import Config, load
from everstate.log.topics import Topics
from everstate.roles import Role, processes_of, run_roles
from kit.serving import serving
from kit.settings import altered
from webhook_receiver import WebhookReceiver, receiving

PROGRAM = "import everstate.cli; everstate.cli.main()"
DEAD = "dead-letters:guest"
AGE_S = 600
"""Age of the changes; a retention below twice of it warns, and the broker drops none of them."""


@pytest.fixture
def config(stack: Any, database: str, topic_prefix: str, tmp_path: Path) -> Config:
    """A project with views, a log and dead letters; its own settings are in everstate.toml."""
    (tmp_path / "everstate.toml").write_text(
        f"""[project]
app = "console_cases:app"
[log]
bootstrap_servers = "{stack.bootstrap_servers}"
prefix = "{topic_prefix}"
[store]
dsn = "{database}"
[alerts]
hold_s = 1
every_s = 0.5
view_behind_s = 100000
"""
    )
    config = load(tmp_path)
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
    fill_log(config, AGE_S)
    return config


@contextmanager
def alerting(config: Config, receiver: WebhookReceiver) -> Iterator[None]:
    """The role in threads of this process."""
    stop = threading.Event()
    role = threading.Thread(
        target=run_roles,
        args=([Role.ALERTS], altered(config, alerts={"webhook_url": receiver.url}), hotel(), stop),
    )
    role.start()
    try:
        yield
    finally:
        stop.set()
        role.join(60)
    assert not role.is_alive()


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_what_is_planted_fires_once_and_is_resolved_once(config: Config) -> None:
    expires = f"log-expires:guest_latest:{config.log.prefix}.guest.changes.g1"
    topic = f"{config.log.prefix}.guest.changes.g1"

    def said(key: str) -> list[str]:
        return [status for status, named in receiver.told("status", "condition") if named == key]

    with receiving() as receiver, Topics(config) as topics:
        with alerting(config, receiver):
            until("dead letters fire", lambda: said(DEAD) == ["firing"])
            topics.set_config(topic, {"retention.ms": f"{AGE_S + 400}000"})
            until("the log expires", lambda: said(expires) == ["firing"])
            receiver.status = 503
            topics.set_config(topic, {"retention.ms": "360000000"})
            until("the webhook refuses", lambda: receiver.refused > 0)
        assert said(expires) == ["firing"]
        receiver.status = 204
        # Another process continues: it repeats nothing, and delivers what was refused.
        with alerting(config, receiver):
            until("it is resolved", lambda: said(expires) == ["firing", "resolved"])
            time.sleep(3)
    assert said(DEAD) == ["firing"], "it holds for a day, and fired once"
    assert said(expires) == ["firing", "resolved"]
    told = receiver.told("project", "what", "level")
    assert ("hotel", "guest_latest of " + topic + ":", "bad") in told


def test_the_console_and_the_status_show_the_same_list(config: Config) -> None:
    assert processes_of(config, hotel())["alerts"] == [Role.ALERTS]
    with serving(config, hotel()) as address:
        answer = httpx.get(f"{address}/console/-/overview?format=json", timeout=90)
        page = httpx.get(address, headers={"Accept": "text/html"}, timeout=90).text
        done = subprocess.run(
            (sys.executable, "-c", PROGRAM, "status", "--json"),
            cwd=config.folder,
            env={"PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        text = subprocess.run(
            (sys.executable, "-c", PROGRAM, "status"),
            cwd=config.folder,
            env={"PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    by_console = {each["key"] for each in answer.json()["attention"]}
    by_status = {each["key"] for each in json.loads(done.stdout)["attention"]}
    assert by_console == by_status == {"roles:none", DEAD, "dead-letters:?"}
    assert "new dead letters in the last 24 h" in page
    assert "new dead letters in the last 24 h" in text.stdout


def test_the_status_is_shown_again_until_it_is_interrupted(config: Config) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", PROGRAM, "status", "--watch", "--json"),
        cwd=config.folder,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        for _ in range(2):
            assert "attention" in json.loads(watching.stdout.readline())
        assert watching.poll() is None
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(60) == 0
