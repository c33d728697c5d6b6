"""The relay of a service's outbox is killed at any moment under load: nothing is lost or doubled.

FAULT_SEED repeats the moments of a run.
"""

from __future__ import annotations

import random
import signal
import threading
import time

import psycopg
import pytest
from relay_child import KILLS, killed_under_load, start_relay

from everstate.config import Config
from everstate.sources.outbox import Relay
from outbox_service import CLICK, PURCHASE, problems, transact
from tiers import counted

pytestmark = [
    pytest.mark.settings(topics=["purchase", "click"]),
    pytest.mark.usefixtures("service"),
]

TYPES = "outbox_service:PURCHASE,CLICK"
WRITERS = 4
RATE = counted(300, full=1_000)
"""Transactions a second, of all writers together, when the machine has that much."""


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
            with start_relay(config, TYPES, point) as relay:
                assert relay.wait(30) == -signal.SIGKILL
    assert finish(config) == []


@pytest.mark.full
@pytest.mark.timeout(300 + 30 * KILLS)
def test_C3_killed_at_random_under_writers_that_roll_back_it_neither_loses_nor_doubles(
    config: Config,
) -> None:
    """Acceptance 4: 2 kills here, 20 at 1,000 transactions a second in the full run."""

    def write(seed: int, stop: threading.Event) -> int:
        rng, done, began = random.Random(seed), 0, time.monotonic()
        with psycopg.connect(config.store_dsn, autocommit=True) as connection:
            while not stop.is_set():
                time.sleep(max(0.0, began + done * WRITERS / RATE - time.monotonic()))
                transact(connection, rng, clicks=True)
                done += 1
        return done

    began = time.monotonic()
    count = sum(killed_under_load(config, TYPES, WRITERS, write))
    print(f"{count:,} transactions, {count / (time.monotonic() - began):,.0f}/s, {KILLS} kills")
    assert count > 100
    assert finish(config) == []
