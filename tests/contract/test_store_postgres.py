"""The PostgreSQL store keeps the contract of stores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest

from everstate.config import Config
from everstate.sources.outbox import EntityStore
from everstate.testing.store_contract import ORDER, Changes, Recorded, StoreContract

_CHANGES = """
SELECT key, version, kind, change_id::text, before, after, event, occurred_at
FROM everstate_store.outbox ORDER BY id
"""


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def store(self, stack_config: Config, database: str) -> Iterator[EntityStore]:
        section = stack_config.store.model_copy(update={"dsn": database})
        config = stack_config.model_copy(update={"store": section})
        with EntityStore(config, ORDER) as store:
            store.install()
            yield store

    @pytest.fixture
    def changes(self, database: str) -> Changes:
        def read() -> list[Recorded]:
            with psycopg.connect(database) as connection:
                return [Recorded(*row) for row in connection.execute(_CHANGES).fetchall()]

        return read

    @pytest.fixture
    def tries(self) -> int:
        return 10_000 if os.environ.get("EVERSTATE_FULL") else 500
