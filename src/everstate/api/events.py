"""The events of subscriptions, and what subscribers share: no web framework here."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Generic, TypeVar

import orjson

from everstate.errors import EverstateError, Unauthenticated, Unavailable
from everstate.serving.shared_reader import SharedReader

T = TypeVar("T")
R = TypeVar("R", bound=SharedReader)
H = TypeVar("H")
W = TypeVar("W")
InThread = Callable[[Callable[[], T]], Awaitable[T]]
_BEAT_S: Final = 15.0
"""A subscription without changes for so long gets its position, and proxies see that it lives."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a subscription."""

    name: str
    """``change``, ``current``, ``live``, ``dropped``, ``slow``, ``snapshot``, ``changed``,
    ``error``; ``""``: only a new position."""
    data: str = ""
    """JSON."""
    token: str | None = None
    """Continue after this event with it; ``None``: after the event before."""
    failure: EverstateError | None = None
    """Of an `error`."""


EventBatches = AsyncGenerator[Sequence[StreamEvent], None]
"""Events in order, in lists of those that are ready together: a server sends a list at once.

Whoever has one closes it; see :meth:`Subscriber.opened`."""


class SharedReaders(Generic[R]):
    """The readers of what is followed, by name: one for all subscribers. Used by one event loop."""

    def __init__(self, make: Callable[[str], R]) -> None:
        self._make = make
        self._readers: dict[str, R] = {}
        self._is_closed = False

    def close(self) -> None:
        """End all subscriptions; their subscribers get an event that says so."""
        self._is_closed = True
        for reader in list(self._readers.values()):
            reader.close()

    async def joined(self, name: str, wake: Callable[[], None], work: InThread[Any]) -> R:
        """The reader of a name, which a subscriber has joined.

        Raises Unavailable when the server is being stopped, and what :meth:`SharedReader.join`
        raises.
        """
        while not self._is_closed:
            reader = self._readers.setdefault(name, self._make(name))
            if await work(partial(reader.join, wake)):
                return reader
            if self._readers.get(name) is reader:
                del self._readers[name]
        raise Unavailable("the server is being stopped.")


class Subscriber(ABC, Generic[H, W]):
    """One subscription, from its beginning to its end. Used by one event loop."""

    def __init__(self, home: H, wish: W, work: InThread[Any]) -> None:
        """``wish``: what is asked for; ``work`` runs a blocking call in a thread."""
        self.home, self.wish, self.work = home, wish, work
        self.awake = asyncio.Event()
        """Set when there is something new, by :meth:`wake`."""
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Say from another thread that there is something new."""
        self._loop.call_soon_threadsafe(self.awake.set)

    @abstractmethod
    async def begin(self) -> None:
        """Join what is read, or raise why it cannot be followed."""

    @abstractmethod
    def events(self) -> EventBatches:
        """Its events; an EverstateError becomes the last one."""

    @abstractmethod
    def leave(self) -> None:
        """End it."""

    async def opened(self) -> EventBatches:
        """Begin; out: its events, which end when they are closed or fail; then it is left.

        A generator that has not begun does nothing when it is closed: the subscription of a client
        that leaves before its first event would stay. So these have begun.
        """
        await self.begin()
        begun = self._until_left()
        await anext(begun)
        return begun

    async def _until_left(self) -> EventBatches:
        try:
            yield []
            async with aclosing(self.events()) as events:
                async for batch in events:
                    yield batch
        except EverstateError as error:
            yield [failed(error)]
        finally:
            self.leave()

    async def is_awake(self) -> bool:
        """Wait until there is something new; false: it is time for a sign of life."""
        return await before_beat(self.awake.wait())


async def before_beat(waiting: Awaitable[object]) -> bool:
    """Wait for something; false: it takes so long that it is time for a sign of life."""
    try:
        async with asyncio.timeout(_BEAT_S):
            await waiting
    except TimeoutError:
        return False
    return True


async def while_valid(batches: EventBatches, expires: datetime | None) -> EventBatches:
    """The events until the subscriber's token expires, and then an `error`; ``None``: never."""
    async with aclosing(batches):
        while True:
            left_s = None if expires is None else (expires - datetime.now(UTC)).total_seconds()
            try:
                async with asyncio.timeout(left_s):
                    batch = await anext(batches)
            except StopAsyncIteration:
                return
            except TimeoutError:
                yield [failed(Unauthenticated("the token has expired."))]
                return
            yield batch
            # A connection that takes a batch at once does not wait: without this, others of the
            # loop would have no turn until all batches are sent, nor would a lost connection.
            await asyncio.sleep(0)


def failed(error: EverstateError) -> StreamEvent:
    """The event that says why a subscription ends."""
    said = {"type": f"urn:everstate:error:{type(error).__name__}", "detail": error.public}
    return StreamEvent("error", orjson.dumps(said).decode(), failure=error)
