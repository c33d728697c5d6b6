"""PostgreSQL keeps what every store of views promises."""

from __future__ import annotations

from kit.view_contract import ViewContract
from tiers import counted


class TestPostgresViews(ViewContract):
    """The fixture ``kept`` is the run's PostgreSQL (tests/conftest.py)."""

    histories = counted(10, full=100)
