"""Watch a running stack: a server that crashes is reported and started again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.progress import Progress
from everstate.local.stack import Stack

log = logging.getLogger(__name__)

_POLL_S = 1.0
_LOOK_S = 2.0
_CRASHES_MAX = 3
_WINDOW_S = 120.0


def supervise(
    stack: Stack,
    stop: threading.Event,
    *,
    tell: Callable[[LocalStackError], None],
    progress: Progress,
) -> None:
    """Keep the servers of ``stack`` running until ``stop`` is set.

    A crash is noticed within a second and given to ``tell`` with the end of the server's log;
    then the server is started on the same ports. Raises LocalStackError at the fourth crash of
    one server within two minutes.
    """
    crashes: dict[str, list[float]] = {}
    while not stop.wait(_POLL_S):
        for name in stack.gone():
            failure = stack.failure(name, "crashed")
            now = time.monotonic()
            recent = [at for at in crashes.get(name, []) if now - at < _WINDOW_S]
            crashes[name] = [*recent, now]
            if len(recent) >= _CRASHES_MAX:
                raise failure
            tell(failure)
            stack.restart(name, progress)


def keep_running(given: Config, names: Iterable[str], stop: threading.Event) -> None:
    """Start servers of ``names`` again when they crash, until ``stop`` is set.

    ``given``: the settings without the addresses of running servers. A server that was never
    started, or was stopped on purpose, is left alone. Raises LocalStackError when one does not
    start; call it again later.
    """
    wanted = tuple(names)
    while not stop.wait(_LOOK_S):
        for name in Stack(given).revive(wanted):
            log.warning("the local %s was gone and is started again", name)
