"""A value that takes long to find out: asked once for all pages, and kept for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
FRESH_S: Final = 2.0


class FreshValue(Generic[T]):
    """Asks again when its value is older than two seconds, by default; one question at a time.

    However many pages look, the servers are asked as often as by one. Used in one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], fresh_s: float | None = None) -> None:
        self._ask, self._fresh_s = ask, FRESH_S if fresh_s is None else fresh_s
        self._value: T | None = None
        self._error: Exception | None = None
        """Why the last question was not answered; ``None``: it was."""
        self._at = self._found_at = -self._fresh_s
        self._asking: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the value was found."""
        return time.monotonic() - self._found_at

    async def look(self, wait_s: float | None = None) -> T | None:
        """The value; after ``wait_s``, if given, the last one, ``None`` if there is none yet.

        Raises the error of the question, also to those who look after it came.
        """
        if time.monotonic() - self._at >= self._fresh_s:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._asked())
            await asyncio.wait([self._asking], timeout=wait_s)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    async def _asked(self) -> None:
        try:
            self._value = await self._ask()
            self._error, self._found_at = None, time.monotonic()
        except Exception as error:
            self._error = error
        finally:
            self._at, self._asking = time.monotonic(), None
