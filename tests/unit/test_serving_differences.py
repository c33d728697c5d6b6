"""Differences between two states."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from everstate.errors import NotFound
from everstate.serving.answers import Place, Version
from everstate.serving.differences import ABSENT, Difference, differences
from everstate.serving.listing import WrittenBy
from everstate.serving.writers import last_writer, who_wrote


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"a": 1}, {"a": 1}, ()),
        ({"a": 1}, {"a": 2}, (Difference(("a",), 1, 2),)),
        (None, {"a": None}, (Difference(("a",), ABSENT, None),)),
        ({"a": 1}, None, (Difference(("a",), 1, ABSENT),)),
        ({"p": {"x": 1, "y": 2}}, {"p": {"x": 1, "y": 3}}, (Difference(("p", "y"), 2, 3),)),
        ({"p": {"x": 1}}, {"p": None}, (Difference(("p",), {"x": 1}, None),)),
        ({"l": [1, 2]}, {"l": [1, 2, 3]}, (Difference(("l",), [1, 2], [1, 2, 3]),)),
        ({"a": 1}, {"a": True}, (Difference(("a",), 1, True),)),
        ({"a": 1}, {"a": 1.0}, (Difference(("a",), 1, 1.0),)),
        ({"l": [1]}, {"l": [True]}, (Difference(("l",), [1], [True]),)),
        ({"l": [1]}, {"l": [1.0]}, (Difference(("l",), [1], [1.0]),)),
        (
            {"l": [{"ok": 0}]},
            {"l": [{"ok": False}]},
            (Difference(("l",), [{"ok": 0}], [{"ok": False}]),),
        ),
        (
            {"l": [[{"x": [0.0]}]]},
            {"l": [[{"x": [0]}]]},
            (Difference(("l",), [[{"x": [0.0]}]], [[{"x": [0]}]]),),
        ),
        ({"l": [{"a": 1, "b": [None]}]}, {"l": [{"b": [None], "a": 1}]}, ()),
        ({"l": [{"a": 1}]}, {"l": [{"b": 1}]}, (Difference(("l",), [{"a": 1}], [{"b": 1}]),)),
    ],
)
def test_each_field_that_differs_is_told_once(
    before: Any, after: Any, found: tuple[Difference, ...]
) -> None:
    assert differences(before, after) == found


def test_a_nested_field_has_a_writer_of_its_own() -> None:
    states: list[dict[str, Any]] = [
        {"p": {"x": 1, "y": 1, "e": {"f": 1}}, "a": 1},
        {"p": {"x": 2, "y": 1, "e": {}}, "a": 1},
        {"p": {"x": 2, "y": 1, "e": {}}, "a": 2},
    ]
    versions = [
        made(number, state, before)
        for number, (before, state) in enumerate(zip([None, *states], states, strict=False), 1)
    ]
    found = {path: each.version for path, each in who_wrote(reversed(versions)).fields.items()}
    assert found == {"a": 3, "p.e": 2, "p.x": 2, "p.y": 1}


def test_a_name_with_a_dot_is_no_field_within_another() -> None:
    states: list[dict[str, Any]] = [
        {"p": {"a": 1, "a.b": 1}},
        {"p": {"a": 2, "a.b": 1}},
        {"p": {"a": 2, "a.b": 2}},
    ]
    versions = [
        made(number, state, before)
        for number, (before, state) in enumerate(zip([None, *states], states, strict=False), 1)
    ]
    found = {path: each.version for path, each in who_wrote(reversed(versions)).fields.items()}
    assert found == {"p.a": 2, "p.a.b": 3}
    for name, version in {**found, "p": 3}.items():
        assert last_writer(reversed(versions), name).version == version
    with pytest.raises(NotFound, match=r"no field 'p\.b'"):
        last_writer(reversed(versions), "p.b")


@pytest.mark.parametrize(
    ("changed", "is_wanted"),
    [("p", True), ("p.a.b", True), ("p.a.b.c", True), ("p.a", False), ("q", False)],
)
def test_a_change_of_a_field_is_chosen_by_its_name(changed: str, is_wanted: bool) -> None:
    version = made(2, {"p": {"a.b": 2}}, {"p": {"a.b": 1}})
    assert WrittenBy(changed=changed).has(version) is is_wanted


def made(number: int, state: dict[str, Any], before: dict[str, Any] | None) -> Version:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Version(
        entity="guest",
        key="g",
        version=number,
        kind="updated",
        state=state,
        as_of=now,
        occurred_at=now,
        recorded_at=now,
        change_id=UUID(int=number),
        provenance={"serviceName": "desk"},
        event=None,
        transaction=None,
        place=Place(1, 0, number),
        differences=differences(before, state),
    )
