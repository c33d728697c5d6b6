"""C3: the relay is killed at any moment, and the log is exactly what was committed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from everstate.config import Config
from everstate.errors import NotFound
from everstate.log.topics import Topics
from everstate.sources.outbox import EntityStore, Relay
from everstate.testing.log_checker import check_log
from everstate.testing.store_contract import CLERK, ORDER, Order

KILLS = 20 if os.environ.get("EVERSTATE_FULL") else 2

# Runs a relay until killed. With "mark" or "publish" it kills itself at that point.
_RELAY = """
import os, signal, sys, threading
from everstate.config import load
from everstate.sources.outbox import Relay, marks
from everstate.log.publisher import OncePublisher
from everstate.testing.store_contract import ORDER

dsn, servers, prefix, point = sys.argv[1:]
config = load(store={"dsn": dsn, "relay_batch_rows": 100}, log={"prefix": prefix,
    "bootstrap_servers": servers})

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "mark":
    marks.mark = die
if point == "commit":
    from everstate.log.producer import Producer
    Producer.commit = die
print("running", flush=True)
with Relay(config, [ORDER]) as relay:
    relay.run(threading.Event())
"""


@pytest.fixture
def config(stack: Any, database: str, topic_prefix: str) -> Config:
    running: Config = stack.config
    config = running.model_copy(
        update={
            "store": running.store.model_copy(update={"dsn": database}),
            "log": running.log.model_copy(update={"prefix": topic_prefix}),
        }
    )
    with Topics(config) as topics:
        topics.ensure([ORDER.name])
    return config


@pytest.fixture
def store(config: Config) -> Iterator[EntityStore]:
    with EntityStore(config, ORDER) as store:
        store.install()
        yield store


def start_relay(config: Config, point: str = "") -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("EVERSTATE_")
    }
    arguments = [config.store_dsn, config.bootstrap_servers, config.log.prefix, point]
    relay = subprocess.Popen(
        [sys.executable, "-c", _RELAY, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert relay.stdout is not None
    assert relay.stdout.readline() == "running\n"
    return relay


def finish(config: Config) -> list[str]:
    with Relay(config, [ORDER]) as relay:
        while relay.step():
            pass
    report = check_log(config, [ORDER.name])
    assert report.changes > 0
    return report.problems


@pytest.mark.parametrize("point", ["mark", "commit"])
def test_C3_killed_between_log_and_store_it_neither_loses_nor_doubles(
    config: Config, store: EntityStore, point: str
) -> None:
    for turn in range(3):
        orders = [Order(order_id=f"o-{n % 70}", note=f"{turn}/{n}") for n in range(250)]
        store.put_many(orders, provenance=CLERK)
        with start_relay(config, point) as relay:
            assert relay.wait(30) == -signal.SIGKILL
    assert finish(config) == []


def test_C3_killed_at_random_moments_under_load_it_neither_loses_nor_doubles(
    config: Config, store: EntityStore
) -> None:
    """Acceptance 3 (b): 2 kills here, 20 with EVERSTATE_FULL=1."""
    stop = threading.Event()

    def write(writer: int) -> int:
        rng, turn = random.Random(writer), 0
        while not stop.wait(0.02):
            turn += 1
            orders = [
                Order(order_id=f"o-{rng.randrange(200)}", note=f"{writer}/{turn}/{number}")
                for number in range(rng.choice([1, 1, 5, 60]))
            ]
            store.put_many(orders, provenance=CLERK)
            if turn % 7 == 0:
                try:
                    store.delete(f"o-{rng.randrange(200)}", provenance=CLERK)
                except NotFound:
                    continue
        return turn

    rng = random.Random()
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, number) for number in range(2)]
        try:
            for _ in range(KILLS):
                with start_relay(config) as relay:
                    time.sleep(0.3 + rng.random() * 1.5)
                    relay.kill()
        finally:
            stop.set()
        assert all(writer.result() > 10 for writer in writers)
    assert finish(config) == []
