"""How often the index of unpublished changes in Cassandra is read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest

from everstate.cassandra import Database
from everstate.sources.stores.cassandra import unpublished as unpublished_module
from everstate.sources.stores.cassandra.unpublished import Unpublished


class Looks:
    """An empty index that counts how often each second of it is read."""

    keyspace = "k"

    def __init__(self) -> None:
        self.at: Counter[int] = Counter()

    def clock_s(self) -> float:
        return time.time()

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        return []

    def execute_many(self, statement: str, each: Iterable[Sequence[Any]]) -> list[list[Any]]:
        buckets = [bucket for (bucket,) in each]
        self.at.update(buckets)
        return [[] for _ in buckets]


def test_a_second_is_read_ever_less_often_and_once_more_when_nobody_adds_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, now = Looks(), 1_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    unpublished = Unpublished(cast(Database, looks))
    for _ in range(20 * 60):
        unpublished.open()
        now += 0.05
    middle = {at: count for at, count in looks.at.items() if 1_000_005 < at < 1_000_020}
    assert len(middle) == 14
    # While it may still be written to by any clock, at each step; then ten times at most.
    hot = 20 * (unpublished_module._AHEAD_S + 1 + unpublished_module._HOT_S)
    assert all(hot < count <= hot + 10 for count in middle.values()), middle
    last = min(at for at in unpublished._buckets)
    kept_s = 2 * unpublished_module._GRACE_S + 1
    assert now - last < kept_s + unpublished_module._RELOOK_S_MAX
