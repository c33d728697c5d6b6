"""Views in OpenSearch keep the contract of views in another store."""

from __future__ import annotations

import pytest
from store_kept_contract import StoreKeptContract

from kit.opensearch import OpenSearchServer


class TestOpenSearchKept(StoreKeptContract):
    @pytest.fixture
    def served(self, opensearch: OpenSearchServer) -> OpenSearchServer:
        return opensearch
