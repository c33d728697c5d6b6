"""Calls a handler's function for changes, many of them in one transaction."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from typing import Any, Final

from everstate.changes import Change, ChangeCodec
from everstate.closing import Closing
from everstate.declarations.handlers import Context, Prepared
from everstate.errors import ChangeParked, InvalidChange, StatementRefused
from everstate.errors.base import described
from everstate.handling.tables import WAITS, HandlerTables, Item, Owned
from everstate.log.attempt import Attempt, TookTooLong
from everstate.postgres import Connection, Connections, has_ended
from everstate.telemetry import RateLimitedLogger

_failed: Final = RateLimitedLogger(logging.getLogger(__name__), logging.ERROR)

_PART_MAX: Final = 200
_PART_S: Final = 0.3
"""For how long calls of one transaction begin: later ones are in the next."""
_REASON_MAX: Final = 4_000


class _CallFailed(Exception):
    """The project's function raised an error."""


class FunctionCaller(Closing):
    """Calls one handler's function; threads may share it.

    Calls share a transaction, so that small effects are quick. When one fails, or the commit, after
    the connection was used, all are rolled back and repeated, each in a transaction of its own.
    """

    def __init__(self, tables: HandlerTables) -> None:
        self._tables, self._handler = tables, tables.handler
        given = self._handler.function
        if isinstance(given, Prepared):
            given = given(tables.config, self._handler)
        self._function = given
        self._codec = ChangeCodec(self._handler.entity_type)
        self._connections = Connections(tables.opened, self._handler.concurrency)
        self._beginning = threading.Lock()

    def close(self) -> None:
        """Close the connections, and end the loop of async functions."""
        self._connections.close()
        if "_loop" in self.__dict__:
            self._loop.call_soon_threadsafe(self._loop.stop)
            del self._loop

    def run(
        self, owned: Owned, items: Sequence[Item], most_s: float, part: int = _PART_MAX
    ) -> None:
        """Handle changes of some lanes in their order, for some seconds; raises Unavailable."""
        until_s = time.monotonic() + most_s
        while items and not owned.is_lost and time.monotonic() < until_s:
            count = self._transact(owned, items[:part])
            failed = {each.key for each in items[:count] if each.reason}
            # Parked changes behind one that failed again stay as they are.
            items = [each for each in items[count:] if each.spot or each.key not in failed]

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._tables.errors(), self._connections.lend() as found, found.transaction():
            yield found

    def _transact(self, owned: Owned, items: Sequence[Item]) -> int:
        """Call for changes, and commit; how many are finished, or dropped until the next round."""
        done, used = list[Item](), threading.Event()
        attempt = Attempt(batch_s=2 * self._handler.timeout_s)
        try:
            with self._transaction() as connection:
                call, pid = partial(self._call, connection, used), [connection.info.backend_pid]
                try:
                    attempt.run(lambda: self._call_all(owned, items, done, attempt, call))
                except (TookTooLong, _CallFailed) as failure:
                    if isinstance(failure, TookTooLong):
                        self.__dict__.pop("_loop", None)  # the call may block it for ever
                    # The call, or a thread of it, may go on with the connection and its locks.
                    if not connection.closed:
                        with closing(connection), self._tables.opened() as other:
                            other.execute("SELECT pg_terminate_backend(%s)", pid)
                    raise
                self._tables.settle(connection, owned, done)
        except (_CallFailed, TookTooLong, StatementRefused) as failure:
            if used.is_set() and len(items) > 1:
                again = items[: len(done) + 1]
                self.run(owned, again, math.inf, part=1)
                return len(again)
            if used.is_set():
                done.clear()
            elif isinstance(failure, StatementRefused):
                raise
            done.append(self._refused(owned, items[len(done)], failure))
            with self._transaction() as connection:
                self._tables.settle(connection, owned, done)
        for item in done:
            item.is_finished = True
            owned.spots[item.lane] = item.spot or owned.spots[item.lane]
        return len(done)

    def _call_all(
        self, owned: Owned, items: Sequence[Item], done: list[Item], attempt: Attempt, call: Any
    ) -> None:
        """Call for one change after the other, in the thread of the attempt."""
        handler = self._handler
        until_s = time.monotonic() + min(_PART_S, handler.timeout_s / 2)
        for item in items:
            if owned.is_lost or time.monotonic() > until_s:
                return
            try:
                change = self._codec.decode(item.value)
            except InvalidChange as error:
                raise _CallFailed(error.message) from error
            states = change.original, change.current
            if handler.when is None or handler.when.fires(handler.entity_type, *states):
                if item.spot is not None and item.key in owned.blocked:
                    item.reason = WAITS
                else:
                    attempt.call(None, call, change, item)
            done.append(item)

    def _call(
        self, connection: Connection, used: threading.Event, change: Change[Any], item: Item
    ) -> None:
        """Call the function; raises _CallFailed for whatever it raises."""
        call_id = partial(self._handler.id_of, change.id)
        context = Context(connection, used, call_id, item.attempts + 1, item.value)
        try:
            result = self._function(change, context)
            if inspect.iscoroutine(result):
                # It is cancelled before the attempt is given up.
                limited = asyncio.wait_for(result, 0.9 * self._handler.timeout_s)
                with self._beginning:
                    loop = self._loop
                asyncio.run_coroutine_threadsafe(limited, loop).result()
            if used.is_set() and has_ended(connection):
                raise ValueError("it ended the transaction of context.connection")
        except BaseException as cause:
            raise _CallFailed(described(cause)) from cause

    def _refused(self, owned: Owned, item: Item, failure: Exception) -> Item:
        """The change with the reason why it is parked; the next ones of its key wait behind it."""
        handler, kept = self._handler, str(failure)[:_REASON_MAX].replace("\0", "")
        item.is_final = isinstance(failure.__cause__, ChangeParked)
        item.reason = kept.encode("utf-8", "replace").decode()
        _failed.log("handler %s: %s failed: %s", handler.title, item.key, item.reason)
        is_retried = not item.is_final and handler.pause_s(item.attempts + 1) is not None
        if handler.on_parked == "wait" or is_retried:
            owned.blocked.add(item.key)
        return item

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()

        def run() -> None:
            with closing(loop):
                loop.run_forever()

        threading.Thread(target=run, name="async handlers", daemon=True).start()
        return loop
