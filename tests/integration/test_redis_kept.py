"""Views in Redis keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreKeptContract

from kit.served_redis import ServedRedis


class TestRedisKept(StoreKeptContract):
    @pytest.fixture
    def served(self, redis: ServedRedis) -> ServedRedis:
        return redis
