"""The hotel served over REST, for the tests of the routes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from everstate.app import App
from everstate.config import Config
from kit.serving import serving
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
def client(config: Config, app: App, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server that lives as long as the block."""
    with (
        serving(config, app) as address,
        httpx.Client(base_url=address, timeout=30, **options) as made,
    ):
        yield made
