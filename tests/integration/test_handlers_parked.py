"""Parked changes on real servers: many of a key, a command during a call, and a limit."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.changes.tokens import Spot
from everstate.config import Config
from everstate.declarations.handlers import LANES
from everstate.errors import LogIdentityChanged, TopicResized, Unavailable
from everstate.handling import worker as worker_module
from everstate.handling.tables import HandlerTables, Item, Owned
from everstate.log.members import SESSION_S
from everstate.postgres import Connection
from handler_cases import counts, handling, remember, rows, until_effects
from kit.changes import change_of
from kit.view_orders import ORDER, TELLER, ViewedOrder
from kit.waiting import until
from reading_cases import Orders, orders_app

HOT = 3_000


def nothing(change: Any, context: Any) -> None:
    return


def made(config: Config, app: App, **options: Any) -> HandlerTables:
    app.handler("order", group="g", name="h", retries=1, **options)(nothing)
    return HandlerTables(config, app.handlers["g.h"])


def owned(number: int) -> Owned:
    return Owned(number, 1, [Spot(0)] * LANES)


def failed(tables: HandlerTables, connection: Connection) -> list[tuple[Any, ...]]:
    return tables.run(connection, "failed", None).fetchall()


def rows_of(tables: HandlerTables, connection: Connection) -> int:
    return sum(counts(tables, connection))


def park(tables: HandlerTables, connection: Connection, number: int, key: str, count: int) -> None:
    """A change that failed once, and those behind it."""
    query = (
        "INSERT INTO everstate_handlers.parked"
        " (handler, partition, next_offset, done, key, version, value, reason, attempts, retry_at)"
        " SELECT %s, %s, %s + g, 0, %s, g, 'value', CASE g WHEN 1 THEN 'failed' ELSE '' END,"
        " CASE g WHEN 1 THEN 1 ELSE 0 END, now() FROM generate_series(1, %s) AS g"
    )
    at = rows_of(tables, connection)
    connection.execute(query.encode(), [tables.id, number, at, key, count])


def test_only_partitions_that_it_owns_are_called(config: Config, database: str) -> None:
    tables = made(config, orders_app())
    with tables.connected() as connection:
        for number in range(3):
            park(tables, connection, number, f"k{number}", 2)
        mine = {1: owned(1)}
        due, parked = tables.due(connection, mine)
    assert {n: [(i.key, i.parked_id) for i in found] for n, found in due.items()} == {
        1: [("k1", 3), ("k1", 4)]
    }
    assert parked == 2
    assert mine[1].blocked == {"k1"}


def test_a_hot_key_is_called_in_its_order_and_many_at_once(config: Config, database: str) -> None:
    """And no more than a part of it is in memory: so are keys that wait for a later time."""
    tables = made(config, orders_app())
    with tables.connected() as connection:
        park(tables, connection, 0, "hot", 100_000)
        park(tables, connection, 0, "later", 10)
        connection.execute(
            "UPDATE everstate_handlers.parked SET retry_at = now() + interval '1 hour'"
            " WHERE key = 'later' AND version = 1"
        )
        began = time.monotonic()
        due, parked = tables.due(connection, {0: owned(0)})
        took_s = time.monotonic() - began
    ids = [item.parked_id for item in due[0]]
    assert parked == 100_010
    assert {item.key for item in due[0]} == {"hot"}
    assert ids == list(range(1, len(ids) + 1))
    assert 1_000 < len(ids) < 10_000
    print(f"{took_s:.2f} s with {parked} parked changes")


def test_a_change_that_fails_again_holds_those_behind_it(orders: Orders) -> None:
    app, config, calls = orders_app(), orders.config, list[int]()
    good = threading.Event()

    @app.handler("order", group="g", start="beginning", retries=0)
    def hot(change: Any, context: Any) -> None:
        calls.append(change.version)
        if not good.is_set() and change.version in (1, 3):
            raise ValueError("not yet")
        remember(context, change, "hot")

    tables = HandlerTables(config, app.handlers["g.hot"])
    with orders.keeping(500):
        orders.send(*(orders.change("o1", quantity=n) for n in range(HOT)))
        orders.wait_until_kept()
        with handling(orders, app, "g.hot"), tables.connected() as connection:
            until(lambda: counts(tables, connection) == (1, HOT - 1), 60)
            assert calls == [1]
            tables.run(connection, "retry", None, None)
            until(lambda: counts(tables, connection) == (1, HOT - 1))
            assert set(calls) == {1}
            ids = [number for number, *_ in failed(tables, connection)]
            tables.run(connection, "skip", ids, ids)
            until(lambda: counts(tables, connection) == (1, HOT - 3))
            assert set(calls) == {1, 2, 3}
            good.set()
            began = time.monotonic()
            tables.run(connection, "retry", None, None)
            until_effects(config, {"o1": list(range(2, HOT + 1))}, "hot")
    print(f"{HOT} changes behind a parked one were handled in {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("fails", [True, False])
def test_a_change_that_is_skipped_during_its_call_stays_skipped(
    orders: Orders, *, fails: bool
) -> None:
    app, config = orders_app(), orders.config
    began, goes_on = threading.Event(), threading.Event()

    @app.handler("order", group="g", start="beginning", retries=5)
    def skipped(change: Any, context: Any) -> None:
        if change.version == 1:
            if context.attempt == 2:
                began.set()
                goes_on.wait(30)
            if fails or context.attempt == 1:
                raise ValueError("never")
        remember(context, change, "skipped")

    tables = HandlerTables(config, app.handlers["g.skipped"])
    with orders.keeping(500):
        orders.send(orders.change("o1", status="new"), orders.change("o1", status="paid"))
        with handling(orders, app, "g.skipped"), tables.connected() as connection:
            assert began.wait(60)
            assert tables.run(connection, "skip", None, None).rowcount == 1
            goes_on.set()
            until_effects(config, {"o1": [2] if fails else [1, 2]}, "skipped")
            until(lambda: counts(tables, connection) == (0, 0))


def test_no_more_is_read_while_too_many_are_parked(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that fails for every entity does not copy the whole log into the database."""
    monkeypatch.setattr(worker_module, "_PARKED_MAX", 10)
    app, config, fails = orders_app(), orders.config, True

    @app.handler("order", group="g", start="now", retries=0)
    def failing(change: Any, context: Any) -> None:
        if fails:
            raise ValueError("always")
        remember(context, change, "failing")

    tables = HandlerTables(config, app.handlers["g.failing"])
    query = "SELECT FROM everstate_handlers.position WHERE epoch > 0"
    first, second = ([f"{name}{n}" for n in range(20)] for name in "ab")
    with orders.keeping(500), tables.connected() as connection:
        with handling(orders, app, "g.failing") as (worker,):
            until(lambda: len(rows(config, query)) == 3 * LANES)
            orders.send(*(orders.change(key, status="new") for key in first))
            # It reads on until it looks at what is parked.
            until(lambda: worker._parked >= 10)
            orders.send(*(orders.change(key, status="new") for key in second))
            orders.wait_until_kept()
            time.sleep(1)
            parked = {key for (key,) in rows(config, "SELECT key FROM everstate_handlers.parked")}
            assert parked <= {*first}
            fails = False
            tables.run(connection, "skip", None, None)
            others = [key for key in (*first, *second) if key not in parked]
            until_effects(config, {key: [1] for key in others}, "failing")


