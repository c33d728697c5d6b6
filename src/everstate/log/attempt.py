"""One attempt at a batch: how long the project's code may take in it, and what is refused."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:  # views call this, too, and load no Kafka for it
    from confluent_kafka import Message

RecordPlace = tuple[str, int, int]
"""Topic, partition and offset of a record."""

Incoming: TypeAlias = "Message"
"""A record as the driver's message: ``key()``, ``value()``, ``headers()``, ``partition()``, …"""

_AGAIN_S: Final = 1.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


class TookTooLong(Exception):
    """The project's code took too long; ``place`` is the record in hand, if one call was slow."""

    def __init__(self, reason: str, place: RecordPlace | None = None) -> None:
        super().__init__(reason)
        self.reason, self.place = reason, place


class _LeftBehind(BaseException):
    """Ends the thread of an attempt that was given up."""


class Attempt:
    """Runs the work on a batch in a thread of its own, which a slow function cannot hold up.

    Python cannot interrupt a function that waits. So its thread is left behind: it ends when the
    function returns, before it can change anything. A function that works gets an exception, again
    each second while it catches them. One that keeps the interpreter's lock for ever (in C) stops
    the whole process, and this too. Cost: a thread a batch, some 0.1 ms.
    """

    def __init__(
        self, refused: Mapping[RecordPlace, str] | None = None, *, batch_s: float = math.inf
    ) -> None:
        """``batch_s``: limit for the calls of a batch together; one may take half of it."""
        self._refused = refused or {}
        self._batch_s, self._call_s = batch_s, batch_s / 2
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._busy: tuple[RecordPlace | None, float] | None = None
        self._is_over = False

    def refused(self, message: Incoming) -> str | None:
        """Why nothing can follow from a record; ``None``: it can be processed."""
        return self._refused.get(place_of(message)) if self._refused else None

    def call(
        self,
        message: Incoming | None,
        function: Callable[_P, _R],
        *arguments: _P.args,
        **named: _P.kwargs,
    ) -> _R:
        """Call code of the project, for a record if there is one."""
        with self._lock:
            if self._is_over:
                raise _LeftBehind
            now = time.monotonic()
            if now - self._began > self._batch_s:
                raise TookTooLong(f"a batch took longer than {self._batch_s:g} s")
            self._busy = None if message is None else place_of(message), now
        try:
            return function(*arguments, **named)
        finally:
            with self._lock:
                self._busy = None
                if self._is_over:
                    _interrupt(threading.get_ident(), None)
                    raise _LeftBehind

    def run(self, work: Callable[[], None]) -> None:
        """Run the work on the batch, which uses :meth:`call`; raises its error, or TookTooLong."""
        ended, failures = threading.Event(), list[BaseException]()

        def body() -> None:
            try:
                work()
            except BaseException as failure:
                failures.append(failure)
            finally:
                ended.set()

        thread = threading.Thread(target=body, name=threading.current_thread().name, daemon=True)
        thread.start()
        try:
            while not ended.wait(min(1.0, self._call_s / 20)):
                self._check(thread)
        finally:
            with self._lock:
                self._is_over = True
        if failures:
            raise failures[0]

    def _check(self, thread: threading.Thread) -> None:
        """Give the attempt up when the present call is slow."""
        with self._lock:
            if self._busy is None or time.monotonic() - self._busy[1] <= self._call_s:
                return
            self._is_over = True
            place = self._busy[0]
        threading.Thread(target=self._end, args=[thread], daemon=True).start()
        raise TookTooLong(f"its code took longer than {self._call_s:g} s", place)

    def _end(self, thread: threading.Thread) -> None:
        """Interrupt the call until it ends."""
        while thread.is_alive():
            with self._lock:  # which the call takes to end: no other code is interrupted
                if self._busy is None:
                    return
                _interrupt(thread.ident or 0, _LeftBehind)
            thread.join(_AGAIN_S)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an error at its next step; ``None``: it shall raise none."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def within(
    limit_s: float, function: Callable[_P, _R], *arguments: _P.args, **named: _P.kwargs
) -> _R:
    """Call code of the project once; raises its error, or TookTooLong after ``limit_s``."""
    attempt, results = Attempt(batch_s=2 * limit_s), list[_R]()
    attempt.run(lambda: results.append(attempt.call(None, function, *arguments, **named)))
    return results[0]


def place_of(message: Incoming) -> RecordPlace:
    """Where a record is in the log."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return topic, partition, offset
