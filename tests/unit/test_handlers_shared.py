"""What a handler's process does when its partitions change, and how calls end; without servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg import pq

from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.changes.tokens import Spot
from everstate.config import Config
from everstate.declarations.handlers import LANES
from everstate.errors import TopicResized, Unavailable
from everstate.handling.calling import FunctionCaller
from everstate.handling.tables import HandlerTables, Item, Owned
from everstate.handling.worker import HandlerWorker
from kit.changes import change_of
from kit.view_orders import ORDER, START, TELLER, ViewedOrder
from reading_cases import orders_app

CONFIG = Config(store={"dsn": "postgresql://localhost/none"}, log={"prefix": "shop"})


def handled_by(function: Any, **options: Any) -> App:
    app = orders_app()
    app.handler("order", group="g", name="h", retries=0, **options)(function)
    return app


class Tables(HandlerTables):
    """Epochs in memory, of a database that answers or not."""

    def __init__(self, app: App) -> None:
        super().__init__(CONFIG, app.handlers["g.h"])
        self.epochs, self.is_down = dict.fromkeys(range(3), 0), False

    @contextmanager
    def errors(self) -> Iterator[None]:
        yield

    def positions(self, connection: Any) -> dict[int, tuple[int, int]]:
        if self.is_down:
            connection.closed = True
            raise Unavailable("the database does not answer.")
        return {number: (0, epoch) for number, epoch in self.epochs.items()}

    def take(self, connection: Any, number: int) -> Owned:
        self.epochs[number] += 1
        return Owned(number, self.epochs[number], [Spot(number)] * LANES)

    def due(self, connection: Any, owned: Any) -> tuple[dict[int, list[Item]], int]:
        return {}, 0

    def move(self, connection: Any, owned: Any, spots: Any) -> bool:
        return True


class Member:
    """A member whose partitions the test sets."""

    def __init__(self, worker: HandlerWorker) -> None:
        self.worker, self.owned = worker, frozenset[int]()
        self.next = frozenset[int]()

    def poll(self, wait_s: float = 0.0) -> None:
        self.worker._released(self.owned - self.next)
        self.owned = self.next


class Seeks:
    """Changes of which only the seeks are seen."""

    def __init__(self) -> None:
        self.seeks: list[dict[int, Spot]] = []
        self.spots = {(1, number): Spot(0) for number in range(3)}

    def seek(self, spots: dict[int, Spot]) -> None:
        self.seeks.append(spots)

    def read(self, wait_s: float, partitions: object) -> list[Any]:
        return []


def running() -> tuple[HandlerWorker, Tables, Member, Seeks]:
    app = handled_by(lambda change, context: None)
    worker = HandlerWorker(CONFIG, app, app.handlers["g.h"])
    tables, member, seeks = Tables(app), Member(worker), Seeks()
    connection = SimpleNamespace(closed=False)
    given = {"_tables": tables, "_member": member, "_changes": seeks, "_connection": connection}
    vars(worker).update(given)
    return worker, tables, member, seeks


def test_a_process_reads_on_in_what_remains_after_each_change_of_its_partitions() -> None:
    """Also when it only loses some: a reader of the archive waits for the partition in hand."""
    worker, tables, member, changes = running()
    sought = list[list[int]]()
    for owned in ({0, 1}, {0, 1}, {1}, {1, 2}, {0}, set(), {0, 1, 2}):
        member.next = frozenset(owned)
        before = len(changes.seeks)
        worker.step()
        assert worker._owned.keys() == owned
        sought += [list(each) for each in changes.seeks[before:]]
    assert sought == [[0, 1], [1], [1, 2], [0], [], [0, 1, 2]]
    # What remains is not taken again: nobody else has had it.
    assert tables.epochs == {0: 3, 1: 2, 2: 2}
    assert changes.seeks[0] == {0: Spot(0), 1: Spot(1)}


def test_after_a_reset_and_after_an_error_all_partitions_are_taken_over_again() -> None:
    worker, tables, member, changes = running()
    member.next = frozenset({0, 1})
    worker.step()
    tables.epochs[1] += 1
    worker._look_at_s = 0.0
    worker.step()
    assert not worker._owned
    worker.step()
    assert (set(worker._owned), tables.epochs) == ({0, 1}, {0: 2, 1: 3, 2: 0})
    worker.failed(Unavailable("the database does not answer."))
    worker.step()
    assert (set(worker._owned), tables.epochs) == ({0, 1}, {0: 3, 1: 4, 2: 0})
    assert len(changes.seeks) == 3


def test_after_a_reset_into_a_log_of_fewer_partitions_all_are_released() -> None:
    worker, tables, member, _ = running()
    member.next = frozenset({0, 2})
    worker.step()
    del tables.epochs[2]
    worker._look_at_s = 0.0
    worker.step()
    assert not worker._owned


def test_a_process_that_does_not_reach_its_database_leaves_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, tables, member, _ = running()
    member.next = frozenset({0, 1})
    worker.step()
    opened = list[bool]()
    left = list[str]()
    worker._opened.callback(lambda: left.append("left"))

    class Away:
        def __init__(self, *given: object) -> None:
            raise Unavailable("Kafka does not answer.")

    monkeypatch.setattr("everstate.handling.worker.Topics", Away)
    tables.is_down, worker._look_at_s = True, 0.0
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            worker.step()
        worker.failed(caught.value)
        opened.append(bool(left))
    assert opened == [False, True, True]
    assert left == ["left"]
    assert not worker._owned


def test_a_partition_that_came_later_has_no_position() -> None:
    tables = HandlerTables(CONFIG, handled_by(lambda change, context: None).handlers["g.h"])
    stored = {"take": [], "positions": [(0, 7, 1), (1, 8, 1)]}
    vars(tables)["run"] = lambda connection, name, *given: stored[name]
    with pytest.raises(TopicResized, match=r"has 3 partitions; the stored positions belong to 2"):
        tables.take(None, 2)  # type: ignore[arg-type]


class Session:
    """A connection of which only the statements are seen."""

    def __init__(self) -> None:
        self.closed, self.statements = False, list[str]()
        self.info = SimpleNamespace(backend_pid=7, transaction_status=pq.TransactionStatus.INTRANS)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        return

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.info.transaction_status = pq.TransactionStatus.IDLE

    def execute(self, statement: str, given: object = ()) -> None:
        self.statements.append(statement)

    def close(self) -> None:
        self.closed = True


def item() -> Item:
    now = ViewedOrder(order_id="o1", status="new")
    times = {"occurred_at": START, "recorded_at": START}
    made = change_of("order", "o1", 1, now, who=TELLER, **times)
    return Item("o1", ChangeCodec(ORDER).encode(made)[1], Spot(1))


def calling(app: App, sessions: list[Session], most: int) -> FunctionCaller:
    """A caller for which the server takes at most so many sessions."""

    class Settled(Tables):
        def opened(self) -> Any:
            if len(sessions) == most:
                raise Unavailable("the server takes no more sessions.")
            sessions.append(Session())
            return sessions[-1]

        def settle(self, connection: Any, owned: Any, items: Any) -> None:
            return

    return FunctionCaller(Settled(app))


def run(caller: FunctionCaller, given: Item) -> None:
    caller.run(Owned(0, 1, [Spot(0)] * LANES), [given], 10.0)


@pytest.mark.parametrize("closes", [True, False])
def test_a_session_is_ended_unless_it_is_over(*, closes: bool) -> None:
    """After that, its number may be that of somebody else's session."""
    sessions, change = list[Session](), item()

    def bad(change: Any, context: Any) -> None:
        if closes:
            context.connection.close()
        raise ValueError("bad")

    run(calling(handled_by(bad), sessions, 3), change)
    assert (change.is_finished, change.reason) == (True, "ValueError: bad")
    ended = [each for session in sessions for each in session.statements]
    assert ended == ([] if closes else ["SELECT pg_terminate_backend(%s)"])


def test_a_session_that_a_failed_call_may_still_use_is_used_by_no_other_call() -> None:
    """Also when the server takes no session to end it: a thread of the call may be left behind."""
    sessions, change = list[Session](), item()

    def bad(change: Any, context: Any) -> None:
        raise ValueError("bad")

    with pytest.raises(Unavailable, match="takes no more sessions"):
        run(calling(handled_by(bad), sessions, 1), change)
    assert (sessions[0].closed, change.is_finished) == (True, False)


def test_async_calls_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's client of HTTP, or its lock, belongs to a loop."""
    loops, made = set[asyncio.AbstractEventLoop](), asyncio.new_event_loop

    async def seen(change: Any, context: Any) -> None:
        loops.add(asyncio.get_running_loop())

    def slow() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        return made()

    # As a cached property is since Python 3.12.
    monkeypatch.setattr(vars(FunctionCaller)["_loop"], "lock", nullcontext(), raising=False)
    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    changes = [item() for _ in range(4)]
    with calling(handled_by(seen, concurrency=4), [], 9) as caller, ThreadPoolExecutor(4) as pool:
        wait([pool.submit(run, caller, each) for each in changes])
    assert [each.reason for each in changes if each.is_finished] == [None] * 4
    assert len(loops) == 1
