"""C1: neither the sequence nor the transaction id is the order of commits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest

from everstate.config import Config
from everstate.sources.outbox import Relay
from everstate.sources.outbox.pending import Pending, PendingPage, Transaction
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.stores.postgres.database import OutboxConnection
from everstate.testing.log_checker import check_log
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from kit.settings import altered
from tiers import counted

pytestmark = pytest.mark.settings(store={"relay_batch_rows": 50}, topics=[ORDER.name])

HELD_OPEN_S = counted(1.0, full=10.0)
_COLUMNS = "id, xid::text, entity, key, bytes"


@pytest.fixture
def store(config: Config) -> Iterator[EntityStore]:
    with EntityStore(config, ORDER, connections_max=12) as store:
        store.install()
        yield store


@pytest.fixture
def relay(config: Config, store: EntityStore) -> Iterator[Relay]:
    with Relay(config, [ORDER]) as relay:
        yield relay


def drain(relay: Relay) -> int:
    total = 0
    while moved := relay.step():
        total += moved
    return total


def put(
    store: EntityStore, key: str, note: str, connection: OutboxConnection | None = None
) -> None:
    store.put(StoredOrder(order_id=key, note=note), provenance=CLERK, connection=connection)


def play_c1(store: EntityStore, relay: Relay) -> None:
    """T_b takes its xid on Z; T_c stays open; T_a commits K; T_b commits K's next version."""
    for version in range(1, 5):
        put(store, "K", f"{version}")
    drain(relay)
    with ExitStack() as c_stays:
        with store.transaction() as t_b:
            put(store, "Z", "by b", t_b)
            t_c = c_stays.enter_context(store.transaction())
            put(store, "Y", "by c", t_c)
            with store.transaction() as t_a:
                put(store, "K", "5, by a", t_a)
            put(store, "K", "6, by b", t_b)
        # T_c is still open: nothing of the others may wait for it.
        assert drain(relay) == 3
    put(store, "X", "after c")
    drain(relay)


def test_C1_the_schedule_that_breaks_xid_order_comes_out_in_version_order(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    play_c1(store, relay)
    report = check_log(config, [ORDER.name])
    assert report.problems == []
    assert report.changes == 9


def wait_until_published(config: Config) -> None:
    """Until nothing that is committed waits in the outbox."""
    deadline = time.monotonic() + 30
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        query = "SELECT count(*) FROM everstate_store.outbox_pending"
        while (left := connection.execute(query).fetchone()) != (0,):
            assert time.monotonic() < deadline, f"{left} changes wait"
            time.sleep(0.02)


def by_sequence(cursor: list[int]) -> Callable[[OutboxConnection, int], PendingPage]:
    """The planted defect: a relay that remembers the highest id it has seen."""

    def read(connection: OutboxConnection, rows_max: int) -> PendingPage:
        query = f"SELECT {_COLUMNS} FROM everstate_store.outbox_pending WHERE id > %s ORDER BY id"
        rows = [Pending._make(row) for row in connection.execute(query, [cursor[0]]).fetchall()]
        cursor[0] = max([cursor[0], *(row.id for row in rows)])
        return PendingPage(rows, False, frozenset())

    return read


def by_xid8(connection: OutboxConnection, rows_max: int) -> PendingPage:
    """The planted defect: what is committed, in the order of transaction ids.

    Without the bound `xid < pg_snapshot_xmin(…)`, which such relays have: it changes when the
    rows are read and not their order, and any open transaction of this server would stall it.
    """
    query = f"SELECT {_COLUMNS} FROM everstate_store.outbox_pending ORDER BY xid, id"
    rows = [Pending._make(row) for row in connection.execute(query).fetchall()]
    return PendingPage(rows, False, frozenset())


def as_read(page: PendingPage, withheld: AbstractSet[str]) -> list[Transaction]:
    """The planted defect's other half: transactions in the order of the page."""
    going: dict[str, Transaction] = {}
    for row in page.rows:
        if row.xid not in withheld:
            going.setdefault(row.xid, Transaction(row.xid)).rows.append(row)
    return list(going.values())


def test_C1_the_checker_catches_an_outbox_ordered_by_sequence(
    config: Config, store: EntityStore, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.outbox.relay.read_page", by_sequence([0]))
    play_c1(store, relay)
    assert check_log(config, [ORDER.name]).problems == ["order 'Y' version 1: missing"]


def test_C1_the_checker_catches_an_outbox_ordered_by_xid8(
    config: Config, store: EntityStore, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.outbox.relay.read_page", by_xid8)
    monkeypatch.setattr("everstate.sources.outbox.relay.sendable", as_read)
    play_c1(store, relay)
    problems = check_log(config, [ORDER.name]).problems
    assert problems == [
        "order 'K' version 6: follows version 4",
        "order 'K' version 5: follows version 6",
    ]


def test_a_prepared_transaction_left_over_stalls_nobody(
    config: Config, store: EntityStore, relay: Relay, database: str
) -> None:
    gid = f"left-over-{config.log.prefix}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("BEGIN")
        put(store, "P", "prepared", connection)
        connection.execute(f"PREPARE TRANSACTION '{gid}'")
        try:
            for version in range(20):
                put(store, f"k{version % 3}", f"{version}")
            assert drain(relay) == 20
        finally:
            connection.execute(f"COMMIT PREPARED '{gid}'")
    assert drain(relay) == 1
    assert check_log(config, [ORDER.name]).problems == []


def test_a_transaction_in_another_database_stalls_nobody(
    config: Config, store: EntityStore, relay: Relay, stack: object
) -> None:
    with psycopg.connect(stack.dsn) as other:  # type: ignore[attr-defined]
        other.execute("SELECT pg_current_xact_id()")
        put(store, "k", "1")
        assert drain(relay) == 1


def test_C1_long_and_short_transactions_interleaved_come_out_whole_and_in_order(
    config: Config, store: EntityStore
) -> None:
    """Acceptance 5: one transaction is held open, others are long or short, pages are small.

    All others are in the log while it is still open.
    """
    stop, release = threading.Event(), threading.Event()
    begun = time.monotonic()

    def hold() -> None:
        with store.transaction() as connection:
            put(store, "held", "1", connection)
            release.wait(60)
            time.sleep(max(0.0, HELD_OPEN_S - (time.monotonic() - begun)))
            put(store, "held-too", "1", connection)

    def write(writer: int) -> None:
        rng = random.Random(writer)
        for turn in range(40):
            with store.transaction() as connection:
                # Sorted, so that the writers do not deadlock.
                for number in sorted(rng.sample(range(12), rng.choice([1, 1, 2, 9]))):
                    put(store, f"k{number:02}", f"{writer}/{turn}", connection)
                    time.sleep(rng.choice([0, 0, 0.002]))
                if rng.random() < 0.1:
                    raise psycopg.Rollback

    with Relay(
        altered(config, store={"relay_batch_rows": 7, "relay_poll_ms": 1}), [ORDER]
    ) as relay:
        running = threading.Thread(target=relay.run, args=[stop])
        running.start()
        try:
            with ThreadPoolExecutor(5) as pool:
                holding = pool.submit(hold)
                for writer in [pool.submit(write, number) for number in range(4)]:
                    writer.result()
                wait_until_published(config)
                assert not holding.done()
                release.set()
                holding.result()
        finally:
            release.set()
            stop.set()
            running.join()
        drain(relay)
    report = check_log(config, [ORDER.name])
    assert report.problems == []
    assert report.changes > 300
