"""What one thread reads for any number of subscribers of this process, while there are some."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from everstate.errors import EverstateError, StatementRefused, Unavailable
from everstate.telemetry import RateLimitedLogger

logger = logging.getLogger("everstate.serving")

_RETRY_S: Final = 1.0
_LINGER_S: Final = 30.0
"""A reader goes on so long after its last subscriber, for those that come back."""
_waits: Final = RateLimitedLogger(logger, logging.WARNING)


class SharedReader(ABC):
    """Reads something once for all its subscribers, in a thread of its own. Thread-safe.

    It begins with its first subscriber, and ends by an error that does not pass, when it is closed,
    and a while after its last subscriber. One that has ended is replaced by a new one.
    """

    def __init__(self, what: str) -> None:
        """``what``: what it reads, for messages."""
        self._what = what
        self._lock = threading.Lock()
        self._beginning = threading.Lock()
        self._wakes = set[Callable[[], None]]()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None
        self.failure: EverstateError | None = None
        """Why it has ended; ``None``: it has not, or nobody came back."""

    @abstractmethod
    def _open(self) -> None:
        """Begin; what it raises is that of the first subscriber, and the next one tries again."""

    @abstractmethod
    def _read(self) -> float:
        """Read on, and wake subscribers; returns seconds until the next call.

        After an error that may pass it is called again.
        """

    @abstractmethod
    def _leave_source(self) -> None:
        """End a call of :meth:`_read` that waits, if it does; called from another thread."""

    def join(self, wake: Callable[[], None]) -> bool:
        """Begin to follow; ``wake`` is called in another thread, and must not block.

        It says that there is something new, or that the reader has ended. Returns whether the
        reader goes on: one that has ended is replaced. Raises what keeps it from beginning.
        """
        with self._beginning:
            is_first = self._thread is None and not self._stopped.is_set()
            if is_first:
                self._open()
            with self._lock:
                goes_on = not self._stopped.is_set()
                if goes_on:
                    self._wakes.add(wake)
                    if self._timer is not None:
                        self._timer.cancel()
                        self._timer = None
                    if self._thread is None:
                        run = threading.Thread(target=self._run, name=self._what, daemon=True)
                        self._thread = run
            if is_first and not goes_on:
                self._leave_source()  # It was closed while it was opened.
            elif is_first and self._thread is not None:
                # Only now: the first subscriber sees why it ends, also when that is at once.
                try:
                    self._thread.start()
                except RuntimeError:  # for lack of threads
                    self._wakes.discard(wake)
                    self._end(Unavailable(f"{self._what} cannot be read."))
                    raise
        return goes_on

    def leave(self, wake: Callable[[], None]) -> None:
        """Stop following; who has left already stays away."""
        with self._lock:
            self._wakes.discard(wake)
            if not self._wakes and self._timer is None and not self._stopped.is_set():
                timer = threading.Timer(_LINGER_S, self._end_unused)
                timer.daemon = True
                timer.start()
                self._timer = timer

    def close(self) -> None:
        """End it; its subscribers see why."""
        self._end(Unavailable("the server is being stopped."))
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(5.0)

    def _end_unused(self) -> None:
        with self._lock:
            if self._wakes:
                return
            self._stopped.set()
        self._leave_source()

    def _end(self, failure: EverstateError) -> None:
        with self._lock:
            self.failure = self.failure or failure
            self._stopped.set()
        if self._thread is not None:
            self._leave_source()
        self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            try:
                pause = self._read()
            except Exception as error:
                # Whatever it is: a reader that ended in silence would leave its subscribers
                # waiting.
                failure = failure_of(error, f"{self._what} cannot be read")
                if failure is not error:
                    logger.exception("%s cannot be read; its subscriptions end", self._what)
                elif failure.retryable:
                    _waits.log("subscriptions of %s wait: %s", self._what, failure)
                    pause = _RETRY_S
                    continue
                self._end(failure)


def failure_of(error: Exception, what: str) -> EverstateError:
    """What subscribers get for an error; after one that nothing expected they may come back."""
    if isinstance(error, EverstateError) and not isinstance(error, StatementRefused):
        return error
    return Unavailable(f"{what}: {type(error).__name__}: {error}")
