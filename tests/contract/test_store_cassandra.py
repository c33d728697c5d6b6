"""The store in Cassandra keeps the contract of stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cassandra_cases import committed, drop, empty, own_keyspace
from everstate.config import Config
from everstate.sources.stores.cassandra import CassandraStore, Database
from everstate.testing.crud_contract import CrudStoreContract
from everstate.testing.store_contract import ORDER, Recorded, RecordedChanges, StoreContract
from tiers import counted


@pytest.fixture(scope="module")
def shared(cassandra: Any) -> Iterator[tuple[Config, Database]]:
    config = own_keyspace(cassandra.config)
    with Database(config) as database:
        yield config, database
        drop(database)


class TestCassandraStore(StoreContract, CrudStoreContract):
    @pytest.fixture
    def store(self, shared: tuple[Config, Database]) -> CassandraStore:
        config, database = shared
        empty(database)
        return CassandraStore(config, ORDER, database=database)

    @pytest.fixture
    def changes(self, shared: tuple[Config, Database]) -> RecordedChanges:
        return lambda: in_order_of_writing(shared[1])

    @pytest.fixture
    def tries(self) -> int:
        return counted(60, full=2_000)


def in_order_of_writing(database: Database) -> list[Recorded]:
    """Changes by their ids, which grow with time; those of one key by version all the same."""
    found = [
        Recorded(
            each.key,
            each.version,
            each.kind,
            each.change_id,
            each.before,
            each.after,
            each.event,
            each.occurred_at,
        )
        for each in committed(database)
    ]
    next_of = {key: iter([c for c in found if c.key == key]) for key in {c.key for c in found}}
    return [next(next_of[change.key]) for change in sorted(found, key=lambda c: c.change_id)]
