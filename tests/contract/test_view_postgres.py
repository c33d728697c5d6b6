"""PostgreSQL keeps what every store of views promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstate.testing.view_contract import ViewContract
from everstate.testing.view_postgres import KeptViews


class TestPostgresViews(ViewContract):
    @pytest.fixture
    def store(self, database: str) -> Iterator[KeptViews]:
        with KeptViews.installed(database) as kept:
            yield kept
