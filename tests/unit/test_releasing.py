"""Throttled changes: the order of partitions."""

from __future__ import annotations

import pytest

from everstate.pipeline.keeping.releasing import _after


@pytest.mark.parametrize(
    ("last", "expected"),
    [(None, [0, 1, 3]), (0, [1, 3, 0]), (1, [3, 0, 1]), (2, [3, 0, 1]), (3, [0, 1, 3])],
)
def test_partitions_apply_their_parts_in_turn(last: int | None, expected: list[int]) -> None:
    assert _after([0, 1, 3], last) == expected
