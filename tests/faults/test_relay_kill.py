"""C3: the relay is killed at any moment, and the log is exactly what was committed.

FAULT_SEED repeats the moments of a run.
"""

from __future__ import annotations

import random
import signal
import threading

import pytest
from relay_child import killed_under_load, start_relay

from everstate.config import Config
from everstate.errors import NotFound
from everstate.sources.outbox import Relay
from everstate.sources.stores.postgres import EntityStore
from everstate.testing.log_checker import check_log
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder

pytestmark = pytest.mark.settings(topics=[ORDER.name], store={"relay_batch_rows": 100})

TYPES = "everstate.testing.store_contract:ORDER"


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
        with start_relay(config, TYPES, point) as relay:
            assert relay.wait(30) == -signal.SIGKILL
    assert finish(config) == []


@pytest.mark.full
def test_C3_killed_at_random_moments_under_load_it_neither_loses_nor_doubles(
    config: Config, store: EntityStore
) -> None:
    """Acceptance 3 (b): 2 kills here, 20 in the full run."""

    def write(writer: int, stop: threading.Event) -> int:
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

    assert all(turns > 10 for turns in killed_under_load(config, TYPES, 2, write))
    assert finish(config) == []
