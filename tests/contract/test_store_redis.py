"""Redis keeps the contract of stores of rows with a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pyarrow as pa
import pytest
from pydantic import SecretStr
from redis.exceptions import RedisError

from everstate.config import Config
from everstate.errors import InvalidView
from everstate.views.stores.redis import RedisStore
from everstate.views.tables import KeptTable
from kit.row_store_contract import told
from kit.row_values import KINDS
from kit.served_redis import ServedRedis
from kit.served_store_contract import TABLE, ServedStoreContract, kept_in
from kit.tls_door import TRUSTED, tls_before
from tiers import counted


class ForgetsDeletions(RedisStore):
    """A key that was deleted has no version any more."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        super().write(table, rows, gone)
        self.forget(table, gone)

    def forget(self, table: KeptTable, rows: pa.Table) -> None:
        """Delete rows, and the versions of deleted ones."""
        start = f"{self._schema}:{table.name}"
        for key in rows["_key"].to_pylist():
            self._client().delete(f"{start}:{key}", f"{start}~{key}")


class OlderWins(ForgetsDeletions):
    """The last write wins, and not the highest version."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        self.forget(table, rows)
        self.forget(table, gone)
        RedisStore.write(self, table, rows, gone)


class TestRedisStore(ServedStoreContract):
    histories = counted(3, full=100)
    forgets_deletions = ForgetsDeletions
    older_wins = OlderWins
    refused: ClassVar[dict[str, pa.DataType]] = {
        **{name: KINDS[name][0] for name in ("list", "struct", "map")},
        "bytes": pa.binary(),
        "null": pa.null(),
    }

    @pytest.fixture
    def served(self, redis: ServedRedis) -> ServedRedis:
        return redis


# What only Redis has


@pytest.fixture
def own(redis: ServedRedis) -> Iterator[Config]:
    with redis.own() as config:
        yield config


def test_a_server_that_would_delete_rows_when_it_is_full_is_refused(
    redis: ServedRedis, own: Config
) -> None:
    policy = redis.set("maxmemory-policy", "allkeys-lru", "noeviction")
    with redis.set("maxmemory", "1gb", "0"), policy:
        with pytest.raises(InvalidView, match="maxmemory-policy is allkeys-lru"):
            kept_in(redis, own)


def test_a_deletion_is_kept_for_a_week(redis: ServedRedis, own: Config) -> None:
    kept = kept_in(redis, own)
    kept.keep(told("a", "north", None))
    with redis.client() as client:
        (place,) = (each for each in redis.left(own) if each.endswith("~a"))
        assert 6.9 * 86_400 < float(client.ttl(place)) <= 7 * 86_400


def test_a_password_that_is_missing_or_wrong_is_the_views_error(
    redis: ServedRedis, own: Config
) -> None:
    """No message has a password, not even that of an address with a mistake."""
    secret = "hunter2"

    def use(config: Config) -> None:
        RedisStore(config).install(TABLE, pa.schema([("_key", pa.string())]))

    with redis.client() as client, tls_before(redis.port) as port:
        client.config_set("requirepass", secret)
        try:
            use(redis.secured(own, port, TRUSTED, password=SecretStr(secret)))
            with pytest.raises(RedisError, match="authenticated"):
                use(redis.secured(own, port, TRUSTED))
            with pytest.raises(RedisError, match="invalid username-password"):
                use(redis.settings(own, password=SecretStr("wrong")))
        finally:
            client.config_set("requirepass", "")
    with pytest.raises(ConnectionError, match="not of the form") as refused:
        use(redis.settings(own, f"redis://:{secret}/x@host"))
    assert secret not in str(refused.value)
