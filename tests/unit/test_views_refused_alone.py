"""One view that cannot be kept: the others are declared, and it is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstate.app import App
from everstate.cli.console import load_app
from everstate.config import load
from everstate.errors import InvalidView
from everstate.views.declaring import refused_views_recorded
from everstate.views.versions import registered, steps

HOTEL = """\
from pydantic import BaseModel
from everstate.app import App

app = App("hotel")


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    city: str | None = None


app.view("bad", sql="SELECT rand() AS r FROM guest")
app.view("by_city", sql="SELECT city, count(*) AS n FROM guest GROUP BY city")
app.view("by_city", sql="SELECT city FROM guest")
"""


@pytest.fixture
def app(tmp_path: Path) -> App:
    (tmp_path / "inn.py").write_text(HOTEL, "utf-8")
    (tmp_path / "everstate.toml").write_text('[project]\napp = "inn:app"\n', "utf-8")
    return load_app(None, load(tmp_path))


def test_a_refused_view_does_not_stop_the_others(app: App) -> None:
    assert list(app.views) == ["by_city"]
    assert app.views["by_city"].kind == "linear"
    refused = app.refused_views
    assert list(refused) == ["bad", "by_city"]
    assert "rand() is not allowed, because it gives another value" in refused["bad"].message
    assert str(refused["bad"].declared_at).endswith("inn.py:13")
    assert "already has this name" in refused["by_city"].message
    with pytest.raises(InvalidView, match="rand"):
        app.view_plan("bad")


def test_in_a_program_of_its_own_a_declaration_is_refused_at_once() -> None:
    app = App("hotel")
    with pytest.raises(InvalidView, match="nothing"):
        app.view("all_of_it", sql="SELECT * FROM nothing")
    assert dict(app.refused_views) == {}
    with refused_views_recorded():
        plan = app.view("all_of_it", sql="SELECT * FROM nothing")
    with pytest.raises(InvalidView, match="nothing"):
        _ = plan.kind


def test_what_was_kept_before_goes_on_when_its_declaration_is_refused(app: App) -> None:
    kept = registered(app.views["by_city"], 1, published=True)
    (step,) = steps(
        "guest",
        [],
        [kept],
        standing=[("by_city", 1)],
        numbers={"by_city": 1},
        on_change="rebuild",
        refused={"by_city"},
    )
    assert (step.what, step.version, step.superseded) == ("refused", 1, ())
