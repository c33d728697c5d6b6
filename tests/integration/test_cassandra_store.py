"""C9: one step in one partition; an unknown outcome is read, not guessed; Once is once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from cassandra import OperationTimedOut

from cassandra_cases import committed, empty, own_keyspace
from everstate.changes import Kind
from everstate.config import Config
from everstate.errors import InvalidQuery, SourceError, Unavailable, VersionConflict
from everstate.sources.stores.cassandra import CassandraStore, Database
from everstate.sources.stores.cassandra import partition as partition_module
from everstate.sources.stores.store import AnsweredBefore, Once
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from kit.settings import altered


@pytest.fixture(scope="module")
def keyspace(cassandra: Any) -> Iterator[Config]:
    with own_keyspace(cassandra.config) as config:
        yield config


@pytest.fixture
def database(keyspace: Config) -> Iterator[Database]:
    with Database(altered(keyspace, cassandra={"write_patience_s": 2})) as database:
        empty(database)
        yield database


@pytest.fixture
def store(keyspace: Config, database: Database) -> CassandraStore:
    return CassandraStore(keyspace, ORDER, database=database)


def time_out(
    database: Database, monkeypatch: pytest.MonkeyPatch, times: int, *, done: bool
) -> None:
    """Make conditional writes end in a time-out, some done and some not."""
    real: Callable[..., Any] = database.execute_if
    left = [times]

    def execute_if(statements: Any) -> Any:
        if left[0] == 0:
            return real(statements)
        left[0] -= 1
        if done:
            real(statements)
        raise OperationTimedOut

    monkeypatch.setattr(database, "execute_if", execute_if)


@pytest.mark.parametrize("done", [True, False])
def test_C9_a_write_that_timed_out_is_settled_by_reading(
    store: CassandraStore, database: Database, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    store.put(StoredOrder(order_id="o-1", note="a"), provenance=CLERK)
    time_out(database, monkeypatch, 1, done=done)
    written = store.put(StoredOrder(order_id="o-1", note="b"), provenance=CLERK, expected_version=1)
    assert (written.version, written.kind) == (2, Kind.UPDATED)
    assert [(row.version, row.change_id) for row in committed(database)][1:] == [
        (2, str(written.change_id))
    ]


def test_C9_a_time_out_behind_which_another_write_won_is_a_conflict(
    keyspace: Config, store: CassandraStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt was not done, another writer came in between: read, then refused."""
    store.put(StoredOrder(order_id="o-1", note="a"), provenance=CLERK)
    rival = CassandraStore(keyspace, ORDER)

    def execute_if(_statements: Any) -> Any:
        monkeypatch.undo()
        rival.put(StoredOrder(order_id="o-1", note="theirs"), provenance=CLERK)
        raise OperationTimedOut

    monkeypatch.setattr(database, "execute_if", execute_if)
    with pytest.raises(VersionConflict) as conflict:
        store.put(StoredOrder(order_id="o-1", note="mine"), provenance=CLERK, expected_version=1)
    rival.close()
    assert conflict.value.actual == 2
    assert [row.version for row in committed(database)] == [1, 2]


