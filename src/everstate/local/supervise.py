"""Watches a running stack: a server that crashes is reported and restarted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.progress import StackProgress
from everstate.local.stack import Stack

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_LOOK_S = 2.0
_CRASHES_MAX = 3
_WINDOW_S = 120.0


def supervise(
    stack: Stack,
    stop: threading.Event,
    *,
    on_crash: Callable[[LocalStackError], None],
    progress: StackProgress,
) -> None:
    """Keep the servers of ``stack`` running until ``stop`` is set.

    A crash is detected within a second; ``on_crash`` gets it with the end of the server's log;
    then the server is restarted on the same ports. A server that `everstate down` stopped stays
    stopped. Raises LocalStackError at the fourth crash of one server within two minutes.
    """
    crashes: dict[str, list[float]] = {}
    while not stop.wait(_POLL_S):
        for name in stack.settled_crashes():
            failure = stack.failure(name, "crashed")
            now = time.monotonic()
            recent = [at for at in crashes.get(name, []) if now - at < _WINDOW_S]
            crashes[name] = [*recent, now]
            if len(recent) >= _CRASHES_MAX:
                raise failure
            on_crash(failure)
            stack.restart_crashed(name, progress)


def keep_running(given: Config, names: Iterable[str], stop: threading.Event) -> None:
    """Restart servers of ``names`` when they crash, until ``stop`` is set.

    ``given``: the settings without the addresses of running servers. A server that was never
    started, or was stopped on purpose, is not started. Raises LocalStackError when one does not
    start; call it again later.
    """
    wanted = tuple(names)
    while not stop.wait(_LOOK_S):
        for name in Stack(given).revive(wanted):
            logger.warning("the local %s had stopped and is restarted", name)
