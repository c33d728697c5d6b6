"""The store in memory keeps what every store of views promises, so that simulations may use it."""

from __future__ import annotations

import pytest

from everstate.testing.view_contract import ViewContract
from everstate.testing.view_memory_orders import KeptInMemory
from tiers import counted


class TestViewsInMemory(ViewContract):
    histories = counted(10, full=100)

    @pytest.fixture
    def kept(self) -> KeptInMemory:
        return KeptInMemory()
