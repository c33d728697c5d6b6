"""Handlers on real servers: each accepted change is handled once, in order, by any number."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import threading
import time
from typing import Any

import pytest

from everstate.changes.triggers import when
from everstate.config import Config
from everstate.declarations.handlers import LANES
from everstate.errors import LogIdentityChanged
from everstate.handling.tables import HandlerTables, handler_states
from everstate.handling.worker import HandlerWorker, begin
from everstate.log.topics import Topics
from everstate.postgres import Connection
from handler_cases import counts, effects, handling, remember, rows, until_effects
from kit.verbs import verbs
from kit.waiting import until
from log_cases import forget
from reading_cases import Orders, orders_app

KEYS = [f"o{n}" for n in range(20)]


def send(orders: Orders, status: str) -> None:
    orders.send(*(orders.change(key, status=status) for key in KEYS))


def all_at(*versions: int) -> dict[str, list[int]]:
    return {key: list(versions) for key in KEYS}


def has_begun(config: Config, title: str) -> bool:
    query = "SELECT FROM everstate_handlers.position WHERE handler LIKE %s AND epoch > 0"
    return len(rows(config, query, f"%.{title}")) == 3 * LANES


def failed(tables: HandlerTables, connection: Connection) -> list[tuple[Any, ...]]:
    return tables.run(connection, "failed", None).fetchall()


def test_effects_happen_once_and_in_order_and_groups_are_independent(orders: Orders) -> None:
    app, paid = orders_app(), list[tuple[str, int]]()

    @app.handler("order", group="billing", start="beginning")
    def every(change: Any, context: Any) -> None:
        remember(context, change, "every")

    @app.handler("order", group="other", start="beginning", when=when("status").changes(to="paid"))
    async def on_paid(change: Any, context: Any) -> None:
        paid.append((change.key, change.version))

    @app.handler("order", group="later")
    def later(change: Any, context: Any) -> None:
        remember(context, change, "later")

    config = orders.config
    with orders.keeping():
        send(orders, "new")
        orders.wait_until_kept()
        with handling(orders, app, "billing.every", "other.on_paid", "later.later"):
            until_effects(config, all_at(1), "every")
            until(lambda: has_begun(config, "later.later"))
            send(orders, "paid")
            until_effects(config, all_at(1, 2), "every")
            until_effects(config, all_at(2), "later")
            until(lambda: len(paid) == len(KEYS))
        # What came meanwhile is handled by the next ones, of which there may be several.
        send(orders, "done")
        with handling(orders, app, "billing.every", "billing.every", "later.later") as workers:
            until_effects(config, all_at(1, 2, 3), "every")
            until_effects(config, all_at(2, 3), "later")
            until(lambda: all(worker._owned for worker in workers))
    assert sorted(paid) == sorted((key, 2) for key in KEYS)
    calls = rows(config, "SELECT DISTINCT call FROM effect")
    assert len(calls) == len(rows(config, "SELECT FROM effect"))


def test_keys_are_handled_at_once_and_each_in_its_order(orders: Orders) -> None:
    """Also by a process after another one that had finished some keys ahead of the position."""
    app, running, most, rng = orders_app(), 0, 0, random.Random(1)
    hangs, lock = threading.Event(), threading.Lock()

    # What was not read together with the slow call waits until that has failed.
    @app.handler("order", group="mail", start="beginning", concurrency=16, timeout_s=15)
    def slow(change: Any, context: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        while change.key == "o0" and not hangs.is_set():
            time.sleep(0.01)
        time.sleep(rng.random() / 50)
        remember(context, change)
        with lock:
            running -= 1

    config = orders.config
    with orders.keeping():
        for status in ("new", "paid", "done"):
            send(orders, status)
        orders.wait_until_kept()
        with handling(orders, app, "mail.slow") as (worker,):
            until_effects(config, {key: [1, 2, 3] for key in KEYS if key != "o0"})
            for owned in list(worker._owned.values()):
                with worker._tables.connected() as connection:
                    worker._tables.take(connection, owned.number)
            hangs.set()
            until_effects(config, all_at(1, 2, 3))
    assert most > 4


def test_an_async_function_is_called_at_once_for_different_keys(orders: Orders) -> None:
    app, seen = orders_app(), list[tuple[str, int]]()

    @app.handler("order", group="mail", start="beginning", concurrency=8)
    async def welcome(change: Any, context: Any) -> None:
        await asyncio.sleep(0.05)
        await asyncio.to_thread(remember, context, change)
        seen.append((change.key, change.version))

    with orders.keeping():
        send(orders, "new")
        with handling(orders, app, "mail.welcome"):
            until_effects(orders.config, all_at(1))
    assert len(seen) == len(KEYS)


def test_a_process_that_comes_or_goes_lets_nothing_be_called_twice(orders: Orders) -> None:
    """Also without the transaction: an owner finishes its calls before it releases a partition."""
    app, calls, stop = orders_app(), list[tuple[str, int]](), threading.Event()

    @app.handler("order", group="mail", start="beginning", concurrency=4)
    def called(change: Any, context: Any) -> None:
        time.sleep(0.002)
        calls.append((change.key, change.version))

    def load() -> None:
        while not stop.wait(0.02):
            send(orders, "new")

    thread = threading.Thread(target=load)
    with orders.keeping(500):
        thread.start()
        try:
            with handling(orders, app, "mail.called") as first:
                until(lambda: len(first[0]._owned) == 3)
                with handling(orders, app, "mail.called") as second:
                    until(lambda: second[0]._owned and len(calls) > 200)
                    shared = first[0]._owned.keys() | second[0]._owned.keys()
                    assert len(first[0]._owned) + len(second[0]._owned) == len(shared) == 3
                until(lambda: len(first[0]._owned) == 3)
                stop.set()
                thread.join()
                sent = sum(version for version, _ in orders.versions.values())
                until(lambda: len(set(calls)) == sent, 60)
        finally:
            stop.set()
            thread.join()
    assert len(calls) == len(set(calls)) == sent


def test_whoever_lost_a_partition_cannot_commit(orders: Orders) -> None:
    app, paused, goes_on = orders_app(), threading.Event(), threading.Event()

    @app.handler("order", group="billing", start="beginning")
    def remembered(change: Any, context: Any) -> None:
        remember(context, change)
        if not paused.is_set():
            paused.set()
            goes_on.wait(30)

    config = orders.config
    with orders.keeping():
        send(orders, "new")
        orders.wait_until_kept()
        with handling(orders, app, "billing.remembered"):
            assert paused.wait(60)
            tables = HandlerTables(config, app.handlers["billing.remembered"])
            with tables.connected() as connection:
                for number in range(3):
                    tables.take(connection, number)
            goes_on.set()
            until_effects(config, all_at(1))
    assert len(rows(config, "SELECT FROM effect")) == len(KEYS)


def test_a_failed_change_is_parked_and_only_its_key_waits(orders: Orders) -> None:
    app, fails, calls = orders_app(), {"o1", "o2"}, list[tuple[str, int, int]]()

    @app.handler("order", group="billing", start="beginning", retries=1)
    def strict(change: Any, context: Any) -> None:
        remember(context, change, "strict")
        calls.append((change.key, change.version, context.attempt))
        if change.key in fails:
            raise SystemExit("no such account")

    @app.handler("order", group="mail", start="beginning", retries=0, on_parked="pass")
    def lenient(change: Any, context: Any) -> None:
        if change.key in fails and change.version == 1:
            raise ValueError("no address")
        remember(context, change, "lenient")

    config = orders.config
    tables = HandlerTables(config, app.handlers["billing.strict"])
    good = {key: [1, 2] for key in KEYS if key not in fails}
    with orders.keeping():
        send(orders, "new")
        send(orders, "paid")
        with (
            handling(orders, app, "billing.strict", "mail.lenient"),
            tables.connected() as connection,
        ):
            until_effects(config, good, "strict")
            until_effects(config, good | {key: [2] for key in fails}, "lenient")
            until(lambda: counts(tables, connection) == (2, 2))
            found = {row[1]: row for row in failed(tables, connection)}
            reason = "SystemExit: no such account"
            assert [found[key][2:] for key in sorted(fails)] == [(1, 2, None, reason)] * 2
            assert {attempt for key, _, attempt in calls if key == "o1"} == {1, 2}
            (state, _) = handler_states(config, app.handlers.values())
            assert (state[0], state[3:]) == ("billing.strict", (2, 2, None))
            fails.clear()
            assert tables.run(connection, "retry", *[[found["o1"][0]]] * 2).rowcount == 1
            until_effects(config, good | {"o1": [1, 2]}, "strict")
            assert tables.run(connection, "skip", *[[found["o2"][0]]] * 2).rowcount == 1
            until_effects(config, good | {"o1": [1, 2], "o2": [2]}, "strict")
            until(lambda: counts(tables, connection) == (0, 0))
            send(orders, "done")
            until(lambda: effects(config, "strict")["o2"] == [2, 3])


def test_a_slow_call_is_ended_and_its_change_parked(orders: Orders) -> None:
    app, is_slow = orders_app(), True

    @app.handler("order", group="billing", start="beginning", retries=0, timeout_s=1.5)
    def remembered(change: Any, context: Any) -> None:
        with context.connection.transaction():
            remember(context, change)
            if is_slow and change.key == "o3":
                time.sleep(20)

    @app.handler("order", group="mail", start="beginning", retries=0, timeout_s=1.5)
    async def waits(change: Any, context: Any) -> None:
        if is_slow and change.key == "o3":
            await asyncio.sleep(20)
        remember(context, change, "waits")

    config = orders.config
    (billing, mail) = (HandlerTables(config, each) for each in app.handlers.values())
    with orders.keeping():
        send(orders, "new")
        with handling(orders, app, "billing.remembered", "mail.waits"):
            with billing.connected() as connection:
                for name, tables in (("remember", billing), ("waits", mail)):
                    until_effects(config, {k: [1] for k in KEYS if k != "o3"}, name)
                    until(lambda at=tables: counts(at, connection) == (1, 0))
                reasons = [failed(tables, connection)[0][5] for tables in (billing, mail)]
                assert reasons == ["its code took longer than 1.5 s", "TimeoutError"]
                is_slow = False
                assert billing.run(connection, "retry", None, None).rowcount == 1
            until_effects(config, all_at(1))


def test_an_effect_that_is_refused_at_the_commit_is_parked(orders: Orders) -> None:
    """As by a deferred constraint: the others of its transaction are handled."""
    app = orders_app()

    @app.handler("order", group="billing", start="beginning", retries=0)
    def unique(change: Any, context: Any) -> None:
        key = "same" if change.key in ("o4", "o5") else change.key
        context.connection.execute("INSERT INTO once VALUES (%s)", [key])
        remember(context, change)

    config = orders.config
    rows(config, "CREATE TABLE once (key text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    with orders.keeping():
        send(orders, "new")
        with handling(orders, app, "billing.unique"):
            tables = HandlerTables(config, app.handlers["billing.unique"])
            with tables.connected() as connection:
                until(lambda: counts(tables, connection) == (1, 0))
                ((_, key, *_, reason),) = failed(tables, connection)
            assert "duplicate key value" in reason
            until_effects(config, {each: [1] for each in KEYS if each != key})


def test_a_handler_that_runs_goes_on_where_a_reset_puts_it(orders: Orders) -> None:
    app, config = orders_app(), orders.config

    @app.handler("order", group="billing", start="beginning")
    def remembered(change: Any, context: Any) -> None:
        remember(context, change)

    handler = app.handlers["billing.remembered"]
    tables = HandlerTables(config, handler)
    with orders.keeping():
        send(orders, "new")
        with handling(orders, app, "billing.remembered"):
            until_effects(config, all_at(1))
            now, log = begin(config, app, handler, "now")
            send(orders, "paid")
            until_effects(config, all_at(1, 2))
            for again in ([2, 2], [2, 2, 2]):
                tables.place(now, log, again=True)
                until_effects(config, all_at(1, *again))
            # Every few seconds the position passes what no lane had to handle.
            until(lambda: handler_states(config, [handler])[0][1] == 0)


def test_positions_of_another_log_are_refused(orders: Orders) -> None:
    app = orders_app()
    app.handler("order", group="billing", name="nothing")(lambda change, context: None)
    handler = app.handlers["billing.nothing"]
    tables = HandlerTables(orders.config, handler)
    with HandlerWorker(orders.config, app, handler) as worker:
        worker.open()
        with tables.connected() as connection:
            connection.execute("UPDATE everstate_handlers.position SET log = 'other'")
        with pytest.raises(LogIdentityChanged):
            worker.open()
        tables.place(*begin(orders.config, app, handler, "now"), again=True)
        worker.open()


CODE = """
from typing import Any
from everstate import App
from kit.view_orders import ViewedOrder

