"""Views in Kafka keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreChangedContract, StoreKeptContract

from kit.served_kafka import ServedKafka


@pytest.fixture
def served(kafka_views: ServedKafka) -> ServedKafka:
    return kafka_views


class TestKafkaKept(StoreKeptContract):
    """As every store."""


@pytest.mark.full
class TestKafkaChanged(StoreChangedContract):
    """As every store."""
