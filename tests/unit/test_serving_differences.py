"""Differences between two states."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstate.serving.differences import ABSENT, Difference, differences

_values = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "b"]))
_states = st.dictionaries(
    st.sampled_from("abc"),
    st.one_of(_values, st.dictionaries(st.sampled_from("xy"), _values)),
)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"a": 1}, {"a": 1}, ()),
        ({"a": 1}, {"a": 2}, (Difference("a", 1, 2),)),
        (None, {"a": None}, (Difference("a", ABSENT, None),)),
        ({"a": 1}, None, (Difference("a", 1, ABSENT),)),
        ({"p": {"x": 1, "y": 2}}, {"p": {"x": 1, "y": 3}}, (Difference("p.y", 2, 3),)),
        ({"p": {"x": 1}}, {"p": None}, (Difference("p", {"x": 1}, None),)),
        ({"l": [1, 2]}, {"l": [1, 2, 3]}, (Difference("l", [1, 2], [1, 2, 3]),)),
        ({"a": 1}, {"a": True}, (Difference("a", 1, True),)),
    ],
)
def test_each_field_that_differs_is_told_once(
    before: Any, after: Any, found: tuple[Difference, ...]
) -> None:
    assert differences(before, after) == found


@given(before=_states, after=_states)
def test_applying_the_differences_to_before_gives_after(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    made: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in before.items()}
    for difference in differences(before, after):
        *parents, name = difference.path.split(".")
        target = made
        for parent in parents:
            target = target[parent]
        if difference.after is ABSENT:
            del target[name]
        else:
            target[name] = difference.after
    assert made == after