app = App("orders")
app.entity("order", key="order_id")(ViewedOrder)


app.entity("parcel", key="order_id")(ViewedOrder)


@app.handler("order", group="billing", start="beginning", retries=0)
def fails(change: Any, context: Any) -> None:
    raise ValueError("never")


@app.handler("order", group="mixed", name="first")
@app.handler("parcel", group="mixed", name="second")
@app.handler("parcel", group="away", dsn="postgresql://127.0.0.1:1/none")
def nothing(change: Any, context: Any) -> None:
    return
"""


def test_verbs_show_and_change_what_a_group_has_to_do(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = orders.config
    monkeypatch.setenv("EVERSTATE_VIEWS_SCHEMA_NAME", config.views.schema_name)
    everstate = verbs(config, monkeypatch, "handlers", app="billing_app:app", code=CODE)
    code, out, _ = everstate("list", "--json")
    never = json.loads(out)[0]
    assert (code, never["lag_changes"], never["lag_seconds"]) == (0, None, None)
    app = importlib.import_module("billing_app").app

    with orders.keeping():
        send(orders, "new")
        orders.wait_until_kept()
        with handling(orders, app, "billing.fails"):
            # Every few seconds positions pass what no lane had to handle.
            wanted = {"parked": len(KEYS), "lag_changes": 0}.items()
            until(lambda: wanted <= json.loads(everstate("list", "--json")[1])[0].items(), 60)
        shown = json.loads(everstate("show", "billing", "--json")[1])
        assert {each["key"] for each in shown} == set(KEYS)
        assert {each["reason"] for each in shown} == {"ValueError: never"}
        assert everstate("retry", "billing")[0] == 2
        assert "1 changes are called again" in everstate("retry", "billing", str(shown[0]["id"]))[2]
        assert f"{len(KEYS)} changes are skipped" in everstate("skip", "billing.fails", "--all")[2]
        assert everstate("show", "sms")[0] == 2
        _, out, _ = everstate("reset", "billing", "--to", "beginning", "--dry-run", "--json")
        moves = json.loads(out)
        assert {each["new_position"] for each in moves} == {0}
        assert all(each["position"] >= 1 for each in moves)
        assert all(each["runs_again"] == each["position"] for each in moves)
        everstate("reset", "billing", "--to", "beginning")
        states = json.loads(everstate("list", "--json")[1])
        assert states[0]["lag_changes"] >= len(KEYS)
        assert "does not answer" in states[1]["problem"]
        assert [each["problem"] for each in states].count(None) == 3


def test_a_reset_moves_all_handlers_of_a_group_or_none(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of one entity type is refused for a handler of another one."""
    config = orders.config
    monkeypatch.setenv("EVERSTATE_VIEWS_SCHEMA_NAME", config.views.schema_name)
    everstate = verbs(config, monkeypatch, "handlers", app="mixed_app:app", code=CODE)
    with Topics(config) as topics:
        topics.ensure(["parcel"])
    send(orders, "new")
    orders.keep()
    (*_, newest) = orders.app.changes("order", since="beginning", until="now", config=config)
    code, _, said = everstate("reset", "mixed", "--to", newest.token)
    assert (code, "it has no position of parcel" in said) == (2, True)
    assert rows(config, "SELECT FROM everstate_handlers.position") == []
    assert everstate("reset", "mixed", "--to", "nwo")[0] == 2
    assert everstate("reset", "mixed", "--to", "now")[0] == 0
    assert len(rows(config, "SELECT FROM everstate_handlers.position")) == 2 * 3 * LANES
    # All changes of this test came after yesterday's noon.
    _, out, _ = everstate("reset", "mixed", "--to", "yesterday 12:00", "--dry-run", "--json")
    moves = json.loads(out)
    assert {each["new_position"] for each in moves} == {0}
    assert sum(each["runs_again"] for each in moves) >= len(KEYS)
    # No handler could go on there.
    placed = "SELECT * FROM everstate_handlers.position ORDER BY handler, partition, lane"
    before = rows(config, placed)
    forget(config, orders.topic, orders.kept.vector())
    code, _, said = everstate("reset", "mixed.first", "--to", "beginning")
    assert (code, "neither in the log nor in the archive" in said) == (9, True)
    assert rows(config, placed) == before


