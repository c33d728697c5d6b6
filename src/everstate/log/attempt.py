"""One attempt at a batch: how long the project's code may take in it, and what is refused."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeAlias, TypeVar

from confluent_kafka import Message

RecordPlace = tuple[str | None, int | None, int | None]
"""Topic, partition and offset of a record."""

Incoming: TypeAlias = Message
"""A record as the driver's message: ``key()``, ``value()``, ``headers()``, ``partition()``, …"""

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
    function returns, before it can change anything. A function that keeps the interpreter's lock
    for ever (in C) stops the whole process, and this too. Cost: a thread a batch, some 0.1 ms.
    """

    def __init__(
        self, refused: Mapping[RecordPlace, str] | None = None, *, batch_s: float = math.inf
    ) -> None:
        """``batch_s``: limit for the calls of a batch together; one may take half of it."""
        self._refused = refused or {}
        self._batch_s, self._call_s = batch_s, batch_s / 2
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._busy: tuple[RecordPlace, float] | None = None
        self._is_over = False

    def refused(self, message: Incoming) -> str | None:
        """Why nothing can follow from a record; ``None``: it can be processed."""
        return self._refused.get(place_of(message)) if self._refused else None

    def call(
        self,
        message: Incoming,
        function: Callable[_P, _R],
        *arguments: _P.args,
        **named: _P.kwargs,
    ) -> _R:
        """Call code of the project for a record."""
        with self._lock:
            now = time.monotonic()
            if now - self._began > self._batch_s:
                raise TookTooLong(f"a batch took longer than {self._batch_s:g} s")
            self._busy = place_of(message), now
        try:
            return function(*arguments, **named)
        finally:
            with self._lock:
                self._busy = None
                if self._is_over:
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
        # A function that works, and does not wait, ends here.
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_LeftBehind))
        raise TookTooLong(f"its code took longer than {self._call_s:g} s", place)


def place_of(message: Incoming) -> RecordPlace:
    """Where a record is in the log."""
    return message.topic(), message.partition(), message.offset()
