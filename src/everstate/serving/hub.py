"""One stream of an entity type's accepted changes for any number of subscribers of this process.

The hub reads the log once and hands each change to the subscriptions that want it. It remembers
the newest changes, so that a subscriber that was disconnected for a moment continues from memory.
What it missed before that, a subscriber reads by a stream of its own
(:class:`~everstate.serving.changes.Changes`) up to exactly where its subscription begins. Each
partition's changes have an order, so the spot of a change says whether it was handed over already.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from everstate.changes.tokens import LogPosition, Partition, Spot
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.serving.changes import NOW, Changes, Delivery
from everstate.serving.shared_reader import SharedReader, failure_of
from everstate.views.project import Project

logger = logging.getLogger("everstate.serving")

_MEMORY_CHANGES: Final = 20_000
_MEMORY_BYTES: Final = 32 * 1_048_576
_WAITING_BYTES: Final = 32 * 1_048_576
"""Most bytes of changes that wait for one subscriber, if it is more than one change."""


class Subscription:
    """The changes for one subscriber since it began: at most ``limit``, and 32 MiB, wait."""

    def __init__(
        self,
        spots: Mapping[Partition, Spot],
        wants: Callable[[Delivery], bool],
        wake: Callable[[], None],
        limit: int,
    ) -> None:
        self.spots = dict(spots)
        """Where it begins: everything behind it is handed over."""
        self.goes_on = False
        """Whether it begins where it was asked to, and not from now on."""
        self._wants, self._wake, self._limit = wants, wake, limit
        self._waiting: deque[Delivery] = deque()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._dropped = 0
        self.failure: EverstateError | None = None
        """Why it cannot be said which changes are wanted; ``None``: it can."""

    def take(self) -> tuple[list[Delivery], int]:
        """The changes that wait, oldest first, and how many were dropped before the first one."""
        with self._lock:
            taken, dropped = list(self._waiting), self._dropped
            self._waiting.clear()
            self._waiting_bytes = self._dropped = 0
        return taken, dropped

    @property
    def is_overrun(self) -> bool:
        """Whether changes were dropped since the last :meth:`take`."""
        with self._lock:
            return self._dropped > 0

    @property
    def has_waiting(self) -> bool:
        """Whether changes wait to be taken."""
        with self._lock:
            return bool(self._waiting)

    def offer(self, delivery: Delivery) -> None:
        """Hand over a change if it is wanted; if too many wait, the oldest ones are dropped.

        A change of which it cannot be said whether it is wanted ends this subscription only.
        """
        if self.failure is not None:
            return
        try:
            if not self._wants(delivery):
                return
        except Exception as error:
            logger.exception("a subscription ends: whether it wants a change cannot be said")
            self.failure = failure_of(error, "a subscription ended by an error")
            self._wake()
            return
        with self._lock:
            is_asleep = not self._waiting
            self._waiting.append(delivery)
            self._waiting_bytes += _bytes_of(delivery)
            while len(self._waiting) > self._limit or (
                self._waiting_bytes > _WAITING_BYTES and len(self._waiting) > 1
            ):
                self._waiting_bytes -= _bytes_of(self._waiting.popleft())
                self._dropped += 1
        if is_asleep:
            self._wake()


class ChangeHub(SharedReader):
    """Reads the accepted changes of one entity type while it has subscriptions. Thread-safe.

    Its first subscriber opens a consumer, about 50 ms.
    """

    def __init__(self, config: Config, project: Project, entity: str) -> None:
        super().__init__(f"the changes of {entity}")
        self._make = partial(Changes, config, project, entity)
        self._stream: Changes
        self._is_cut_off = False
        """Whether the stream has been read before, and has failed since."""
        self._spots: dict[Partition, Spot] = {}
        self._memory: deque[Delivery] = deque()
        self._memory_bytes = 0
        self._memory_begins: dict[Partition, Spot] = {}
        """The memory has all changes behind these spots."""
        self._by_key: dict[str | None, list[Subscription]] = {}
        """Subscriptions to one key, and under ``None`` those to all keys."""
        self._by_wake: dict[Callable[[], None], tuple[str | None, Subscription]] = {}

    def subscribe(
        self,
        wake: Callable[[], None],
        *,
        key: str | None = None,
        wants: Callable[[Delivery], bool] = lambda _: True,
        limit: int = 1_000,
        since: LogPosition | None = None,
    ) -> Subscription:
        """Begin to hand over changes of one key or of all, those from now on.

        ``wake``: of a subscriber that has joined; called when there is something to take.
        ``since``: those behind this position, if the hub remembers them and not more than ``limit``
        were missed; :attr:`Subscription.goes_on` says so.
        """
        with self._lock:
            made = Subscription(self._spots, wants, wake, limit)
            if since is not None and since.log == self._stream.mark:
                missed = self._missed(since.spots, key, wants)
                if missed is not None and len(missed) <= limit:
                    made.spots, made.goes_on = dict(since.spots), True
                    for each in missed:
                        made.offer(each)
            self._by_key.setdefault(key, []).append(made)
            self._by_wake[wake] = key, made
        return made

    def leave(self, wake: Callable[[], None]) -> None:
        """End the subscription of a subscriber."""
        with self._lock:
            key, subscription = self._by_wake.pop(wake, (None, None))
            if subscription is not None:
                self._by_key[key].remove(subscription)
                if not self._by_key[key]:
                    del self._by_key[key]
        super().leave(wake)

    def _missed(
        self, since: Mapping[Partition, Spot], key: str | None, wants: Callable[[Delivery], bool]
    ) -> list[Delivery] | None:
        """Wanted changes behind these spots; ``None``: the hub does not remember all of them."""
        begins = self._memory_begins
        if since.keys() != begins.keys() or any(since[p] < begins[p] for p in begins):
            return None
        return [
            each
            for each in self._memory
            if each.spot > since[each.partition] and key in (None, key_of(each)) and wants(each)
        ]

    def reached(self, subscription: Subscription) -> Mapping[Partition, Spot]:
        """Spots up to which all that a subscription wants was taken; none while changes wait.

        Who wants few changes comes back with these, and not with where it began: the changes since
        then may be more than the hub remembers.
        """
        with self._lock:
            return {} if subscription.has_waiting else dict(self._spots)

    def position_of(self, spots: Mapping[Partition, Spot]) -> LogPosition:
        """The position of these spots in this log, once somebody has joined."""
        return LogPosition(self._stream.mark, spots)

    def _open(self) -> None:
        self._stream = self._make(since=NOW)
        self._spots = self._stream.spots
        self._memory_begins = dict(self._spots)

    def _read(self) -> float:
        if self._is_cut_off:
            self._stream = self._make(since=self._stream.token)
            if self._stopped.is_set():
                self._stream.close()
                return 0.0
        self._is_cut_off = True
        for delivery in self._stream:
            with self._lock:
                self._spots[delivery.partition] = delivery.spot
                self._remember(delivery)
                for key in (key_of(delivery), None):
                    for each in self._by_key.get(key, ()):
                        each.offer(delivery)
        return 0.0

    def _leave_source(self) -> None:
        self._stream.close()

    def _remember(self, delivery: Delivery) -> None:
        self._memory.append(delivery)
        self._memory_bytes += _bytes_of(delivery)
        while len(self._memory) > _MEMORY_CHANGES or self._memory_bytes > _MEMORY_BYTES:
            oldest = self._memory.popleft()
            self._memory_bytes -= _bytes_of(oldest)
            self._memory_begins[oldest.partition] = oldest.spot


def _bytes_of(delivery: Delivery) -> int:
    return len(delivery.record.value or b"")


def key_of(delivery: Delivery) -> str:
    """The entity's key."""
    return (delivery.record.key or b"").decode(errors="replace")