BAD = "o3"
LIMIT_S = 4.0


async def left_behind(change: Any, context: Any) -> None:
    """The thread of a call that is given up goes on, and writes late."""

    def work() -> None:
        if change.key == BAD:
            time.sleep(1.3 * LIMIT_S)
        remember(context, change, "left_behind")

    await asyncio.to_thread(work)


def rolls_back(change: Any, context: Any) -> None:
    remember(context, change, "rolls_back")
    if change.key == BAD:
        context.connection.execute("ROLLBACK")


def closes(change: Any, context: Any) -> None:
    remember(context, change, "closes")
    if change.key == BAD:
        context.connection.close()


def half_a_letter(change: Any, context: Any) -> None:
    remember(context, change, "half_a_letter")
    if change.key == BAD:
        raise ValueError("\ud83d")


async def blocks(change: Any, context: Any) -> None:
    if change.key == BAD:
        time.sleep(20)
    await asyncio.to_thread(remember, context, change, "blocks")


def test_a_function_that_does_what_it_must_not_parks_its_own_change_only(orders: Orders) -> None:
    app, config = orders_app(), orders.config
    bad = (left_behind, rolls_back, closes, half_a_letter, blocks)
    for function in bad:
        declare = app.handler("order", group="bad", start="beginning", retries=0, timeout_s=LIMIT_S)
        declare(function)
    titles = [f"bad.{function.__name__}" for function in bad]
    others = {key: [1] for key in KEYS if key != BAD}
    with orders.keeping():
        send(orders, "new")
        orders.wait_until_kept()
        with handling(orders, app, *titles):
            for title in titles:
                until_effects(config, others, title.removeprefix("bad."))
                tables = HandlerTables(config, app.handlers[title])
                with tables.connected() as connection:
                    until(lambda t=tables, c=connection: counts(t, c) == (1, 0))
        time.sleep(LIMIT_S)  # for longer than the thread that was left behind sleeps
    for title in titles:
        assert effects(config, title.removeprefix("bad.")) == others
