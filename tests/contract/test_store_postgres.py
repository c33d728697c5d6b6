"""PostgreSQL keeps what every store promises, to its callers and to the REST routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from everstate.config import Config
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.stores.postgres.database import OutboxConnection
from everstate.sources.stores.store import Write, Written
from everstate.testing.crud_contract import (
    CrudStoreContract,
    check_counts,
    count_up,
    counters,
    stepping,
)
from everstate.testing.store_contract import (
    CLERK,
    ORDER,
    Recorded,
    RecordedChanges,
    StoreContract,
    StoredOrder,
)
from kit.settings import altered
from tiers import counted

_CHANGES = """
SELECT key, version, kind, change_id::text, before, after, event, occurred_at
FROM everstate_store.outbox ORDER BY id
"""


class Careless(EntityStore):
    """A store that forgets the expected version: the defect that the check must find."""

    def write(self, write: Write, *, connection: OutboxConnection | None = None) -> Written:
        return super().write(replace(write, expected_version=None), connection=connection)


class TestPostgresStore(StoreContract, CrudStoreContract):
    @pytest.fixture
    def store(self, config: Config) -> Iterator[EntityStore]:
        with EntityStore(config, ORDER) as store:
            store.install()
            yield store

    @pytest.fixture
    def changes(self, database: str) -> RecordedChanges:
        def read() -> list[Recorded]:
            with psycopg.connect(database) as connection:
                return [Recorded(*row) for row in connection.execute(_CHANGES).fetchall()]

        return read

    @pytest.fixture
    def tries(self) -> int:
        return counted(500, full=10_000)


def test_a_lost_update_is_found(config: Config) -> None:
    store = Careless(config, ORDER)
    store.install()
    store.put(StoredOrder(order_id="o-0", weight=0), provenance=CLERK)
    counted = count_up(stepping(store), writers=8, keys=1, turns=20)
    with pytest.raises(AssertionError, match="o-0"):
        check_counts(counted, counters(store, 1))
    store.close()


def test_a_filtered_page_looks_at_a_bounded_number_of_rows(config: Config) -> None:
    store = EntityStore(altered(config, api={"scan_rows_max": 10}), ORDER)
    store.install()
    for number in range(25):
        note = "rare" if number == 24 else ""
        store.put(StoredOrder(order_id=f"o-{number:02}", note=note), provenance=CLERK)
    sizes, cursor = [], None
    while True:
        page = store.page(limit=5, cursor=cursor, equal={"note": "rare"})
        sizes.append(len(page.entities))
        cursor = page.cursor
        if cursor is None:
            break
    assert sizes == [0, 0, 1]
    store.close()


def test_old_answers_are_forgotten(config: Config, database: str) -> None:
    store = EntityStore(altered(config, api={"idempotency_keep_hours": 1}), ORDER)
    store.install()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO everstate_store.answered VALUES "
            "('old', 'f', '1', now() - interval '61 min'), "
            "('new', 'f', '1', now() - interval '59 min')"
        )
    assert store.forget_old() == 1
    assert store.answered("old") is None
    assert store.answered("new") is not None
    store.close()
