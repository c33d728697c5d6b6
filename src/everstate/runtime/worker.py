"""What a part does: a worker is opened, makes steps until it is stopped, and is closed.

Here is the only loop of all parts: when the next step comes, which errors are retried after which
pause, what the state file and the log say meanwhile, and how a part ends.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Final

from everstate.closing import Closing
from everstate.errors import EverstateError
from everstate.parts import PartRun, waits, works

_LOOK_S: Final = 1.0
_NEVER: Final = threading.Event()


class Worker(Closing):
    """A part's work: open, step, close; :meth:`run` makes the steps.

    A worker that is run by itself need not be opened before, nor stepped. One thread at a time.
    """

    doing: str
    """What it does, for the log: "cleaning of shop"."""
    idle_s: float = 1.0
    """Pause after a step that found nothing to do."""
    retry_s: tuple[float, float] = (1.0, 5.0)
    """The first pause after an error that may pass, and the longest: the pauses double."""
    begins_idle = False
    """Whether a pause of :attr:`idle_s` comes before the first step, too."""
    stop: threading.Event = _NEVER
    """Set when :meth:`run` is asked to end; a long step may look at it."""

    def open(self) -> None:
        """Prepare the steps; called once by :meth:`run`, and again while its errors may pass."""
        return

    @abstractmethod
    def step(self) -> object:
        """Do what is ready; a true value says that more may be ready at once.

        After an error that may pass, the next step does again what this one did not do.
        """

    def close(self) -> None:
        """Close the connections; a worker that has none needs none of this."""
        return

    def pause_s(self, done: object) -> float:
        """Seconds until the next step after one that returned ``done``."""
        return 0.0 if done else self.idle_s

    def may_pass(self, error: EverstateError) -> bool:
        """Whether an error may be gone at the next step."""
        return error.retryable

    def has_recovered(self, done: object) -> bool:
        """Whether a step that returned ``done`` shows that the reason of the last error is gone."""
        return True

    def failed(self, error: EverstateError) -> None:
        """Drop what the next step is to make anew; called after each error."""
        return

    def leave(self) -> None:
        """Release what belongs to the thread of :meth:`run`; called at its end."""
        return

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set; an error that may pass is retried, another one is raised.

        Each pause after an error is logged, and is the state of this thread's part until a step
        succeeds. Cost: 1 µs for each step.
        """
        self.stop = stop
        try:
            self._repeat(stop)
        finally:
            self.leave()

    def _repeat(self, stop: threading.Event) -> None:
        log = logging.getLogger(type(self).__module__)
        first_s, longest_s = self.retry_s
        next_s, is_open = first_s, False
        pause_s = self.idle_s if self.begins_idle else 0.0
        while not (stop.wait(min(pause_s, threading.TIMEOUT_MAX)) if pause_s else stop.is_set()):
            try:
                if not is_open:
                    self.open()
                    is_open = True
                done = self.step()
            except EverstateError as error:
                self.failed(error)
                if not self.may_pass(error):
                    raise
                log.warning("%s is retried in %.1f s: %s", self.doing, next_s, error)
                waits(error, next_s)
                pause_s, next_s = next_s, min(2 * next_s, longest_s)
            else:
                works()
                pause_s = self.pause_s(done)
                if self.has_recovered(done):
                    next_s = first_s


class Repeated(Worker):
    """Calls a function again and again, with a pause in between; one that needs no object."""

    def __init__(
        self,
        doing: str,
        step: Callable[[], object],
        idle_s: float,
        *,
        retry_s: tuple[float, float] = Worker.retry_s,
        begins_idle: bool = False,
    ) -> None:
        """``step`` and the others as in :class:`Worker`; its errors that may pass are retried."""
        self.doing, self._call = doing, step
        self.idle_s, self.retry_s, self.begins_idle = idle_s, retry_s, begins_idle

    def step(self) -> object:
        """Call the function."""
        return self._call()


def part_of(make: Callable[[], Worker], *, after: threading.Event | None = None) -> PartRun:
    """The part that makes a worker at each start, runs it, and closes it.

    ``after``: an event without which it cannot begin, such as that tables were created.
    """

    def run(stop: threading.Event) -> None:
        while after is not None and not after.wait(_LOOK_S):
            if stop.is_set():
                return
        with make() as worker:
            worker.run(stop)

    return run
