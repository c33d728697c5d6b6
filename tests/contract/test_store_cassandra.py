"""The store in Cassandra keeps the contract of stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cassandra_cases import committed, empty, own_keyspace
from everstate.changes import EntityType
from everstate.config import Config
from everstate.sources.stores.cassandra import CassandraStore, Database
from everstate.testing.crud_contract import CrudStoreContract
from everstate.testing.store_contract import (
    CLERK,
    ORDER,
    Recorded,
    RecordedChanges,
    StoreContract,
    check_chain,
)
from release_cases import NEW, OLD, Order, write_at_random
from tiers import counted


@pytest.fixture(scope="module")
def shared(cassandra: Any) -> Iterator[tuple[Config, Database]]:
    with own_keyspace(cassandra.config) as config, Database(config) as database:
        yield config, database


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


class Written:
    """One entity that each release writes, alone or with another state before it."""

    def __init__(self, config: Config, database: Database) -> None:
        self._database, self._turn = database, 0
        self._stores = {
            each: CassandraStore(config, each, database=database) for each in (OLD, NEW)
        }

    def write(self, release: EntityType, order: Order | None) -> None:
        store, self._turn = self._stores[release], self._turn + 1
        if order is None:
            store.delete("o-1", provenance=CLERK)
        elif self._turn % 3:
            store.put(order, provenance=CLERK)
        else:
            between = order.model_copy(update={"note": "between"})
            store.put_many([between, order], provenance=CLERK)

    def stored(self) -> str | None:
        changes = in_order_of_writing(self._database)
        return changes[-1].after if changes else None


def test_releases_that_write_at_random_keep_the_fields_of_each_other(
    shared: tuple[Config, Database],
) -> None:
    config, database = shared
    empty(database)
    done, refused = write_at_random(Written(config, database), 1, counted(40, full=400))
    assert done > refused
    check_chain(in_order_of_writing(database))
