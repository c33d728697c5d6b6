"""Handlers of commands in threads of the test, on the brokers of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

from everstate.app import App
from everstate.config import Config
from everstate.sources.commands import CommandHandler, ProcessRunner
from kit.waiting import until

PATIENCE_S = 60.0


@contextmanager
def running(
    config: Config,
    app: App,
    *,
    processes: bool = False,
    owning: int | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[CommandHandler]:
    """A handler (and the app's process managers), until the block ends.

    Waits until it owns ``owning`` partitions (``None``: all of them).
    """
    stop = threading.Event()
    handler = CommandHandler(config, app, clock=clock)
    runners: list[CommandHandler | ProcessRunner] = [handler]
    if processes:
        runners += [ProcessRunner(config, app, name, clock=clock) for name in app.processes]
    wanted = config.log.partitions * len(app.command_groups) if owning is None else owning
    with ThreadPoolExecutor(len(runners)) as pool:
        threads = [pool.submit(runner.run, stop) for runner in runners]
        try:
            until(lambda: len(owned(handler)) >= wanted or any(each.done() for each in threads))
            yield handler
        finally:
            stop.set()
            for each in threads:
                each.result(PATIENCE_S)
            for runner in runners:
                runner.close()


def owned(handler: CommandHandler) -> list[tuple[str, int]]:
    """Partitions that a handler has opened."""
    return list(handler.work._partitions)
