"""What a watch says has changed, without a server: folded steps are the rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from math import nan
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
from pydantic import BaseModel

from everstate.api.view_following import RowFilter, ViewSubscriptions, ViewWish
from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidQuery, Unavailable, ValueRefused
from everstate.serving import view_watch
from everstate.serving.view_columns import ViewColumn
from everstate.serving.view_watch import ViewWatch, WholeView, _by_key, _changed


class Guest(BaseModel):
    k: str
    n: int = 0


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


def test_a_watch_that_ends_by_an_unknown_error_says_so_and_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        assert joined.wait(10)
        raise ZeroDivisionError("nobody expected it")

    app, joined, woken = App("hotel"), Event(), Event()
    app.entity("guest", key="k")(Guest)
    watch = ViewWatch(Config(), app, "guest")
    monkeypatch.setattr(view_watch, "_LOOK_S", 0.001)
    monkeypatch.setattr(watch, "_rows", lambda _: whole(watch, [("a", 1)]))
    monkeypatch.setattr(watch, "_look", fails)
    assert watch.join(woken.set)
    joined.set()
    assert woken.wait(20.0)
    assert isinstance(watch.failure, Unavailable)
    assert "nobody expected it" not in watch.failure.public
    assert not watch.join(woken.set)


def test_who_joins_first_sees_why_a_watch_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it were replaced again and again, and nobody would learn why."""

    def fails() -> None:
        raise ZeroDivisionError("nobody expected it")

    app, woken = App("hotel"), Event()
    app.entity("guest", key="k")(Guest)
    watch = ViewWatch(Config(), app, "guest")
    monkeypatch.setattr(watch, "_rows", lambda _: whole(watch, [("a", 1)]))
    monkeypatch.setattr(watch, "_look", fails)
    monkeypatch.setattr(Thread, "start", Thread.run)
    assert watch.join(woken.set)
    assert woken.is_set()
    assert isinstance(watch.failure, Unavailable)
    assert not watch.join(woken.set)


def test_a_watch_whose_thread_did_not_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    app = App("hotel")
    app.entity("guest", key="k")(Guest)
    watch = ViewWatch(Config(), app, "guest")
    monkeypatch.setattr(watch, "_rows", lambda _: whole(watch, [("a", 1)]))
    with monkeypatch.context() as lacking:
        lacking.setattr(Thread, "start", refused)
        with pytest.raises(RuntimeError):
            watch.join(lambda: None)
    assert not watch.join(lambda: None)


def test_a_filter_for_not_a_number_finds_its_rows() -> None:
    columns = (ViewColumn("x", "double precision"),)
    rows = RowFilter(ViewWish("view", ["x=nan"], None), columns)
    seen = [row.values[0] for row in _by_key(columns, None, [(1.0,), (nan,), (None,)]).values()
            if rows.seen(row) is not None]  # fmt: skip
    assert [str(value) for value in seen] == ["nan"]


def test_a_subscriber_of_a_view_that_leaves_before_its_first_event_is_not_followed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = App("hotel")
    app.entity("guest", key="k")(Guest)
    subscriptions = ViewSubscriptions(Config(), app)
    watch = subscriptions._readers["guest"] = ViewWatch(Config(), app, "guest")
    monkeypatch.setattr(watch, "_rows", lambda _: whole(watch, [("a", 1)]))
    monkeypatch.setattr(watch, "_look", lambda: None)

    async def in_place(call: Callable[[], Any]) -> Any:
        return call()

    async def leave_at_once() -> None:
        opened = await subscriptions.open(ViewWish("guest", (), None), in_place)
        assert len(watch._wakes) == 1
        await opened.aclose()

    asyncio.run(leave_at_once())
    assert not watch._wakes
    subscriptions.close()


def test_a_subscription_may_name_a_value_with_a_semicolon() -> None:
    wish = ViewWish.of("view", {"where": 'k="a;b";n=1'}, None)
    rows = RowFilter(wish, COLUMNS)
    seen = _by_key(COLUMNS, COLUMNS[:1], [("a;b", 1), ("a", 1), ("c", 2)]).values()
    assert [row.values for row in seen if rows.seen(row) is not None] == [("a;b", 1)]


def test_a_view_that_postgresql_cannot_compute_ends_its_watch_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = ViewWatch(Config(), App("none"), "view")

    def look() -> None:
        raise ValueRefused("division by zero")

    monkeypatch.setattr(view_watch, "_LOOK_S", 0.001)
    monkeypatch.setattr(watch, "_look", look)
    watch._run()
    assert isinstance(watch.failure, Unavailable)
    assert "ValueRefused: division by zero" in watch.failure.message
    assert caplog.records[-1].exc_info is not None