def test_C9_an_outcome_that_stays_unknown_is_said_and_the_call_may_be_repeated(
    store: CassandraStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_out(database, monkeypatch, 10_000, done=False)
    order = StoredOrder(order_id="o-1", note="a")
    with pytest.raises(Unavailable, match="does not say whether version 1 was written"):
        store.put(order, provenance=CLERK)
    monkeypatch.undo()
    assert store.put(order, provenance=CLERK).version == 1
    assert not store.put(order, provenance=CLERK).changed
    assert len(committed(database)) == 1


def test_concurrent_writers_lose_no_update(store: CassandraStore, database: Database) -> None:
    """Read, add one, write if unchanged: the sum is the number of writes."""
    barrier = Barrier(8)

    def write(writer: int) -> int:
        barrier.wait()
        conflicts = 0
        for turn in range(6):
            key = f"o-{(writer + turn) % 3}"
            while True:
                found = store.get(key)
                weight = 0.0 if found is None else getattr(found.entity, "weight", 0.0)
                order = StoredOrder(order_id=key, weight=weight + 1)
                version = 0 if found is None else found.version
                try:
                    store.put(order, provenance=CLERK, expected_version=version)
                    break
                except VersionConflict:
                    conflicts += 1
        return conflicts

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    weights = [getattr(each.entity, "weight", 0) for each in store.page(limit=10).entities]
    assert sum(weights) == 8 * 6
    assert len(committed(database)) == 8 * 6


def test_a_walk_over_pages_gives_each_entity_once(store: CassandraStore) -> None:
    orders = [StoredOrder(order_id=f"o-{n}", note="odd" if n % 2 else "even") for n in range(37)]
    store.put_many(orders, provenance=CLERK)
    store.delete("o-3", provenance=CLERK)
    for equal, expected in ((None, 36), ({"note": "odd"}, 17), ({"note": "none"}, 0)):
        seen, cursor = list[str](), None
        while True:
            page = store.page(limit=5, cursor=cursor, equal=equal)
            assert len(page.entities) <= 5
            seen += [getattr(each.entity, "order_id", "") for each in page.entities]
            cursor = page.cursor
            if cursor is None:
                break
        assert len(seen) == len(set(seen)) == expected


@pytest.mark.parametrize(
    "cursor", ["?", "AAAA", "99999999999999999999.0", "9999999999999999999.0", "7"]
)
def test_a_cursor_that_is_none_is_refused(store: CassandraStore, cursor: str) -> None:
    store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
    with pytest.raises(InvalidQuery, match="cursor"):
        store.page(limit=5, cursor=cursor)


def once(number: int, fingerprint: str = "f") -> Once:
    return Once(
        id=f"desk/{number}", fingerprint=fingerprint, answer=lambda written: str(written.version)
    )


def test_the_same_request_again_changes_nothing(store: CassandraStore, database: Database) -> None:
    order = StoredOrder(order_id="o-1", note="a")
    assert store.answered("desk/1") is None
    assert store.put(order, provenance=CLERK, once=once(1)).version == 1
    store.put(StoredOrder(order_id="o-1", note="b"), provenance=CLERK)
    for fingerprint in ("f", "g"):
        with pytest.raises(AnsweredBefore):
            store.put(order, provenance=CLERK, once=once(1, fingerprint))
    kept = store.answered("desk/1")
    assert kept is not None
    assert (kept.fingerprint, kept.answer) == ("f", "1")
    assert len(committed(database)) == 2


def test_a_request_that_was_done_and_not_answered_is_answered_and_not_done_again(
    store: CassandraStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between write and answer."""
    order = StoredOrder(order_id="o-1", note="a")
    monkeypatch.setattr(store, "_answer", lambda *_: None)
    store.put(order, provenance=CLERK, once=once(2))
    monkeypatch.undo()
    store.put(StoredOrder(order_id="o-1", note="b"), provenance=CLERK)
    with pytest.raises(AnsweredBefore):
        store.put(order, provenance=CLERK, once=once(2))
    kept = store.answered("desk/2")
    assert kept is not None
    assert kept.answer == "1"
    assert len(committed(database)) == 2


def test_a_refused_request_leaves_nothing_and_may_come_again(
    store: CassandraStore, database: Database
) -> None:
    order = StoredOrder(order_id="o-1", note="a")
    with pytest.raises(VersionConflict):
        store.put(order, provenance=CLERK, expected_version=4, once=once(3))
    assert store.put(order, provenance=CLERK, once=once(3, "another")).version == 1
    assert store.delete("o-1", provenance=CLERK, once=once(4)).version == 2
    with pytest.raises(AnsweredBefore):
        store.delete("o-1", provenance=CLERK, once=once(4))
    assert len(committed(database)) == 2


def test_the_same_request_at_the_same_time_is_done_once(
    store: CassandraStore, database: Database
) -> None:
    barrier = Barrier(6)

    def ask(_: int) -> str:
        barrier.wait()
        try:
            store.put(StoredOrder(order_id="o-1", note="a"), provenance=CLERK, once=once(5))
        except AnsweredBefore:
            return "answered"
        return "written"

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert len(committed(database)) == 1


def test_a_request_looks_only_at_changes_that_came_since_it_was_first_made(
    store: CassandraStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, real = list[int](), store._partitions.version_of

    def version_of(key: str, change_id: UUID, since: int) -> Any:
        looked.append(since)
        return real(key, change_id, since)

    monkeypatch.setattr(store._partitions, "version_of", version_of)
    for note in ("a", "b", "c"):
        store.put(StoredOrder(order_id="o-1", note=note), provenance=CLERK)
    store.put(StoredOrder(order_id="o-1", note="d"), provenance=CLERK, once=once(6))
    assert looked == []
    with monkeypatch.context() as crash:
        crash.setattr(store, "_answer", lambda *_: None)
        store.put(StoredOrder(order_id="o-1", note="e"), provenance=CLERK, once=once(7))
    with pytest.raises(AnsweredBefore):
        store.put(StoredOrder(order_id="o-1", note="e"), provenance=CLERK, once=once(7))
    assert looked == [4]
    assert len(committed(database)) == 5


def test_changes_leave_no_tombstones_in_their_partition(
    store: CassandraStore, database: Database
) -> None:
    """The server refuses to read more than 100,000 of them."""
    for number in range(10):
        store.put(StoredOrder(order_id="o-1", note=f"{number}"), provenance=CLERK)
    query = f"SELECT * FROM {database.keyspace}.e_{ORDER.name} WHERE key = 'o-1'"
    result = database._connected().execute(query, trace=True)
    assert len(list(result)) == 10
    events = [each.description for each in result.get_query_trace(max_wait_sec=30).events]
    read = [event for event in events if event.startswith("Read ")]
    assert read
    assert all(event.endswith(" and 0 tombstone cells") for event in read), read


def test_the_time_of_recording_never_runs_back_behind_a_writer_whose_clock_is_ahead(
    store: CassandraStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([timedelta(seconds=30), timedelta(0), timedelta(0)])

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + next(times)

    monkeypatch.setattr(partition_module, "datetime", Clock)
    for note in ("x", "y", "z"):
        store.put(StoredOrder(order_id="o-1", note=note), provenance=CLERK)
    table = f"{database.keyspace}.e_{ORDER.name}"
    query = f"SELECT recorded_at FROM {table} WHERE key = 'o-1' ORDER BY version ASC"
    recorded_at = [row.recorded_at for row in database.execute(query)]
    assert len(recorded_at) == 3
    assert recorded_at == sorted(recorded_at)


def test_what_cassandra_refuses_is_told(keyspace: Config) -> None:
    section = keyspace.cassandra.model_copy(update={"keyspace": "nowhere"})
    with CassandraStore(keyspace.model_copy(update={"cassandra": section}), ORDER) as store:
        with pytest.raises(SourceError, match="nowhere"):
            store.get("o-1")
    section = keyspace.cassandra.model_copy(update={"port": 1})
    with CassandraStore(keyspace.model_copy(update={"cassandra": section}), ORDER) as store:
        with pytest.raises(Unavailable, match="does not answer"):
            store.get("o-1")
