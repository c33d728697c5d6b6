"""A transaction that never ends ends the process, so that a new one can go on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from everstate.log.loop import end_when_stuck


def watched(loop: Any, seconds: float) -> bool:
    """Whether the watch ended the process within that time."""
    stop, ended = threading.Event(), threading.Event()
    watch = threading.Thread(
        target=end_when_stuck,
        args=([loop], stop, ended.set),
        kwargs={"stuck_s": 0.3, "poll_s": 0.02},
    )
    watch.start()
    found = ended.wait(seconds)
    stop.set()
    watch.join(10)
    assert not watch.is_alive()
    return found


def test_a_transaction_that_takes_too_long_ends_the_process() -> None:
    assert watched(SimpleNamespace(committing_since=time.monotonic()), 30)


def test_between_transactions_nothing_is_ended() -> None:
    assert not watched(SimpleNamespace(committing_since=None), 0.6)
