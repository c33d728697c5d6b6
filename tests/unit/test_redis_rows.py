"""How rows are divided into the scripts that write them to Redis."""

from __future__ import annotations

from itertools import chain

import pytest

from everstate.views.stores import redis
from everstate.views.stores.redis import _calls


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([1, 1], [2]),
        ([1] * 7, [3, 3, 1]),
        ([6, 5, 6, 99, 1, 9], [1, 1, 1, 1, 2]),
        ([99], [1]),
    ],
)
def test_a_script_writes_few_rows_and_little_text(
    sizes: list[int], parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server does nothing else meanwhile, and has all of it in memory twice."""
    monkeypatch.setattr(redis, "_CALL_ROWS", 3)
    monkeypatch.setattr(redis, "_CALL_CHARACTERS", 10)
    given = [("x" * size, number) for number, size in enumerate(sizes)]
    found = list(_calls(given))
    assert [len(part) for part in found] == parts
    assert list(chain.from_iterable(found)) == given
