"""What operators ask of views: what the command refuses, and what it does again and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from everstate.app import App
from everstate.cli import cli
from everstate.errors import InvalidQuery, InvalidView, NotFound
from everstate.pipeline.reports import ViewReport
from everstate.views.control import KEPT, ViewVersion
from everstate.views.plan import plan_of
from everstate.views.versions import registered


class Guest(BaseModel):
    guest_id: str
    nights: int = 0


class Later(BaseModel):
    guest_id: str
    nights: str = ""


def hotel(model: type[BaseModel], sql: str) -> App:
    app = App("hotel")
    app.entity("guest", key="guest_id")(model)
    app.view("by_nights", sql=sql)
    return app


BY_NIGHTS = "SELECT nights, count(*) AS n FROM guest GROUP BY nights"
OLDER = registered(hotel(Guest, BY_NIGHTS).views["by_nights"], 1, status=KEPT)


def test_b13_a_version_of_a_field_that_has_another_type_now_cannot_be_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be asked for, and built, and never be kept."""
    app = hotel(Later, "SELECT count(*) AS n FROM guest")
    with pytest.raises(InvalidView, match="something else with this app's model"):
        plan_of(OLDER, app.entities, app.views)

    @contextmanager
    def control(_: object) -> Any:
        yield None

    def ask_undo(
        _: object, name: str, *, check: Callable[[ViewVersion], object], force: bool
    ) -> ViewVersion:
        check(OLDER)
        raise AssertionError(f"an undo of {name} was registered")

    monkeypatch.setattr("everstate.cli.rebuild.control_of", control)
    monkeypatch.setattr("everstate.views.changing.ask_undo", ask_undo)
    monkeypatch.setattr("everstate.cli.console.AppSession.connected", lambda *_, **__: (None, app))
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "views", "rebuild", "by_nights", "--undo"])
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit), done.output
    assert "something else with this app's model" in " ".join(done.output.split())


def test_c17_a_recomputation_on_a_schedule_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[bool] = []
    pauses: list[float] = []

    def prove(*_: object, promote: bool) -> tuple[list[ViewReport], list[str]]:
        if len(proved) == 3:
            raise InvalidQuery("enough")
        proved.append(promote)
        return [], []

    views = "everstate.cli.views"
    monkeypatch.setattr(f"{views}.prove", prove)
    monkeypatch.setattr("everstate.cli.console.AppSession.connected", lambda *_, **__: (None, None))
    # The module's own name: every thread of this process has the same time.sleep.
    monkeypatch.setattr(
        f"{views}.time", SimpleNamespace(sleep=pauses.append, monotonic=lambda: 7.0)
    )
    verb = ["-C", str(tmp_path), "views", "recompute", "--promote", "--schedule", "6h"]
    done = CliRunner().invoke(cli, verb)
    assert "enough" in done.output
    assert proved == [True] * 3
    assert pauses == [6 * 3600.0] * 3


def test_what_a_store_that_is_gone_has_is_named_when_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[tuple[str, int, str | None]] = [("redis", 3, "5f2b7c1e"), ("redis", 4, None)]
    seen = list[str]()

    @contextmanager
    def control(_: object) -> Any:
        yield SimpleNamespace(
            forget_left=lambda name: left if name == "by_nights" else [],
            versions=lambda _name: [SimpleNamespace(published=True, store=store) for store in seen],
        )

    monkeypatch.setattr("everstate.cli.rebuild.control_of", control)
    monkeypatch.setattr("everstate.cli.console.AppSession.connected", lambda *_, **__: (None, None))
    verb = ["-C", str(tmp_path), "views", "drop", "--forget"]
    done = CliRunner().invoke(cli, [*verb, "by_nights"])
    assert done.exit_code == 0
    assert "by_nights__v3_5f2b7c1e stays in the store redis" in done.output
    assert "may still find the name by_nights in redis" in " ".join(done.output.split())
    seen.append("redis")  # a later version is there, and it is what they find
    done = CliRunner().invoke(cli, [*verb, "by_nights"])
    assert "may still find" not in done.output
    refused = CliRunner().invoke(cli, [*verb, "by_city"])
    assert refused.exit_code == NotFound.exit_code
    assert "no dropped version of by_city waits for its store" in refused.output