def test_a_reset_drops_the_parked_changes_that_are_read_again(
    config: Config, database: str
) -> None:
    """By where they take effect: versions 2 and 3 do so at offset 10, where 2 came at last."""
    tables = made(config, orders_app())
    after = {"v1": Spot(5), "v2": Spot(10, 1), "v3": Spot(11), "v4": Spot(12)}
    change = ChangeCodec(ORDER).encode(
        change_of("order", "o1", 1, ViewedOrder(order_id="o1"), who=TELLER)
    )[1]
    with tables.connected() as connection:
        for reset, kept in ((Spot(7), 1), (Spot(10), 1), (Spot(10, 1), 2), (Spot(11), 3)):
            tables.place({0: Spot(0)}, b"log", again=True)
            mine = tables.take(connection, 0)
            for name, spot in after.items():
                item = Item("o1", change, spot, reason=name)
                tables.settle(connection, mine, [item])
            tables.place({0: reset}, b"log", again=True)
            reasons = [row[5] for row in failed(tables, connection)]
            assert reasons == list(after)[:kept], reset
            assert tables.take(connection, 0).spots == [reset] * LANES


def test_a_reset_into_another_log_keeps_what_is_parked(config: Config, database: str) -> None:
    """Nothing tells which of it that log has, which may have fewer partitions."""
    tables = made(config, orders_app())
    three, two = ({number: Spot(0) for number in range(count)} for count in (3, 2))
    with tables.connected() as connection:
        tables.place(three, b"old")
        for number in three:
            park(tables, connection, number, f"k{number}", 2)
        with pytest.raises(LogIdentityChanged):
            tables.place(two, b"new")
        # Their offsets are of the former log also later, when no log changes.
        for epoch in (1, 2):
            tables.place(two, b"new", again=True)
            tables.place(two, b"new")
            assert tables.positions(connection) == {0: (0, epoch), 1: (0, epoch)}
            due, parked = tables.due(connection, {number: owned(number) for number in two})
            keys = {number: {item.key for item in found} for number, found in due.items()}
            assert (keys, parked) == ({0: {"k0", "k2"}, 1: {"k1"}}, 6)


