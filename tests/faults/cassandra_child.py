"""A process that writes to Cassandra and publishes, as an API does, to be killed.

With a fault point it kills itself there: after the conditional write (`written`), before the
Kafka transaction (`publish`) or its commit (`commit`), or after it (`mark`). With `blind` it does
not use the index of unpublished changes: the planted defect.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from everstate.config import Config
from everstate.errors import NotFound
from everstate.log.producer import Producer
from everstate.log.publisher import OncePublisher
from everstate.sources.stores.cassandra import CassandraStore, Database, Publisher
from everstate.sources.stores.cassandra.partition import Partitions
from everstate.sources.stores.cassandra.unpublished import Announcement, Unpublished
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder

WRITERS, KEYS = 4, 60


def die(*_args: object, **_more: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(done: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """What was called, until it was called so often and was done."""
    left = [calls]

    def call(*args: Any, **more: Any) -> Any:
        result = done(*args, **more)
        left[0] -= 1
        return die() if left[0] <= 0 else result

    return call


def die_before(done: Callable[..., Any], calls: int) -> Callable[..., Any]:
    left = [calls]

    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        return die() if left[0] <= 0 else done(*args, **more)

    return call


def set_fault(point: str) -> None:
    calls = random.randrange(2, 12)
    faults: dict[str, tuple[type[Any], str, Callable[..., Callable[..., Any]]]] = {
        "written": (Database, "execute_if", die_after),
        "publish": (OncePublisher, "publish", die_before),
        "commit": (Producer, "commit", die_before),
        "mark": (OncePublisher, "publish", die_after),
    }
    if point in faults:
        owner, name, fault = faults[point]
        setattr(owner, name, fault(getattr(owner, name), calls * (5 if point == "written" else 1)))
    if point == "blind":
        forget_the_index()


def forget_the_index() -> None:
    """Tell the publisher in this process, and nobody else, what was written."""
    told: dict[Any, Announcement] = {}

    def announce(self: Any, key: str, version: int, again_from: int | None = None) -> None:
        attempt = uuid4()
        long_ago = (0.0, time.time())
        told[attempt] = Announcement(0, attempt, ORDER.name, key, version, again_from, *long_ago)

    setattr(Partitions, "announce", announce)  # noqa: B010
    setattr(Unpublished, "open", lambda self: list(told.values()))  # noqa: B010
    setattr(Unpublished, "settle", lambda self, each: told.pop(each.attempt, None))  # noqa: B010


def write(store: CassandraStore, seed: int, acknowledged: TextIO) -> None:
    rng, turn = random.Random(seed), 0
    while True:
        turn += 1
        key = f"o-{rng.randrange(KEYS)}"
        if rng.random() < 0.1:
            with suppress(NotFound):
                store.delete(key, provenance=CLERK)
            continue
        written = store.put(StoredOrder(order_id=key, note=f"{seed}/{turn}"), provenance=CLERK)
        acknowledged.write(f"{key} {written.version} {written.change_id}\n")
        acknowledged.flush()


def main(settings: Path, acknowledged: Path, point: str) -> None:
    config = Config.model_validate_json(settings.read_text())
    database = Database(config)
    store = CassandraStore(config, ORDER, database=database)
    publisher = Publisher(config, [ORDER], database=database)
    publisher.step()
    set_fault(point)
    with acknowledged.open("a") as file:
        for seed in random.sample(range(1_000_000), WRITERS):
            threading.Thread(target=write, args=(store, seed, file), daemon=True).start()
        print("running", flush=True)
        publisher.run(threading.Event())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
