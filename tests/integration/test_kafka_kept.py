"""Views in Kafka keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreKeptContract

from kit.served_kafka import ServedKafka


class TestKafkaKept(StoreKeptContract):
    @pytest.fixture
    def served(self, kafka_views: ServedKafka) -> ServedKafka:
        return kafka_views
