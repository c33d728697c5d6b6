"""Writers that go on while the service is moved; each acknowledged write is written down."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import TextIO

from guests import Guest
from service import Service

WRITERS = 2
GUESTS = 50
PAUSE_S = 0.05


def write(number: int, acknowledged: TextIO, stop: threading.Event) -> int:
    """Save guests of this writer's own: nights only grow. Some come and are removed for good."""
    rng, service, writes = random.Random(number), Service(), 0
    nights: dict[str, int] = {}
    while not stop.wait(PAUSE_S):
        writes += 1
        if rng.random() < 0.1:
            key = f"once-{number}-{time.time_ns()}"
            service.save(Guest(id=key, name="for a night", nights=1))
            service.remove(key)
            say(acknowledged, key, None)
            continue
        key = f"w{number}-{rng.randrange(GUESTS):02}"
        if key not in nights:
            known = service.look_up(key)
            nights[key] = known.nights if known else 0
        nights[key] += 1
        service.save(Guest(id=key, name=f"guest of writer {number}", nights=nights[key]))
        say(acknowledged, key, nights[key])
        service.look_up(key)
    service.close()
    return writes


def say(acknowledged: TextIO, key: str, nights: int | None) -> None:
    """Write down what the service said is done; one call, so that threads do not mix lines."""
    acknowledged.write(json.dumps([key, nights]) + "\n")
    acknowledged.flush()


def main(seconds: float) -> None:
    """Write for so long."""
    stop = threading.Event()
    with open("acknowledged.jsonl", "w", encoding="utf-8") as acknowledged:
        threads = [
            threading.Thread(target=write, args=[number, acknowledged, stop])
            for number in range(WRITERS)
        ]
        for thread in threads:
            thread.start()
        stop.wait(seconds)
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(float(sys.argv[1]))
