"""One view that cannot be kept: the others are declared, and it is told with its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pydantic import BaseModel

from everstate import ignore, patch_of, when
from everstate.app import App
from everstate.cli.console import load_app
from everstate.config import load
from everstate.errors import InvalidView
from everstate.pipeline.derive.declare import retire_topics
from everstate.views.control import LIVE, Control
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


ROWS = "SELECT guest_id, city FROM guest"
SUMS = "SELECT city, count(*) AS n FROM guest GROUP BY city"
N = pa.field("n", pa.int64())
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"sql": ROWS, "ttl": timedelta(days=1)}, "ttl is .*a duration as a text"),
    ({"sql": ROWS, "ttl": 24}, "ttl is 24"),
    ({"sql": SUMS, "scale": "2"}, "scale is '2'.*a whole number"),
    ({"sql": SUMS, "scale": True}, "scale is True"),
    ({"sql": SUMS, "scale": 1.5}, "scale is 1.5"),
    ({"sql": ROWS, "indexes": 5}, "indexes is 5"),
    ({"sql": ROWS, "indexes": "city"}, "indexes is 'city'"),
    ({"sql": ROWS, "search": [5]}, "search is"),
    ({"sql": ROWS, "lateness": 5, "late": "aside"}, "lateness is 5"),
    ({"sql": None}, "sql is None"),
    ({"sql": ROWS, "policies": [ignore(service="x")]}, "names service, which no provenance has"),
    ({"sql": ROWS, "policies": ignore(actor="x")}, "no list of policies"),
    ({"sql": ROWS, "when": when("city")}, "no condition on a change"),
]
Declare = Callable[[App], Any]
WRONG: list[tuple[Declare, str]] = [
    *((partial(App.view, name="bad", **options), reason) for options, reason in WRONG_OPTIONS),
    (lambda app: app.timeline("bad", "gest", "city"), "entity type 'gest'"),
    (lambda app: app.timeline("bad", "guest", 5), "attributes is"),  # type: ignore[arg-type]
    (lambda app: app.python_view("bad", of="gest", columns=[N])(same), "entity type 'gest'"),
    (lambda app: python_view(app, columns=[("n", "int")])(same), "expected Arrow fields"),
    (lambda app: python_view(app, columns=[N], fields="city")(same), "fields is 'city'"),
    (lambda app: python_view(app, columns=[N])(partial(same)), "is no function"),
    (lambda app: app.derive("bad", patch_of("gest")), "entity type 'gest'"),
    (lambda app: app.derive("bad", patch_of("guest"), when=when("c").changes()), "no field 'c'"),
]


def python_view(app: App, **options: Any) -> Any:
    return app.python_view("bad", of="guest", **options)


def same(given: Any) -> Any:
    return given


class Guest(BaseModel):
    guest_id: str
    city: str | None = None


@pytest.mark.parametrize(("declare", "reason"), WRONG)
def test_no_mistake_in_a_declaration_stops_the_others(declare: Declare, reason: str) -> None:
    app = App("hotel")
    app.entity("guest", key="guest_id")(Guest)
    with refused_views_recorded():
        declare(app)
        app.view("by_city", sql=SUMS)
        app.derive("patches", patch_of("guest"))
    assert (list(app.views), list(app.derivations)) == (["by_city"], ["patches"])
    refusal = app.refused_views["bad"]
    assert re.search(reason, refusal.message)
    assert __file__ in (refusal.declared_at or "")
    with pytest.raises(InvalidView, match=reason):
        app.view_plan("bad")
    alone = App("hotel")
    alone.entity("guest", key="guest_id")(Guest)
    with pytest.raises(InvalidView, match=reason):
        declare(alone)


def test_a_topic_whose_declaration_is_refused_is_not_retired() -> None:
    @dataclass
    class Row:
        name: str
        version: int = 1
        is_topic: bool = True
        published: bool = True
        status: str = LIVE
        published_at: str = "then"

    retired = []

    class Registry:
        def versions(self) -> list[Row]:
            return [Row("refused"), Row("declared"), Row("dropped")]

        def set_status(self, name: str, *_: object) -> None:
            retired.append(name)

    retire_topics(cast("Control", Registry()), {"refused", "declared"})
    assert retired == ["dropped"]


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
