"""A value that takes long to find out: asked once for all pages, and kept for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
FRESH_S: Final = 2.0


class FreshValue(Generic[T]):
    """Asks again when its value is older than two seconds; one question at a time.

    However many pages look, the servers are asked as often as by one. Used in one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._value: T | None = None
        self._at = -FRESH_S
        self._asking: asyncio.Task[T] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the value was found."""
        return time.monotonic() - self._at

    async def look(self, wait_s: float) -> T | None:
        """The value; after ``wait_s`` the last one, ``None`` if there is none yet."""
        if time.monotonic() - self._at < FRESH_S:
            return self._value
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._asked())
        asking = self._asking
        done, _ = await asyncio.wait([asking], timeout=wait_s)
        return asking.result() if done else self._value

    async def _asked(self) -> T:
        try:
            self._value = await self._ask()
            self._at = time.monotonic()
            return self._value
        finally:
            self._asking = None
