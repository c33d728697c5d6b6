"""`everstate run` before its roles start: what ends it, and what the roles wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from everstate.app import App
from everstate.cli import plan, run
from everstate.config import Config
from everstate.errors import StatementRefused, Unavailable


def test_a_start_that_postgresql_refuses_ends_the_command_and_a_server_away_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem: list[Exception] = []

    @contextmanager
    def opened_control(_config: Config) -> Iterator[Any]:
        raise problem[0]
        yield

    def planned(_config: Config, _app: App) -> Any:
        raise problem[0]

    monkeypatch.setattr(run, "opened_control", opened_control)
    monkeypatch.setattr(plan, "planned", planned)
    for begin in (run._begin_deployment, run._tell_plan):
        problem[:] = [StatementRefused("permission denied for database hotel")]
        with pytest.raises(StatementRefused, match="permission denied"):
            begin(Config(), App("hotel"))
        problem[:] = [Unavailable("it does not answer")]
        assert begin(Config(), App("hotel")) is None
