"""Starting a capture's connector again after it failed, or halted in a snapshot (decision 14).

Debezium waits out what it knows to pass, and leaves its task FAILED for everything else, also for
what would pass: a database that stops in the moment in which a task starts. Under the word
RUNNING of the connector such a task reads nothing until somebody restarts it. The clean role does,
and so does `everstate cdc snapshot` while it waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from prometheus_client import Counter

from everstate.config import Config
from everstate.errors import EverstateError, Unavailable
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.halted import SnapshotWatch
from everstate.sources.cdc.rest import NoSuchConnector

LOGGER = logging.getLogger("everstate.sources.cdc")

RESTARTS = Counter(
    "everstate_capture_restarts", "Connectors that had failed and were started again", ["capture"]
)

LOOK_S: Final = 5.0
"""How often a connector is looked at; a first failure is mended by the look that finds it."""
LOOK_SNAPSHOT_S: Final = 10.0
"""How often the progress of its snapshot is looked at."""
AGAIN_S: Final = 10.0
"""Seconds until a connector that failed again is restarted; twice as long each time."""
AGAIN_S_MAX: Final = 600.0
STEADY_S: Final = 60.0
"""A connector that has run for so long since its restart is restarted at once when it fails."""


class Failing(Protocol):
    """What may fail and be started again (:class:`Capturing` is one)."""

    def failure(self) -> str | None:
        """Why it does not run; ``None``: it has not failed."""

    def restart_failed(self) -> str | None:
        """Start what failed again; raises Unavailable to be asked once more soon.

        Out: the table that its snapshot was made to leave out, and why.
        """

    def running_position(self) -> Mapping[str, Any]:
        """The stored source position; empty when it does not run."""

    def nudge(self) -> None:
        """Give it something to read."""

    def restart_reading(self) -> None:
        """Start it again although it has not failed."""


class Restarter:
    """Restarts one capture's connector when it has failed, after a time that grows.

    Never fails: a cluster or a database that is away is asked again, and each reason is told once.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Failing],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``find`` is called at each look, since a local Connect may be started later."""
        self._name, self._find, self._clock = name, find, clock
        self._watch, self._looked_at_s = SnapshotWatch(), -LOOK_SNAPSHOT_S
        self._restarted_at_s: float | None = None
        self._pause_s = 0.0
        self._told = ""

    def step(self) -> bool:
        """Look once; out: whether the connector was started again."""
        now_s = self._clock()
        try:
            capturing = self._find()
            failure = capturing.failure()
            if failure is None:
                self._look_at_snapshot(capturing, now_s)
                self._told = ""
                return False
            if now_s < self._due_s(now_s):
                return False
            given_up = capturing.restart_failed()
        except NoSuchConnector:
            return False  # it was removed while it was looked at
        except Unavailable as error:
            self._tell_once(error)
            return False
        except EverstateError as error:
            self._tell_once(error)
            self._put_off(now_s)
            return False
        self._put_off(now_s)
        RESTARTS.labels(self._name).inc()
        LOGGER.warning(
            "capture %s: its connector had failed and is started again: %s", self._name, failure
        )
        if given_up is not None:
            LOGGER.error(
                "capture %s: a snapshot cannot be read and is given up: %s", self._name, given_up
            )
        return True

    def _look_at_snapshot(self, capturing: Failing, now_s: float) -> None:
        """Restart a connector whose snapshot halted: it goes on, or fails and tells the reason."""
        if now_s - self._looked_at_s < LOOK_SNAPSHOT_S:
            return
        self._looked_at_s = now_s
        progress = self._watch.look(capturing.running_position())
        if progress == "silent":
            capturing.nudge()
        elif progress == "halted":
            LOGGER.warning(
                "capture %s: its snapshot does not go on, so its connector is started again",
                self._name,
            )
            capturing.restart_reading()

    def _due_s(self, now_s: float) -> float:
        if self._restarted_at_s is None:
            return now_s
        if now_s - self._restarted_at_s >= self._pause_s + STEADY_S:
            self._pause_s = 0.0
        return self._restarted_at_s + self._pause_s

    def _put_off(self, now_s: float) -> None:
        self._restarted_at_s = now_s
        self._pause_s = min(AGAIN_S_MAX, max(AGAIN_S, self._pause_s * 2))

    def _tell_once(self, error: EverstateError) -> None:
        if str(error) != self._told:
            self._told = str(error)
            LOGGER.warning("capture %s: its connector is left as it is: %s", self._name, error)


def restarters_of(
    captures: Mapping[str, Capture], connected: Callable[[], Config]
) -> list[Restarter]:
    """Restarters of the captures whose connector is ours to run: those with a ``dsn``.

    ``connected`` gives the configuration with the running servers' addresses.
    """

    def restarter(capture: Capture) -> Restarter:
        return Restarter(capture.name, lambda: Capturing(connected(), capture, local=False))

    return [restarter(capture) for capture in captures.values() if capture.dsn is not None]


def keep_running(restarters: Sequence[Restarter], stop: threading.Event) -> None:
    """Look at every connector each :data:`LOOK_S` until ``stop`` is set."""
    while not stop.wait(LOOK_S):
        for restarter in restarters:
            restarter.step()
