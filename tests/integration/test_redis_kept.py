"""Views in Redis keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreChangedContract, StoreKeptContract

from kit.served_redis import ServedRedis


@pytest.fixture
def served(redis: ServedRedis) -> ServedRedis:
    return redis


class TestRedisKept(StoreKeptContract):
    """As every store."""


class TestRedisChanged(StoreChangedContract):
    """As every store."""
