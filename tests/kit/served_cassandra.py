"""Cassandra for tests, and its rows as a program with the driver reads them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import certifi

from everstate.cassandra import Database
from everstate.config import Config, load
from everstate.errors import Unavailable
from everstate.local import Stack
from everstate.views.stores.cassandra import _CONNECTED, CassandraRows
from everstate.views.tables import Merge
from kit.served_store import Found, ServedStore
from kit.settings import altered
from kit.waiting import until


class ServedCassandra(ServedStore):
    """The Cassandra of a local stack; each project has a keyspace with the name of its schema."""

    name: ClassVar[str] = "cassandra"
    plain: ClassVar[str] = "cassandra://"

    def __init__(self, servers: Stack) -> None:
        self._servers = servers
        self.port = servers.resolve().cassandra.port

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = True) -> Iterator[Self]:
        """A local stack of Cassandra alone, with fsync: a kill would lose what is not written."""
        given = load(
            folder,
            log={"bootstrap_servers": "elsewhere:1"},
            store={"dsn": "host=elsewhere"},
            cassandra={"local": True},
        )
        with Stack(given) as servers:
            yield cls(servers)

    @property
    def unset(self) -> str:
        return r"cassandra\.contact_points is not set"

    @property
    def section(self) -> str:
        return f'[cassandra]\ncontact_points = ["127.0.0.1"]\nport = {self.port}\n'

    def settings(self, config: Config, url: str | None = None, **more: Any) -> Config:
        place = {"contact_points": ("127.0.0.1",), "port": self.port}
        named = {"keyspace": config.views.schema_name}
        return altered(config, cassandra={**place, **named, **more})

    def away(self, config: Config) -> Config:
        return self.settings(config, port=1)

    def secured(self, config: Config, port: int, trusted: Path | None, **more: Any) -> Config:
        return self.settings(config, port=port, ssl_cafile=trusted or Path(certifi.where()), **more)

    @contextmanager
    def own(self) -> Iterator[Config]:
        config = self.settings(altered(Config(), views={"schema_name": f"t{secrets.token_hex(6)}"}))
        yield config
        self.clean(config)

    def start(self) -> None:
        """Start it, and wait until the connections of this process are there again."""
        self._servers.revive([self.name])
        for database in _CONNECTED.values():
            if database.settings.port == self.port:
                until(partial(_answers, database))

    @property
    def process(self) -> int:
        return self._servers.pid(self.name)

    def kill(self) -> None:
        self._servers.kill(self.name)

    def refusals(self, config: Config) -> list[AbstractContextManager[None]]:
        return []  # a node that takes no writes lets nobody read, either

    def replicate(self, config: Config, replicas: int) -> None:
        """Change how many nodes have the rows of a project; there is one node."""
        place = f"{{'class': 'NetworkTopologyStrategy', 'datacenter1': {replicas}}}"
        database = CassandraRows(config)._database()
        database.define(f"ALTER KEYSPACE {database.keyspace} WITH replication = {place}")

    def ask(self, config: Config, query: str, *values: Any) -> list[Any]:
        """The answer to a query, in which `ks.` is the keyspace."""
        place = f"{config.cassandra.keyspace}."
        return CassandraRows(config)._database().execute(query.replace("ks.", place), values)

    def table(self, config: Config, view: str) -> str | None:
        """The table that readers of a view find; ``None`` if they find none."""
        if config.views.schema_name not in self._tables(config):
            return None
        pointer = f"SELECT table_name FROM ks.{config.views.schema_name} WHERE name = ?"
        found = self.ask(config, pointer, view)
        return f'ks."{found[0].table_name}"' if found else None

    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        table = self.table(config, view)
        if table is None:
            return None
        rows = [row._asdict() for row in self.ask(config, f"SELECT * FROM {table}")]
        return [{**row, "_key": row["key"]} for row in rows]

    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        table = self.table(config, view)
        self.ask(config, f'UPDATE {table} SET {column} = ? WHERE "_key" = ?', value, key)

    def left(self, config: Config) -> list[str]:
        tables, published = self._tables(config), config.views.schema_name
        if published not in tables:
            return tables
        views = [row.name for row in self.ask(config, f"SELECT name FROM ks.{published}")]
        return views + [name for name in tables if name != published]

    def clean(self, config: Config) -> None:
        """Drop the keyspace, and close the connections."""
        database = CassandraRows(config)._database()
        database.define(f"DROP KEYSPACE IF EXISTS {database.keyspace}")
        for settings in list(_CONNECTED):
            if settings.keyspace == config.cassandra.keyspace:
                _CONNECTED.pop(settings).close()

    def _tables(self, config: Config) -> list[str]:
        query = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ?"
        return [row.table_name for row in self.ask(config, query, config.cassandra.keyspace)]


def _answers(database: Database) -> bool:
    try:
        return bool(database.execute("SELECT now() FROM system.local"))
    except Unavailable:
        return False
