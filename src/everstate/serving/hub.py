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
from typing import Final

from everstate.changes.tokens import LogPosition, Partition, Spot
from everstate.config import Config
from everstate.errors import EverstateError, StatementRefused, Unavailable
from everstate.serving.changes import NOW, Changes, Delivery
from everstate.views.project import Project

logger = logging.getLogger("everstate.serving")

_RETRY_S: Final = 1.0
_LINGER_S: Final = 30.0
"""The hub keeps reading so long after its last subscription, for those that come back."""
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
        """Why no more changes come; ``None``: they do."""

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
            self.end(_failure(error, "a subscription"))
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

    def end(self, failure: EverstateError) -> None:
        """Hand over no more changes, because of ``failure``."""
        self.failure = failure
        self._wake()


class ChangeHub:
    """Reads the accepted changes of one entity type while it has subscriptions. Thread-safe."""

    def __init__(self, config: Config, project: Project, entity: str) -> None:
        self._config, self._project, self._entity = config, project, entity
        self._lock = threading.Lock()
        self._stream: Changes | None = None
        self._newest: Changes | None = None
        """The newest stream, also when it is closed."""
        self._spots: dict[Partition, Spot] = {}
        self._memory: deque[Delivery] = deque()
        self._memory_bytes = 0
        self._memory_begins: dict[Partition, Spot] = {}
        """The memory has all changes behind these spots."""
        self._by_key: dict[str | None, list[Subscription]] = {}
        """Subscriptions to one key, and under ``None`` those to all keys."""
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None

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

        ``since``: those behind this position, if the hub remembers them and not more than ``limit``
        were missed; :attr:`Subscription.goes_on` says so.
        ``wake`` is called from another thread when there is something to take; it must not block.
        Raises as :class:`~everstate.serving.changes.Changes` does. Cost: the first subscription
        opens a consumer, about 50 ms.
        """
        with self._lock:
            if self._thread is not None and not self._thread.is_alive():
                # It has not begun, for lack of threads: its subscribers must not wait for it.
                self._end(Unavailable(f"the changes of {self._entity} are not read."))
            if self._stream is None:
                self._stream = Changes(self._config, self._project, self._entity, since=NOW)
                self._newest = self._stream
                self._spots = self._stream.spots
                self._memory.clear()
                self._memory_bytes, self._memory_begins = 0, dict(self._spots)
                self._thread = threading.Thread(
                    target=self._run, args=[self._stream], name=f"hub-{self._entity}", daemon=True
                )
                self._thread.start()
            made = Subscription(self._spots, wants, wake, limit)
            if since is not None and since.log == self._stream.mark:
                missed = self._missed(since.spots, key, wants)
                if missed is not None and len(missed) <= limit:
                    made.spots, made.goes_on = dict(since.spots), True
                    for each in missed:
                        made.offer(each)
            self._by_key.setdefault(key, []).append(made)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return made

    def leave(self, subscription: Subscription) -> None:
        """End a subscription; a while after the last one, the hub stops reading."""
        with self._lock:
            for key, listed in list(self._by_key.items()):
                if subscription in listed:
                    listed.remove(subscription)
                    if not listed:
                        del self._by_key[key]
            if not self._by_key and self._stream is not None:
                self._timer = threading.Timer(_LINGER_S, self._stop_unused)
                self._timer.daemon = True
                self._timer.start()

    def _stop_unused(self) -> None:
        with self._lock:
            if not self._by_key:
                self._stop()

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

    def token_of(self, spots: Mapping[Partition, Spot]) -> str:
        """The token of a position in this log, once there was a subscription."""
        # A subscription may just have begun when the hub is closed, and its stream with it.
        assert self._newest is not None, "there was a subscription"
        return self._newest.token_of(spots)

    def position_of(self, spots: Mapping[Partition, Spot]) -> LogPosition:
        """The position of these spots in this log, once there was a subscription."""
        assert self._newest is not None, "there was a subscription"
        return LogPosition(self._newest.mark, spots)

    def close(self) -> None:
        """End all subscriptions."""
        with self._lock:
            self._end(Unavailable("the server is being stopped."))
        thread = self._thread
        if thread is not None:
            thread.join(5.0)

    def _stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _end(self, failure: EverstateError) -> None:
        for listed in self._by_key.values():
            for each in listed:
                each.end(failure)
        self._by_key.clear()
        self._stop()

    def _run(self, stream: Changes) -> None:
        try:
            self._read(stream)
        except Exception as error:
            # Whatever it is: a reader that ended in silence would leave its subscribers waiting.
            logger.exception("the changes of %s cannot be read; subscriptions end", self._entity)
            with self._lock:
                if self._thread is threading.current_thread():
                    self._end(_failure(error, f"the subscriptions of {self._entity}"))

    def _read(self, stream: Changes) -> None:
        while True:
            try:
                for delivery in stream:
                    self._hand_over(stream, delivery)
                return
            except StatementRefused:
                raise
            except EverstateError as error:
                if not error.retryable:
                    with self._lock:
                        if self._stream is stream:
                            self._end(error)
                    return
                logger.warning("subscriptions of %s wait: %s", self._entity, error)
            again = self._again(stream)
            if again is None:
                return
            stream = again

    def _hand_over(self, stream: Changes, delivery: Delivery) -> None:
        with self._lock:
            if self._stream is not stream:
                return
            self._spots[delivery.partition] = delivery.spot
            self._remember(delivery)
            key = key_of(delivery)
            for each in (*self._by_key.get(key, ()), *self._by_key.get(None, ())):
                each.offer(delivery)

    def _remember(self, delivery: Delivery) -> None:
        self._memory.append(delivery)
        self._memory_bytes += _bytes_of(delivery)
        while len(self._memory) > _MEMORY_CHANGES or self._memory_bytes > _MEMORY_BYTES:
            oldest = self._memory.popleft()
            self._memory_bytes -= _bytes_of(oldest)
            self._memory_begins[oldest.partition] = oldest.spot

    def _again(self, failed: Changes) -> Changes | None:
        """A new stream that continues where the failed one stopped; ``None``: nobody reads."""
        waiting = threading.Event()
        while not waiting.wait(_RETRY_S):
            with self._lock:
                if self._stream is not failed:
                    return None
                try:
                    token = failed.token_of(self._spots)
                    made = Changes(self._config, self._project, self._entity, since=token)
                except EverstateError as error:
                    if not error.retryable:
                        self._end(error)
                        return None
                    continue
                self._stream = self._newest = made
                return made
        return None


def _bytes_of(delivery: Delivery) -> int:
    return len(delivery.record.value or b"")


def _failure(error: Exception, what: str) -> EverstateError:
    """What subscribers get for an error; after one that nothing expected they may come back."""
    if isinstance(error, EverstateError) and not isinstance(error, StatementRefused):
        return error
    return Unavailable(f"{what} ended by an error: {type(error).__name__}: {error}")


def key_of(delivery: Delivery) -> str:
    """The entity's key."""
    return (delivery.record.key or b"").decode(errors="replace")
