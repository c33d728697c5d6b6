"""Changes that the tables refuse after they were let go, and what is cut out of messages (C19)."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from everstate.errors import ViewStoreError
from everstate.views.core import Refused
from everstate.views.stores import PostgresViewStore
from everstate.views.stores.postgres.transaction import PostgresCore
from kit.view_contract import check
from kit.view_orders import TABLES, Log, history, orders, state_of
from kit.view_postgres import PostgresKeptOrders


@pytest.fixture
def views(database: str) -> Iterator[PostgresKeptOrders]:
    with PostgresKeptOrders.installed(database) as installed:
        installed.reset(1)
        yield installed


def rewritten(changes: pa.Table, row: int, value: bytes) -> pa.Table:
    """The changes with another message at a row."""
    values = changes["raw_value"].to_pylist()
    values[row] = value
    return changes.set_column(changes.column_names.index("raw_value"), "raw_value", [values])


def unstorable(log: Log, start: int, end: int, offset: int) -> pa.Table:
    """A range whose record at an offset has a number that jsonb cannot hold."""
    changes = log.between(start, end)
    row = changes["offset"].to_pylist().index(offset)
    value = changes["raw_value"][row].as_py()
    broken = value.replace(b'"status":"open"', b'"status":"open","more":1e200000')
    assert broken != value
    return rewritten(changes, row, broken)


def test_c19_a_change_that_would_wait_and_cannot_be_stored_is_dead_at_once(
    views: PostgresKeptOrders,
) -> None:
    """It is dead once, at its own offset; what came after it waits for a version that is gone."""
    first, second, third, fourth = history("a", [state_of("a", quantity=n) for n in range(4)])
    log = Log()
    for record in (first, third, fourth, *history("b", [state_of("b")])):
        log.append(record)
    views.apply(0, 0, 4, unstorable(log, 0, 4, 1))
    log.append(second)
    done = views.apply(0, 4, 5, log.between(4, 5))
    assert (done.applied, done.released, done.dead) == (1, 0, 0)
    (dead,) = views.control.unpublished(10)
    assert (dead.offset, dead.raw_key) == (1, b"a")
    assert dead.reason.startswith("refused_by_store")
    assert views.query("SELECT key, version FROM held") == [("a", 4)]
    assert views.query("SELECT version FROM order_latest WHERE key = 'a'") == [(2,)]
    log.records[1] = replace(third, reason=dead.reason)
    check(views, [log])


def test_many_texts_that_jsonb_may_refuse_are_asked_about_in_one_statement(
    views: PostgresKeptOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each savepoint that is not released slows every reader of the database; emoji are common."""
    log = orders(200)
    changes = unstorable(log, 0, 200, 150)
    emoji = [
        value.replace(b'"status":"open"', b'"status":"open","face":"\\ud83d\\ude00"')
        for value in changes["raw_value"].to_pylist()
    ]
    changes = changes.set_column(changes.column_names.index("raw_value"), "raw_value", [emoji])
    said: list[str] = []
    execute = PostgresCore._execute

    def spied(self: PostgresCore, statement: str) -> None:
        said.append(statement)
        execute(self, statement)

    monkeypatch.setattr(PostgresCore, "_execute", spied)
    done = views.apply(0, 0, 200, changes)
    assert done.dead == 1
    ((offset, reason),) = views.connection.execute('SELECT "offset", reason FROM dead').fetchall()
    assert (offset, reason.partition(":")[0]) == (150, "refused_by_store")
    assert sum("asked" in statement for statement in said) <= 4


def test_c19_a_trailing_view_does_not_apply_what_latest_refused(views: PostgresKeptOrders) -> None:
    first, second, third = history("a", [state_of("a", quantity=n) for n in range(3)])
    log = Log()
    for record in (first, third):
        log.append(record)
    totals = TABLES["totals"]
    core = views.core([rider for rider in views.core().riders if rider != totals])
    views.apply(0, 0, 2, unstorable(log, 0, 2, 1), core=core)
    log.append(second)
    done = views.apply(0, 2, 3, log.between(2, 3), core=core)
    assert (done.applied, done.dead) == (1, 0)
    views.trail(totals, 0, 0, 2, unstorable(log, 0, 2, 1))
    views.trail(totals, 0, 2, 3, log.between(2, 3))
    assert views.query("SELECT orders, quantity FROM totals") == [(1, 1)]
    assert views.query("SELECT count(*) FROM held") == [(0,)]


def test_a_refusal_that_comes_back_ends_the_attempt(views: PostgresKeptOrders) -> None:
    class Forgetful(PostgresCore):
        """Planted: a change that latest refuses is let go all the same, again and again."""

        def write_latest(self, batch: Any) -> None:
            raise Refused(1, "planted")

    log = orders(3)
    forgetful = type("Forgetful", (PostgresViewStore,), {"core_class": Forgetful})
    with pytest.raises(ViewStoreError, match="still rejects its batch"):
        replace(views, store=forgetful).judge(0, 0, 3, log.between(0, 3))


def test_c19_what_is_dead_does_not_depend_on_how_the_log_is_cut(views: PostgresKeptOrders) -> None:
    """A middle version is in no row of latest; another split, or a history, must not judge it."""
    story = history("a", [state_of("a", quantity=n) for n in range(3)])
    log = Log()
    for record in story:
        log.append(record)
    done = views.apply(0, 0, 3, unstorable(log, 0, 3, 1), core=views.core([]))
    assert (done.applied, done.held, done.dead) == (1, 1, 1)
    views.reset(1)
    for offset in range(3):
        changes = log.between(offset, offset + 1)
        if offset == 1:
            changes = unstorable(log, 1, 2, 1)
        views.apply(0, offset, offset + 1, changes)
    account = views.control.counters("order")
    assert (account.applied, account.held, account.dead) == (1, 1, 1)


def test_a_group_value_that_no_index_holds_stops_its_view_alone_and_says_what_to_do(
    views: PostgresKeptOrders,
) -> None:
    """A long text that can be compressed fits: only one without a pattern is too long."""
    region = "".join(random.Random(1).choices(string.ascii_letters, k=4_000))
    log = Log()
    for key, state in (("a", state_of("a")), ("b", state_of("b", region=region))):
        for record in history(key, [state]):
            log.append(record)
    done = views.apply(0, 0, log.end, log.between(0, log.end))
    assert done.applied == 2
    assert [failed.view for failed in done.failures] == ["by_region"]
    reason = done.failures[0].reason
    assert "index row size" in reason
    assert "such as left(region, 200)" in reason
    assert views.query("SELECT count(*) FROM order_latest") == [(2,)]
    assert views.query("SELECT count(*) FROM by_region") == [(0,)]


@pytest.mark.parametrize("rest", [b"}", b"{}", b" x"])
def test_c19_a_message_that_cannot_be_cut_is_dead_alone(
    views: PostgresKeptOrders, rest: bytes
) -> None:
    """The parser refuses such a message; should another one come through, it stops nobody."""
    log = orders(9)
    changes = log.between(0, 9)
    value = changes["raw_value"][4].as_py() + rest
    done = views.apply(0, 0, 9, rewritten(changes, 4, value))
    assert (done.applied, done.dead) == (8, 1)
    (dead,) = views.control.unpublished(10)
    assert (dead.offset, dead.raw_value) == (4, value)
    log.records[4] = replace(log.records[4], reason=dead.reason)
    check(views, [log])
