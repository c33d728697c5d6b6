"""Asks for offsets in several threads and loses patience; the process must survive that."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from random import Random

from confluent_kafka import IsolationLevel, TopicPartition

from everstate.config import Config
from everstate.errors import Unavailable
from everstate.log import positions
from everstate.log.positions import Offsets

SECONDS, THREADS = 5.0, 4


def ask(config: Config, topic: str, seed: int, until: float) -> None:
    random = Random(seed)
    while time.monotonic() < until:
        with Offsets(config) as offsets:
            for _ in range(random.randrange(1, 12)):
                with suppress(Unavailable):
                    offsets._ask(
                        {TopicPartition(topic, 0): positions._SPEC.earliest()},
                        IsolationLevel.READ_COMMITTED,
                    )


def main() -> None:
    """Arguments: a topic, and the seconds until the driver's own time-out; the config is stdin."""
    topic, never_s = sys.argv[1], float(sys.argv[2])
    config = Config.model_validate_json(sys.stdin.read())
    setattr(positions, "_NEVER_S", never_s)  # noqa: B010 (a constant)
    setattr(positions, "ADMIN_TIMEOUT_S", 0.002)  # noqa: B010
    until = time.monotonic() + SECONDS
    threads = [
        threading.Thread(target=ask, args=(config, topic, seed, until)) for seed in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
