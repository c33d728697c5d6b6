"""A store that only this file knows keeps the contract of views in another store.

It is in the memory of this process, and Spark's workers reach it by a socket.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any, ClassVar, Final, Self
from urllib.parse import urlsplit

import pytest
from pyspark import cloudpickle
from store_kept_contract import StoreChangedContract, StoreKeptContract

from everstate.config import Config
from everstate.views.stores.registry import STORES
from everstate.views.tables import Merge
from kit.rows_in_memory import RowsInMemory
from kit.served_store import Found, ServedStore

KEY: Final = b"rows"


class Client:
    """The store as the pipeline and its tasks have it: an address."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append"})
    call_s_max: ClassVar[float] = 20.0

    def __init__(self, config: Config) -> None:
        self.url = config.stores.server("served").url

    def call(self, name: str, *given: Any) -> Any:
        class Remote(BaseManager):
            """A class of its own, because what is registered belongs to the class."""

        Remote.register("rows")
        place: Any = urlsplit(self.url)
        connected: Any = Remote(address=(place.hostname, place.port), authkey=KEY)
        connected.connect()
        return connected.rows().call(name, *given)

    def __getattr__(self, name: str) -> Any:
        """A call of the store by its name, but for what Python itself asks for."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self.call, name)


class Served(ServedStore):
    """The rows; while it is killed, each call fails."""

    name: ClassVar[str] = "served"
    plain: ClassVar[str] = "rows://"
    secure: ClassVar[str] = "rows://"

    def __init__(self) -> None:
        self.memory = RowsInMemory()
        self.is_up = True

        class Door(BaseManager):
            """The door to this process."""

        Door.register("rows", callable=lambda: self, exposed=["call"])
        door: Any = Door(address=("127.0.0.1", 0), authkey=KEY)
        self.serving = door.get_server()
        self.serving.stop_event = threading.Event()
        threading.Thread(target=self.serving.accepter, daemon=True).start()
        self.port = self.serving.address[1]

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = True) -> Iterator[Self]:
        """A store in this process, which needs no folder."""
        served = cls()
        yield served
        served.serving.stop_event.set()

    def call(self, name: str, *given: Any) -> Any:
        """Make a call of a client."""
        if not self.is_up:
            raise OSError("no space is left")
        found = getattr(self.memory, name)(*given)
        return list(found) if name == "rows" else found

    def start(self) -> None:
        self.is_up = True

    def kill(self) -> None:
        self.is_up = False

    def refusals(self, config: Config) -> list[AbstractContextManager[None]]:
        return []

    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        if view not in self.memory.names:
            return None
        table = self.memory.tables[self.memory.names[view]]
        return [row for _, row in table.values() if row is not None]

    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        _, row = self.memory.tables[self.memory.names[view]][key]
        assert row is not None
        row[column] = value

    def left(self, config: Config) -> list[str]:
        return [*self.memory.tables, *self.memory.names]

    def clean(self, config: Config) -> None:
        self.memory = RowsInMemory()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setitem(STORES, "served", f"{__name__}:Client")
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # type: ignore[no-untyped-call]
    with Served.alone(tmp_path) as served:
        yield served
    cloudpickle.unregister_pickle_by_value(here)  # type: ignore[no-untyped-call]


class TestRowStoreKept(StoreKeptContract):
    """As every store."""


class TestRowStoreChanged(StoreChangedContract):
    """As every store."""
