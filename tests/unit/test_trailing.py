"""What the trailer says and stores when a view moves, and when it does not; without a server."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.pipeline.keeping.trail import Trailer
from everstate.retrying import Retries
from everstate.views.control import ViewVersion
from everstate.views.tables import HOME


class Told:
    """A control that keeps what is stored."""

    def __init__(self) -> None:
        self.errors: list[str | None] = []

    def record(self, _name: str, _version: int, **facts: Any) -> None:
        if "error" in facts:
            self.errors.append(facts["error"])


def caught_up(failure: str | None, passed: int) -> tuple[Any, list[str | None]]:
    """What a try to move a view that failed gives, and the errors that are stored."""
    trailer, told = Trailer.__new__(Trailer), Told()
    trailer._retries, trailer._begun = Retries(), {}
    trailer._config = SimpleNamespace(pipeline=SimpleNamespace(batch_changes_max=100))  # type: ignore[assignment]
    trailer._apply = lambda *_: (failure, passed)  # type: ignore[method-assign]
    row = ViewVersion("totals", 1, "order", "linear", {}, (), "a", error="1 / 0")
    plan, table = SimpleNamespace(store=HOME), SimpleNamespace(name="totals__v1")
    view: Any = SimpleNamespace(row=row, table=table, vector={0: 2}, plan=plan)
    views: Any = SimpleNamespace(vector={0: 9})
    control: Any = told
    return trailer._catch_up(control, views, view), told.errors


def test_a_view_makes_progress_again_only_when_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert caught_up(None, 0) == (0, [])
        assert "progress" not in caplog.text, "another process moved it"
        assert caught_up("1 / 0 again", 3) == (0, ["1 / 0 again"])
        assert "progress" not in caplog.text
        assert caught_up(None, 7) == (7, [None])
        assert "view totals makes progress again" in caplog.text
