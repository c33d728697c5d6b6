"""A project's API in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from everstate.api.server import serve
from everstate.app import App
from everstate.config import Config
from kit.settings import altered


@contextmanager
def serving(
    config: Config, app: App, port: int = 0, *, ends_within_s: float = 30.0
) -> Iterator[str]:
    """A server on a free port by default; out: its address. Its streams end with it."""
    stop, ready, addresses = threading.Event(), threading.Event(), list[str]()

    def told(address: str) -> None:
        addresses.append(address)
        ready.set()

    given = (altered(config, api={"port": port}), app, stop, told)
    thread = threading.Thread(target=serve, args=given)
    thread.start()
    try:
        assert ready.wait(30)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(ends_within_s)
        assert not thread.is_alive()
