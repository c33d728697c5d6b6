"""What a watch says has changed, without a server: folded steps are the rows."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from everstate.api.view_following import RowFilter, ViewWish
from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidQuery
from everstate.serving import view_watch
from everstate.serving.view_columns import ViewColumn
from everstate.serving.view_watch import ViewWatch, WholeView, _by_key, _changed

COLUMNS = (ViewColumn("k", "text"), ViewColumn("n", "bigint"))


def random_rows(random: Random, *, with_key: bool) -> list[tuple[Any, ...]]:
    """Rows, with a key or with doubles."""
    if with_key:
        keys = random.sample(["a", "b", "c", None], random.randint(0, 4))
        return [(key, random.choice([None, 1, 2])) for key in keys]
    return [(random.choice("ab"), random.choice([None, 1])) for _ in range(random.randint(0, 6))]


@pytest.mark.parametrize("with_key", [True, False])
def test_changes_turn_the_rows_before_into_those_after(*, with_key: bool) -> None:
    random, key = Random(4), COLUMNS[:1] if with_key else None
    for _ in range(500):
        before, after = (random_rows(random, with_key=with_key) for _ in range(2))
        old, new = (_by_key(COLUMNS, key, rows) for rows in (before, after))
        assert len(old) == len(before)
        changes = _changed(old, new)
        found = Counter(before)
        found.subtract(c.before.values for c in changes if c.before is not None)
        found.update(c.after.values for c in changes if c.after is not None)
        assert +found == Counter(after)
        assert -found == Counter()
        assert all(c.before != c.after for c in changes)
        if with_key:
            assert len(changes) <= len({row[0] for row in (*before, *after)}), "one of a key"


def whole(watch: ViewWatch, rows: list[tuple[Any, ...]], version: int = 1) -> WholeView:
    """Rows that a watch has read, with the number of its last step."""
    number = 0 if watch._whole is None else watch._whole.number
    by_key = _by_key(COLUMNS, COLUMNS[:1], rows)
    return WholeView(number, "token", version, COLUMNS, COLUMNS[:1], by_key)


def test_who_continues_gets_each_step_once_or_learns_that_steps_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view_watch, "_MEMORY_ROWS", 3)
    watch = ViewWatch(Config(), App("none"), "view")
    for number in range(5):
        watch._take(whole(watch, [("a", number)]))
        watch._take(whole(watch, [("a", number)]))  # a position without another row
    assert watch.whole().number == 4
    steps = {number: watch.behind(number) for number in range(6)}
    told = {n: None if each is None else [s.number for s in each] for n, each in steps.items()}
    assert told == {0: None, 1: [2, 3, 4], 2: [3, 4], 3: [4], 4: [], 5: None}
    assert watch.number_of(watch.id_of(3)) == 3
    other = ViewWatch(Config(), App("none"), "view")
    for unknown in (other.id_of(3), "", "x-1", watch.id_of(3) + "x", "e1.abc"):
        assert watch.number_of(unknown) is None
    watch._take(whole(watch, [("a", 4)], version=2))
    assert watch.behind(4) is None, "of another version all rows are told"
    assert watch.behind(5) == []


def test_a_filter_lets_rows_come_and_go() -> None:
    rows = RowFilter(ViewWish("view", ["n=1"], None), COLUMNS)
    old = _by_key(COLUMNS, COLUMNS[:1], [("a", 1), ("b", 2), ("c", 1)])
    new = _by_key(COLUMNS, COLUMNS[:1], [("a", 2), ("b", 1), ("c", 1)])
    found = [
        (c.before and c.before.values, c.after and c.after.values)
        for c in rows.changed(_changed(old, new))
    ]
    assert found == [(("a", 1), None), (None, ("b", 1))]
    nothing = RowFilter(ViewWish("view", ["n=null"], None), COLUMNS)
    assert nothing.changed(_changed(old, new)) == []
    with pytest.raises(InvalidQuery, match="takes = only"):
        RowFilter(ViewWish("view", ["n>1"], None), COLUMNS)
