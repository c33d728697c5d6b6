"""The hotel served over REST, for the tests of the routes."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from everstate.api.server import serve
from everstate.app import App
from everstate.config import Config
from kit.settings import altered

HOTEL = Path(__file__).parents[2] / "examples" / "hotel" / "hotel.py"
DESK = {"Everstate-Service": "desk", "Everstate-Identifier": "clerk-7"}
EVA = {"guest_id": "g1", "name": "Eva", "city": "Wien", "nights": 0}
MERGE = {**DESK, "Content-Type": "application/merge-patch+json"}
PATCH = {**DESK, "Content-Type": "application/json-patch+json"}


def hotel() -> App:
    """A fresh copy of the example's app."""
    spec = importlib.util.spec_from_file_location("hotel_example", HOTEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = module.app
    assert isinstance(app, App)
    return app


def configured(config: Config, database: str, prefix: str, **api: Any) -> Config:
    """The stack's settings with a database and topics of one test."""
    return altered(config, store={"dsn": database}, log={"prefix": prefix}, api=api)


@contextmanager
def serving(config: Config, app: App) -> Iterator[str]:
    """A server in a thread; gives its address."""
    stop, ready, addresses = threading.Event(), threading.Event(), list[str]()

    def told(address: str) -> None:
        addresses.append(address)
        ready.set()

    thread = threading.Thread(target=serve, args=(config, app, stop, told))
    thread.start()
    try:
        assert ready.wait(30)
        yield addresses[0]
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


@contextmanager
def client(config: Config, app: App) -> Iterator[httpx.Client]:
    """A client of a server that lives as long as the block."""
    with (
        serving(configured_port(config), app) as address,
        httpx.Client(base_url=address, timeout=30) as made,
    ):
        yield made


def configured_port(config: Config, port: int = 0) -> Config:
    """The settings with another port; 0 takes a free one."""
    return altered(config, api={"port": port})
