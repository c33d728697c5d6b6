"""Given / When / Then of views: what it refuses, and how it compares values."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from pydantic import BaseModel

from everstate import App
from everstate.errors import InvalidView, MissingExtra, UnknownView
from everstate.testing.view_behaviour import ViewBehaviour

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
app = App("desk")


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    city: str | None = None


class Stranger(BaseModel):
    guest_id: str


app.view("by_city", sql="SELECT city, count(*) AS guests FROM guest GROUP BY city")
app.view("changed", sql="SELECT kind, count(*) AS n FROM guest_changes GROUP BY kind")
app.timeline("where_from", "guest", "city")


def test_without_pyspark_no_other_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "everstate.pipeline.batch.given", raising=False)
    for name in ("pyspark", "pyspark.sql"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="needs the package pyspark") as refusal:
        ViewBehaviour.of(app, "by_city").given().then()
    assert "`spark`" in str(refusal.value.advice)


@pytest.mark.parametrize("view", ["changed", "where_from"])
def test_a_view_that_present_states_do_not_describe_is_refused(view: str) -> None:
    with pytest.raises(InvalidView, match="do not follow from the present states"):
        ViewBehaviour.of(app, view)


def test_mistakes_of_the_test_itself_are_told() -> None:
    view = ViewBehaviour.of(app, "by_city")
    with pytest.raises(AssertionError, match="Stranger is no entity type"):
        view.given(Stranger(guest_id="1"))
    with pytest.raises(AssertionError, match="cannot be deleted"):
        view.given().when_deleted(Guest(guest_id="1"))
    with pytest.raises(UnknownView):
        ViewBehaviour.of(app, "nothing")


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        (True, 1, False),
        (1, True, False),
        (1, 1.0, True),
        (Decimal("0.15000000"), 0.15, True),
        (0.15, Decimal("0.151"), False),
        (Decimal("0.15"), Decimal("0.1500000000001"), False),
        (float("nan"), float("nan"), True),
        (float("nan"), 0.0, False),
        ([0.1 + 0.2], [0.3], True),
        ({"a": [True]}, {"a": [1]}, False),
        ([NOON.replace(tzinfo=None)], [NOON], True),
        ([NOON], [NOON.replace(tzinfo=None)], True),
        (str(UUID(int=1)), UUID(int=1), True),
        ([1], [1, 2], False),
    ],
)
def test_values_are_compared_by_what_they_are_and_within(
    found: object, expected: object, is_same: bool
) -> None:
    view = ViewBehaviour.of(app, "by_city")
    assert (view.differences([{"x": found}], [{"x": expected}]) == []) is is_same
