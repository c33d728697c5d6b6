"""Redis for tests, and its rows as a program with a client of Redis reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

from redis import Redis

from everstate.config import Config, load
from everstate.local import Stack
from everstate.views.tables import Merge
from kit.served_store import Found, ServedStore


class ServedRedis(ServedStore):
    """The Redis of a local stack."""

    name: ClassVar[str] = "redis"
    plain: ClassVar[str] = "redis://"
    secure: ClassVar[str] = "rediss://"

    def __init__(self, servers: Stack) -> None:
        self._servers = servers
        self.port = urlsplit(servers.resolve().stores.server(self.name).url or "").port or 0

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = True) -> Iterator[Self]:
        """A local stack of Redis alone."""
        given = load(
            folder,
            log={"bootstrap_servers": "elsewhere:1"},
            store={"dsn": "host=elsewhere"},
            stores={cls.name: {}},
            local={"fsync": fsync},
        )
        with Stack(given) as servers:
            yield cls(servers)

    def start(self) -> None:
        self._servers.revive([self.name])

    @property
    def process(self) -> int:
        return self._servers.pid(self.name)

    def kill(self) -> None:
        self._servers.kill(self.name)

    def client(self) -> Redis:
        """A client as a user has it."""
        return Redis.from_url(self.url, decode_responses=True)

    def refusals(self, config: Config) -> list[AbstractContextManager[None]]:
        return [self.set("maxmemory", "1", "0"), self.set("min-replicas-to-write", "1", "0")]

    @contextmanager
    def set(self, setting: str, value: str, before: str) -> Iterator[None]:
        """Give a setting of the server another value for a while."""
        with self.client() as client:
            client.config_set(setting, value)
            try:
                yield
            finally:
                client.config_set(setting, before)

    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        with self.client() as client:
            start = client.get(f"{config.views.schema_name}:{view}")
            if start is None:
                return None
            places = list(set(client.scan_iter(f"{start}*", 1_000)))
            with client.pipeline(transaction=False) as pipe:
                for place in places:
                    pipe.hgetall(place)
                rows = pipe.execute()
        keys = (place.removeprefix(start) for place in places)
        return [
            {**row, "_key": key if merge == "row" else key.rpartition(":")[0]}
            for key, row in zip(keys, rows, strict=True)
        ]

    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        with self.client() as client:
            start = client.get(f"{config.views.schema_name}:{view}")
            client.hset(f"{start}{key}", column, value)

    def left(self, config: Config) -> list[str]:
        with self.client() as client:
            return list(client.scan_iter(f"{config.views.schema_name}:*", 1_000))

    def clean(self, config: Config) -> None:
        with self.client() as client:
            for place in self.left(config):
                client.delete(place)
