"""Views in Cassandra keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreChangedContract, StoreKeptContract

from kit.served_cassandra import ServedCassandra


@pytest.fixture
def served(cassandra_views: ServedCassandra) -> ServedCassandra:
    return cassandra_views


class TestCassandraKept(StoreKeptContract):
    """As every store."""


@pytest.mark.full
class TestCassandraChanged(StoreChangedContract):
    """As every store."""
