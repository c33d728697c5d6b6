"""C3: the relay is killed at any moment, and the log is exactly what was committed.

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

import psycopg
import pytest

from everstate.config import Config
from everstate.errors import NotFound
from everstate.sources.outbox import Relay
from everstate.sources.outbox.marks import read_status
from everstate.sources.stores.postgres import EntityStore
from everstate.testing.log_checker import check_log
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from tiers import kills

pytestmark = pytest.mark.settings(topics=[ORDER.name])

KILLS = kills(2, full=20)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)

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


def start_relay(config: Config, point: str = "") -> subprocess.Popen[str]:
    arguments = [config.store_dsn, config.bootstrap_servers, config.log.prefix, point]
    relay = subprocess.Popen(
        [sys.executable, "-c", _RELAY, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert relay.stdout is not None
    assert relay.stdout.readline() == "running\n"
    return relay


def batches(config: Config) -> int:
    """Newest batch that was published and taken off the outbox."""
    with psycopg.connect(config.store_dsn) as connection:
        return read_status(connection).batch


def wait_for_batches(config: Config, count: int) -> None:
    deadline, wanted = time.monotonic() + 60, batches(config) + count
    while batches(config) < wanted:
        assert time.monotonic() < deadline, "the relay publishes nothing"
        time.sleep(0.02)


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
        orders = [StoredOrder(order_id=f"o-{n % 70}", note=f"{turn}/{n}") for n in range(250)]
        store.put_many(orders, provenance=CLERK)
        with start_relay(config, point) as relay:
            assert relay.wait(30) == -signal.SIGKILL
    assert finish(config) == []


@pytest.mark.full
def test_C3_killed_at_random_moments_under_load_it_neither_loses_nor_doubles(
    config: Config, store: EntityStore
) -> None:
    """Acceptance 3 (b): 2 kills here, 20 in the full run."""
    stop = threading.Event()

    def write(writer: int) -> int:
        rng, turn = random.Random(writer), 0
        while not stop.wait(0.02):
            turn += 1
            orders = [
                StoredOrder(order_id=f"o-{rng.randrange(200)}", note=f"{writer}/{turn}/{number}")
                for number in range(rng.choice([1, 1, 5, 60]))
            ]
            store.put_many(orders, provenance=CLERK)
            if turn % 7 == 0:
                try:
                    store.delete(f"o-{rng.randrange(200)}", provenance=CLERK)
                except NotFound:
                    continue
        return turn

    print(f"FAULT_SEED={SEED}")
    rng = random.Random(SEED)
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, number) for number in range(2)]
        try:
            for _ in range(KILLS):
                with start_relay(config) as relay:
                    wait_for_batches(config, 3)
                    time.sleep(rng.random())
                    assert relay.poll() is None
                    relay.kill()
        finally:
            stop.set()
        assert all(writer.result() > 10 for writer in writers)
    assert finish(config) == []