def test_who_stops_before_a_commit_holds_up_the_next_owner_for_seconds_only(
    config: Config, database: str
) -> None:
    """Less than the session, after which another process takes its partitions."""
    tables = made(config, orders_app(), timeout_s=300)
    with tables.connected() as connection, tables.connected() as stopped:
        tables.place({0: Spot(0)}, b"log")
        mine = tables.take(stopped, 0)
        with suppress(Unavailable), tables.errors(), stopped.transaction():
            assert tables.move(stopped, mine, {0: Spot(7)})
            began = time.monotonic()
            assert tables.take(connection, 0).spots == [Spot(0)] * LANES
            assert time.monotonic() - began < SESSION_S
            tables.move(stopped, mine, {0: Spot(7)})
        assert stopped.closed
        assert tables.positions(connection) == {0: (0, 2)}
        # Calls themselves have more time.
        with connection.transaction():
            assert tables.move(connection, tables.take(connection, 0), {0: Spot(7)})
        limits = connection.execute("SHOW idle_in_transaction_session_timeout").fetchall()
        assert limits == [("10min",)]


def test_a_topic_that_has_grown_is_refused(config: Config, database: str) -> None:
    """In a new log a reset gives every partition a position."""
    tables = made(config, orders_app())
    three, four = ({number: Spot(0) for number in range(count)} for count in (3, 4))
    tables.place(three, b"log")
    tables.place(three, b"log")
    for again in (False, True):
        with pytest.raises(TopicResized, match=r"has 4 partitions.* belong to 3"):
            tables.place(four, b"log", again=again)
    with tables.connected() as connection:
        with pytest.raises(TopicResized):
            tables.take(connection, 3)
        tables.place(four, b"other", again=True)
        assert tables.take(connection, 3).spots == [Spot(0)] * LANES


def test_what_a_settled_change_is(config: Config, database: str) -> None:
    """One that is parked again keeps its id; one that was skipped is not parked again."""
    tables = made(config, orders_app())
    spots = {number: Spot(0) for number in range(1)}
    with tables.connected() as connection:
        tables.place(spots, b"log")
        mine = tables.take(connection, 0)
        park(tables, connection, 0, "k", 1)
        ((item,),) = tables.due(connection, {0: mine})[0].values()
        for reason, wanted in (("again", 1), ("skipped", 0)):
            item.reason = reason
            if not wanted:
                tables.run(connection, "skip", None, None)
            tables.settle(connection, mine, [item])
            assert [row[0] for row in failed(tables, connection)] == [item.parked_id] * wanted
        assert isinstance(item, Item)
