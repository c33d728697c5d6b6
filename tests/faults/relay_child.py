"""A relay in a process of its own, and its death: at a point, or at any moment under load.

FAULT_SEED repeats the moments of a run.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from everstate.config import Config
from everstate.log.producer import Producer
from everstate.sources.outbox import Relay, marks
from everstate.sources.outbox.marks import read_status
from tiers import kills

KILLS = kills(2, full=20)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)


def start_relay(config: Config, types: str, point: str = "") -> subprocess.Popen[str]:
    """Start a relay of entity types (``module:NAME,NAME``); at ``point`` it kills itself."""
    relay = subprocess.Popen(
        [sys.executable, __file__, types, point],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert relay.stdin is not None
    assert relay.stdout is not None
    relay.stdin.write(config.model_dump_json())
    relay.stdin.close()
    assert relay.stdout.readline() == "running\n"
    return relay


def batches(config: Config) -> int:
    """Newest batch that was published and taken off the outbox."""
    with psycopg.connect(config.store_dsn) as connection:
        return read_status(connection).batch


def killed_under_load(
    config: Config, types: str, writers: int, write: Callable[[int, threading.Event], int]
) -> list[int]:
    """Kill relays at random moments while writers write; out: what each writer has done."""
    print(f"FAULT_SEED={SEED}")
    rng, stop = random.Random(SEED), threading.Event()
    with ThreadPoolExecutor(writers) as pool:
        done = [pool.submit(write, number, stop) for number in range(writers)]
        try:
            for _ in range(KILLS):
                with start_relay(config, types) as relay:
                    deadline, wanted = time.monotonic() + 60, batches(config) + 3
                    while batches(config) < wanted:
                        assert time.monotonic() < deadline, "the relay publishes nothing"
                        time.sleep(0.02)
                    time.sleep(rng.random())
                    assert relay.poll() is None
                    relay.kill()
        finally:
            stop.set()
        return [each.result() for each in done]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(types: str, point: str) -> None:
    """Relay until killed."""
    config = Config.model_validate_json(sys.stdin.read())
    module, _, names = types.partition(":")
    relayed = [getattr(importlib.import_module(module), name) for name in names.split(",")]
    if point == "mark":
        marks.mark = die  # type: ignore[assignment]
    if point == "commit":
        Producer.commit = die  # type: ignore[method-assign]
    print("running", flush=True)
    with Relay(config, relayed) as relay:
        relay.run(threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])
