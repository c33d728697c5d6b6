"""Handlers in a process of its own, to be killed and stopped; or with a planted defect."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import psycopg

from everstate.config import load
from everstate.handling import calling
from everstate.handling.calling import FunctionCaller
from everstate.handling.tables import HandlerTables, Item, Owned
from everstate.handling.worker import HandlerWorker
from everstate.log import members
from everstate.postgres import Connection
from handler_cases import INSERT, remember
from reading_cases import orders_app

members.SESSION_S = 6.0  # type: ignore[misc]
_rng = random.Random(os.getpid())
_FAILS = float(os.environ.get("FAILS", "0"))
"""How often a call stops or kills the whole process."""


def inside(change: Any, context: Any) -> None:
    """An effect in the transaction of the position."""
    remember(context, change, "inside")
    if _rng.random() < _FAILS:
        stops = sys.argv[-1] == "no compare-and-swap"
        os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)


@cache
def _own(_thread: int) -> psycopg.Connection[Any]:
    return psycopg.connect(os.environ["VIEWS_DSN"], autocommit=True)


def outside(change: Any, context: Any) -> None:
    """An effect that does not share the transaction of the position."""
    given = ["outside", context.id, change.key, change.version, context.attempt]
    _own(0).execute(INSERT.encode(), given)


def plant(defect: str) -> None:
    """Break what the checker must see."""
    take, call_all = HandlerTables.take, FunctionCaller._call_all
    if defect == "position before effect":

        def early(self: FunctionCaller, owned: Owned, items: Sequence[Item], *given: Any) -> None:
            with self._tables.connected() as connection, connection.transaction():
                self._tables.settle(connection, owned, items)
            call_all(self, owned, items, *given)

        FunctionCaller._call_all = early  # type: ignore[assignment,method-assign]
    elif defect == "no compare-and-swap":

        def same_epoch(self: HandlerTables, connection: Connection, number: int) -> Owned:
            connection.execute(
                "UPDATE everstate_handlers.position SET epoch = -1"
                " WHERE handler = %s AND partition = %s",
                [self.id, number],
            )
            return take(self, connection, number)

        HandlerTables.take = same_epoch  # type: ignore[method-assign]
    elif defect == "order":

        def backwards(
            self: FunctionCaller, owned: Owned, items: Sequence[Item], *given: Any
        ) -> None:
            call_all(self, owned, items[::-1], *given)

        calling._PART_S = 60.0  # type: ignore[misc]  # otherwise it leaves some out
        FunctionCaller._call_all = backwards  # type: ignore[assignment,method-assign]
    elif defect == "taken for a duplicate":
        read = HandlerWorker._read

        def forgetful(self: HandlerWorker, wait_s: float) -> None:
            read(self, wait_s)
            for each in self._owned.values():
                each.pending = [item for item in each.pending if _rng.random() > 0.005]

        HandlerWorker._read = forgetful  # type: ignore[method-assign]


def main() -> None:
    """Run both handlers until SIGTERM."""
    bootstrap, prefix, dsn, schema, folder, defect = sys.argv[1:]
    os.environ["VIEWS_DSN"] = dsn
    config = load(
        folder,
        log={"bootstrap_servers": bootstrap, "prefix": prefix, "partitions": 3},
        store={"dsn": dsn},
        views={"dsn": dsn, "schema_name": schema},
    )
    app = orders_app()
    for function in (inside, outside):
        app.handler("order", group="kill", start="beginning", timeout_s=20)(function)
    plant(defect)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    faulthandler.register(signal.SIGUSR1)

    def run(title: str) -> None:
        with HandlerWorker(config, app, app.handlers[title]) as worker:
            worker.run(stop)

    threads = [threading.Thread(target=run, args=[title]) for title in app.handlers]
    for each in threads:
        each.start()
    print("runs", flush=True)
    for each in threads:
        each.join()


if __name__ == "__main__":
    main()
