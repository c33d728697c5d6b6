"""Restarts a capture's connector after it failed, or halted in a snapshot (decision 14).

Debezium retries after errors that it knows to be temporary. Any other error leaves its task FAILED,
also a temporary one: a database that stops in the moment in which a task starts. The connector is
then still reported as RUNNING, and its task reads nothing until it is restarted. The clean role
does that, and so does `everstate cdc snapshot` while it waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client import Counter

from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import EverstateError, SourceReplaced, Unavailable
from everstate.retrying import Retries
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.halted import SnapshotWatch
from everstate.sources.cdc.misread import ColumnCheck
from everstate.sources.cdc.rest import NoSuchConnector

logger = logging.getLogger("everstate.sources.cdc")

RESTARTS = Counter(
    "everstate_capture_restarts", "Connectors that had failed and were started again", ["capture"]
)

LOOK_S: Final = 5.0
"""Seconds between two checks of a connector; the check that finds a first failure restarts it, and
each asks for the database's mark: a copy that is younger is known by the end of its log only."""
_AGAIN_S: Final = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0)
"""Seconds until a connector that failed again is restarted."""
AGAIN_S_MAX: Final = _AGAIN_S[-1]
STEADY_S: Final = 60.0
"""A connector that ran for this many seconds after its pause is restarted at once when it fails."""


class Restarter:
    """Restarts one capture's connector when it has failed, after a time that grows.

    Never fails: an unreachable cluster or database is tried again, and each reason is logged once.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[], Capturing],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``find`` is called at each check, since a local Connect may be started later."""
        self._name, self._find = name, find
        self._watch = SnapshotWatch()
        self._retries = Retries(steady_s=STEADY_S, clock=clock)
        self._last_warning, self._is_current = "", False

    def step(self) -> bool:
        """Check once; out: whether the connector was restarted after a failure."""
        try:
            capturing = self._find()
            if not self._is_current:
                if capturing.bring_up_to_date():
                    logger.info("capture %s: its connector has this version's settings", self._name)
                self._is_current = True
            failure = capturing.failure()
            if failure is None:
                self._look_at(capturing)
                self._last_warning = ""
                return False
            if not self._retries.is_due(self._name):
                return False
            given_up = capturing.restart_failed()
        except NoSuchConnector:
            return False  # it was removed during the check
        except (Unavailable, SourceReplaced) as error:
            self._warn_once(error)
            return False
        except EverstateError as error:
            self._warn_once(error)
            self._retries.failed(self._name, _AGAIN_S)
            return False
        self._retries.failed(self._name, _AGAIN_S)
        RESTARTS.labels(self._name).inc()
        logger.warning(
            "capture %s: its connector had failed and is started again: %s", self._name, failure
        )
        if given_up is not None:
            logger.error(
                "capture %s: a snapshot cannot be read and is given up: %s", self._name, given_up
            )
        return True

    def _look_at(self, capturing: Capturing) -> None:
        """Pause a connector whose database was replaced: its rows could not be put in order.

        Restart one whose snapshot halted: it resumes, or fails with the reason.
        """
        try:
            capturing.check_source(renew=True)
        except SourceReplaced:
            if capturing.running_position():
                capturing.pause()
            raise
        progress = self._watch.look(capturing.running_position())
        if progress == "silent":
            capturing.nudge()
        elif progress == "halted":
            logger.warning(
                "capture %s: its snapshot does not go on, so its connector is started again",
                self._name,
            )
            capturing.restart_reading()

    def _warn_once(self, error: EverstateError) -> None:
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            logger.warning("capture %s: its connector is left as it is: %s", self._name, error)


def restarters_of(
    captures: Mapping[str, Capture],
    entities: Mapping[str, EntityType],
    connected: Callable[[], Config],
) -> list[Restarter]:
    """Restarters of the captures whose connector is ours to run: those with a ``dsn``.

    ``connected`` gives the configuration with the running servers' addresses.
    """

    def restarter(capture: Capture) -> Restarter:
        columns = ColumnCheck()
        return Restarter(
            capture.name,
            lambda: Capturing(
                connected(), capture, local=False, entities=entities, columns=columns
            ),
        )

    return [restarter(capture) for capture in captures.values() if capture.dsn is not None]


def keep_running(restarters: Sequence[Restarter], stop: threading.Event) -> None:
    """Check every connector each :data:`LOOK_S` seconds until ``stop`` is set."""
    while not stop.wait(LOOK_S):
        for restarter in restarters:
            restarter.step()
