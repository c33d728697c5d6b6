"""Views in Cassandra keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreKeptContract

from kit.served_cassandra import ServedCassandra


class TestCassandraKept(StoreKeptContract):
    @pytest.fixture
    def served(self, cassandra_views: ServedCassandra) -> ServedCassandra:
        return cassandra_views
