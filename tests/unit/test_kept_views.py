"""Who keeps a view that this application cannot compute; and how a version tells how it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from everstate.app import App
from everstate.config import Config
from everstate.console.pages import Pages, view_url
from everstate.console.views import ShownView, ViewsPage
from everstate.pipeline.keeping.kept import ForeignVersion, StalledVersions
from everstate.pipeline.keeping.publish import composed_waiting
from everstate.serving.answers import ViewRow
from everstate.serving.overview import views
from everstate.views.control import BUILDING, LIVE, RETIRED, ViewVersion
from everstate.views.versions import registered
from kind_cases import Shop
from view_fuzz import Sale

ROW = ViewVersion("totals", 2, "order", "linear", {}, (), "f")


def test_a_view_that_another_app_moves_is_kept_by_it_and_one_that_stands_still_is_not() -> None:
    seen, view = StalledVersions(), ForeignVersion(ROW, {0: 5}, "another model")
    assert seen.seconds(view, now=100) == 0
    assert seen.seconds(view, now=109) == 9
    moved = replace(view, vector={0: 6})
    assert seen.seconds(moved, now=110) == 0, "it moved: an app keeps it"
    assert seen.seconds(moved, now=125) == 15


PROGRESS = {"doing": "catching up", "share": 0.5, "rate": None, "left_s": None}


@pytest.mark.parametrize(
    ("row", "shown", "why"),
    [
        (ROW, "live", None),
        (replace(ROW, error="1 / 0"), "behind", "1 / 0"),
        (replace(ROW, progress=PROGRESS), "behind", None),
        (replace(ROW, status=BUILDING, waits_for="a reader"), "building", "a reader"),
        (replace(ROW, status=RETIRED, status_reason="left"), "retired", "left"),
        (replace(ROW, error="1 / 0", waits_for="a reader"), "behind", "1 / 0; a reader"),
    ],
)
def test_each_of_four_fields_is_told(row: ViewVersion, shown: str, why: str | None) -> None:
    assert (row.shown, row.why) == (shown, why)


def test_a_version_that_trails_says_how_far_it_is_also_beside_what_it_waits_for() -> None:
    row = ViewRow(
        *("totals", 2, "linear", "order", None, {}, 5, 1.0, None, None, None, LIVE),
        waits_for="waits for a reader",
        progress=PROGRESS,
    )
    assert row.standing == "live: waits for a reader; catching up 50%"


def test_an_output_that_its_cast_cannot_hold_is_told_as_a_reason() -> None:
    row = ViewRow(
        *("totals", 2, "linear", "order", None, {}, 5, 1.0, None, None, None, LIVE),
        overflows={"total": 2},
    )
    assert row.standing == "live; total is NULL in 2 groups: its CAST cannot hold the value"


def test_a_join_that_an_operator_asked_for_is_published_when_its_inputs_are() -> None:
    """It has no table of its own to be built; only the sums of a join have one."""
    app = App("shops")
    app.entity("sale", key="sale_id")(Sale)
    app.entity("shop", key="code")(Shop)
    joined = "FROM sale s JOIN shop h ON s.shop = h.code"
    app.view("rows", sql=f"SELECT s.shop, h.city {joined}")
    app.view("sums", sql=f"SELECT h.city, count(*) AS n {joined} GROUP BY h.city")
    rows = [registered(app.views[name], 1, status=BUILDING) for name in ("rows", "sums")]
    control: Any = SimpleNamespace(versions=lambda: rows)
    assert [row.name for row, _ in composed_waiting(control, app.entities)] == ["rows"]
    rows[1] = replace(rows[1], built={"tables": []})
    assert [row.name for row, _ in composed_waiting(control, app.entities)] == ["rows", "sums"]


def test_a_part_of_views_comes_last_and_is_told_as_their_part() -> None:
    app = App("shops")
    app.entity("sale", key="sale_id")(Sale)
    app.entity("shop", key="code")(Shop)
    joined = "SELECT s.shop, h.city FROM sale s JOIN shop h ON s.shop = h.code"
    app.view("towns", sql=joined)
    app.view("towns_named", sql=f"{joined} WHERE h.city <> ''")
    app.view("tills", sql="SELECT shop, count(*) AS n FROM sale GROUP BY shop")
    plans = [part for plan in app.views.values() for part in (*plan.parts, plan)]
    stored = {plan.name: registered(plan, 1, published=True) for plan in plans}
    control = SimpleNamespace(
        versions=lambda: list(stored.values()),
        positions=list,
        deferred=dict,
        misfits=list,
    )
    connection: Any = SimpleNamespace(standings=lambda _: control)
    told = {row.name: row for row in views(Config(), connection, is_counted=False)}
    declared, parts = list(told)[:3], list(told)[3:]
    assert set(declared) == set(app.views)
    assert parts
    assert {told[name].told_kind for name in parts} <= {
        "part of towns",
        "part of towns_named",
        "part of towns, towns_named",
    }
    assert [told[name].told_kind for name in ("tills", "towns")] == ["linear", "join"]
    page = ViewsPage(tuple(ShownView(row, None, "") for row in told.values()), {})
    made = Pages("shops", has_login=False).page("views_part.html", found=page, age_s=0)
    assert [name for name in told if view_url(name) in bytes(made.body).decode()] == declared
    assert "<td>part of towns, towns_named</td>" in bytes(made.body).decode()
