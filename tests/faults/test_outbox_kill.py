"""The relay of a service's outbox is killed at any moment under load: nothing is lost or doubled.

FAULT_SEED repeats the moments of a run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames
from everstate.sources.outbox import Relay
from outbox_service import CLICK, PURCHASE, problems, transact
from tiers import counted, kills

pytestmark = [
    pytest.mark.settings(topics=["purchase", "click"]),
    pytest.mark.usefixtures("service"),
]

KILLS = kills(2, full=20)
WRITERS = 4
RATE = counted(300, full=1_000)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
"""Transactions a second, of all writers together, when the machine has that much."""

# Runs a relay until killed. With a point it kills itself there.
_RELAY = """
import os, signal, sys, threading
from everstate.config import load
from everstate.sources.outbox import Relay, marks
from everstate.log.producer import Producer
from outbox_service import CLICK, PURCHASE

dsn, servers, prefix, point = sys.argv[1:]
config = load(store={"dsn": dsn},
    log={"prefix": prefix, "bootstrap_servers": servers})

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "mark":
    marks.mark = die
if point == "commit":
    Producer.commit = die
print("running", flush=True)
with Relay(config, [PURCHASE, CLICK]) as relay:
    relay.run(threading.Event())
"""


def start_relay(config: Config, point: str = "") -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("EVERSTATE_")
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
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


def written(config: Config) -> int:
    """Offsets of all changelogs together: they grow with each batch that a relay commits."""
    with Offsets(config) as offsets:
        topics = [TopicNames(config.log.prefix).changes(name) for name in ("purchase", "click")]
        return sum(offsets.stable_ends(topics).values())


def wait_for_batches(config: Config, count: int) -> None:
    """Until the log has grown so often: the relay that runs now works."""
    deadline, last = time.monotonic() + 60, written(config)
    while count > 0:
        assert time.monotonic() < deadline, "the relay publishes nothing"
        time.sleep(0.02)
        now = written(config)
        count, last = count - (now > last), now


def finish(config: Config) -> list[str]:
    found = ["begin"]
    deadline = time.monotonic() + 60
    with Relay(config, [PURCHASE, CLICK]) as relay:
        while found and time.monotonic() < deadline:
            while relay.step():
                pass
            found = problems(config)
    return found


@pytest.mark.parametrize("point", ["mark", "commit"])
def test_C3_killed_between_log_and_store_it_neither_loses_nor_doubles(
    config: Config, point: str
) -> None:
    rng = random.Random(point)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        for _ in range(2):
            while not all(transact(connection, rng, clicks=True) for _ in range(20)):
                pass
            with start_relay(config, point) as relay:
                assert relay.wait(30) == -signal.SIGKILL
    assert finish(config) == []


@pytest.mark.full
@pytest.mark.timeout(300 + 30 * KILLS)
def test_C3_killed_at_random_under_writers_that_roll_back_it_neither_loses_nor_doubles(
    config: Config,
) -> None:
    """Acceptance 4: 2 kills here, 20 at 1,000 transactions a second in the full run."""
    stop = threading.Event()

    def write(seed: int) -> int:
        rng, done, began = random.Random(seed), 0, time.monotonic()
        with psycopg.connect(config.store_dsn, autocommit=True) as connection:
            while not stop.is_set():
                time.sleep(max(0.0, began + done * WRITERS / RATE - time.monotonic()))
                transact(connection, rng, clicks=True)
                done += 1
        return done

    print(f"FAULT_SEED={SEED}")
    rng = random.Random(SEED)
    began = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as pool:
        writers = [pool.submit(write, number) for number in range(WRITERS)]
        try:
            for _ in range(KILLS):
                with start_relay(config) as relay:
                    wait_for_batches(config, 3)
                    time.sleep(rng.random())
                    assert relay.poll() is None
                    relay.kill()
        finally:
            stop.set()
        count = sum(writer.result() for writer in writers)
    print(f"{count:,} transactions, {count / (time.monotonic() - began):,.0f}/s, {KILLS} kills")
    assert count > 100
    assert finish(config) == []
