"""The store in PostgreSQL: any history of writes, concurrent installs, callers' transactions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.errors import SerializationFailure
from pydantic import AwareDatetime, BaseModel, Field

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import (
    ChangeTooLarge,
    InvalidChange,
    InvalidEntityType,
    NotFound,
    Unavailable,
    VersionConflict,
)
from everstate.sources.stores.postgres import EntityStore, install
from everstate.sources.stores.postgres import store as store_module
from everstate.testing.store_contract import CLERK, ORDER, Recorded, StoredOrder, check_chain
from kit.settings import altered

_CHANGES = """
SELECT key, version, kind, change_id::text, before, after, event, occurred_at
FROM everstate_store.outbox ORDER BY id
"""

keys = st.sampled_from(["a", "b", "B", "ä", "c\td", "e\\n"])
notes = st.sampled_from(["", "x", "née", 'q"\\', "\t\n"])
orders = st.builds(StoredOrder, order_id=keys, note=notes)
versions = st.one_of(st.none(), st.none(), st.integers(0, 5))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), orders, versions, st.booleans()),
        st.tuples(st.just("delete"), keys, versions),
        st.tuples(st.just("put_many"), st.lists(orders, max_size=8), st.booleans()),
    ),
    max_size=20,
)


def recorded(config: Config) -> list[Recorded]:
    with psycopg.connect(config.store_dsn) as connection:
        return [Recorded(*row) for row in connection.execute(_CHANGES).fetchall()]


class Model:
    """The store as a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, StoredOrder | None]] = {}
        self.changes: list[tuple[str, int]] = []

    def refuses(self, key: str, expected: int | None) -> bool:
        version, state = self.rows.get(key, (0, None))
        return expected is not None and expected != version and not (expected == 0 and not state)

    def write(self, key: str, state: StoredOrder | None, force: bool) -> None:
        version, before = self.rows.get(key, (0, None))
        if before != state or force:
            self.rows[key] = (version + 1, state)
            self.changes.append((key, version + 1))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(history=operations)
def test_any_history_of_writes_leaves_what_a_dictionary_would(
    store: EntityStore, config: Config, history: list[tuple[Any, ...]]
) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute(
            'TRUNCATE everstate_store."order", everstate_store.outbox,'
            " everstate_store.outbox_pending RESTART IDENTITY"
        )
    model = Model()
    for operation, *arguments in history:
        if operation == "put":
            order, expected, force = arguments
            if model.refuses(order.order_id, expected):
                with pytest.raises(VersionConflict):
                    store.put(order, provenance=CLERK, expected_version=expected, force=force)
                continue
            written = store.put(order, provenance=CLERK, expected_version=expected, force=force)
            model.write(order.order_id, order, force)
            assert written.version == model.rows[order.order_id][0]
        elif operation == "delete":
            key, expected = arguments
            exists = model.rows.get(key, (0, None))[1] is not None
            if model.refuses(key, expected) or not exists:
                with pytest.raises((VersionConflict, NotFound)):
                    store.delete(key, provenance=CLERK, expected_version=expected)
                continue
            store.delete(key, provenance=CLERK, expected_version=expected)
            model.write(key, None, False)
        else:
            many, force = arguments
            store.put_many(many, provenance=CLERK, force=force)
            for order in many:
                model.write(order.order_id, order, force)
    changes = recorded(config)
    check_chain(changes)
    assert [(change.key, change.version) for change in changes] == model.changes
    for key, (version, state) in model.rows.items():
        assert store.get(key) == (None if state is None else (state, version))


class Price(BaseModel):
    price_id: str
    amount: Annotated[Decimal, Field(max_digits=38, decimal_places=10)]
    since: AwareDatetime | None = None


def test_equal_values_are_no_change_whatever_their_text(config: Config) -> None:
    def price(amount: str, since: str = "2026-01-02T03:00:00+01:00") -> dict[str, str]:
        return {"price_id": "p", "amount": amount, "since": since}

    with EntityStore(config, EntityType("price", Price, "price_id")) as prices:
        prices.install()
        written = [
            prices.put(price(*given), provenance=CLERK).version
            for given in (("2.5",), ("2.50",), ("2.50", "2026-01-02T02:00:00Z"), ("2.51",))
        ]
        assert written == [1, 1, 1, 2]
        many = prices.put_many(
            [price(amount) for amount in ("2.510", "2.5", "2.50", "3", "3.0")], provenance=CLERK
        )
        assert (many.changes, many.unchanged) == (2, 3)
        assert prices.put_many([price("3.00")], provenance=CLERK, force=True).changes == 1
    check_chain(recorded(config))


def test_a_caller_s_transaction_takes_writes_and_rows_of_its_own_or_nothing(
    store: EntityStore, config: Config
) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE mine (n int)")
        with connection.transaction():
            connection.execute("INSERT INTO mine VALUES (1)")
            store.put(StoredOrder(order_id="a"), provenance=CLERK, connection=connection)
            store.put_many([StoredOrder(order_id="b")], provenance=CLERK, connection=connection)
            assert store.get("a") is None
            assert store.get("a", connection=connection) is not None
            raise psycopg.Rollback
        assert recorded(config) == []
        with connection.transaction():
            connection.execute("INSERT INTO mine VALUES (2)")
            store.put_many([StoredOrder(order_id="a")], provenance=CLERK, connection=connection)
            store.put_many([StoredOrder(order_id="b")], provenance=CLERK, connection=connection)
            with pytest.raises(VersionConflict):
                store.put(
                    StoredOrder(order_id="a", note="x"),
                    provenance=CLERK,
                    expected_version=0,
                    connection=connection,
                )
            with pytest.raises(ChangeTooLarge):
                store.put_many(
                    [StoredOrder(order_id="c", note="x" * 2_000_000)],
                    provenance=CLERK,
                    connection=connection,
                )
        assert connection.execute("SELECT n FROM mine").fetchall() == [(2,)]
    assert [change.key for change in recorded(config)] == ["a", "b"]
    with psycopg.connect(config.store_dsn) as connection:
        xids = connection.execute("SELECT DISTINCT xid FROM everstate_store.outbox").fetchall()
    assert len(xids) == 1


def test_a_lost_race_in_a_callers_repeatable_read_transaction_is_the_callers_to_repeat(
    store: EntityStore, config: Config
) -> None:
    store.put(StoredOrder(order_id="a"), provenance=CLERK)
    with psycopg.connect(config.store_dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        store.put(StoredOrder(order_id="a", note="other"), provenance=CLERK)
        with pytest.raises(SerializationFailure):
            store.put(StoredOrder(order_id="a", note="x"), provenance=CLERK, connection=connection)


def test_writers_that_lock_keys_in_opposite_orders_both_succeed(
    store: EntityStore, config: Config
) -> None:
    """put_many locks in C collation, whatever order the caller has."""
    for order_id in "aBä":
        store.put(StoredOrder(order_id=order_id), provenance=CLERK)

    def write(writer: int) -> None:
        for turn in range(30):
            names = "aBä" if writer else "äBa"
            many = [StoredOrder(order_id=name, note=f"{writer}/{turn}") for name in names]
            store.put_many(many, provenance=CLERK)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    check_chain(recorded(config))
    assert len(recorded(config)) == 3 + 2 * 30 * 3


def test_installing_from_several_processes_at_once_is_harmless(config: Config) -> None:
    def run(_: int) -> None:
        with psycopg.connect(config.store_dsn, autocommit=True) as connection:
            install(connection, [ORDER])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


def test_names_of_the_stores_own_tables_are_refused(config: Config) -> None:
    with pytest.raises(InvalidEntityType, match="outbox"):
        EntityStore(config, EntityType("outbox", StoredOrder, "order_id"))


def test_a_database_that_is_away_is_told_without_its_password(config: Config) -> None:
    with (
        EntityStore(
            altered(config, store={"dsn": "postgresql://me:secret@127.0.0.1:1/x"}), ORDER
        ) as store,
        pytest.raises(Unavailable) as told,
    ):
        store.put(StoredOrder(order_id="a"), provenance=CLERK)
    assert "secret" not in str(told.value)


def test_connections_that_died_while_idle_are_not_used(store: EntityStore, config: Config) -> None:
    store.put(StoredOrder(order_id="a"), provenance=CLERK)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert store.put(StoredOrder(order_id="a", note="b"), provenance=CLERK).version == 2


def test_the_time_of_recording_never_runs_back_whoever_waited_for_the_lock(
    store: EntityStore, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer takes its time, waits for the row, and commits after one that took a later time."""
    times = iter([timedelta(0), timedelta(seconds=-5), timedelta(seconds=-9)])

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + next(times)

    monkeypatch.setattr(store_module, "datetime", Clock)
    store.put(StoredOrder(order_id="a", note="x"), provenance=CLERK)
    store.put(StoredOrder(order_id="a", note="y"), provenance=CLERK)
    store.put_many([StoredOrder(order_id="a", note="z")], provenance=CLERK)
    with psycopg.connect(config.store_dsn) as connection:
        query = "SELECT recorded_at FROM everstate_store.outbox ORDER BY id"
        recorded_at = [moment for (moment,) in connection.execute(query)]
    assert len(recorded_at) == 3
    assert recorded_at == sorted(recorded_at)


def test_a_page_is_bounded_in_bytes(store: EntityStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PAGE_BYTES_MAX", 10_000)
    keys = [f"o-{number:02}" for number in range(20)]
    store.put_many([StoredOrder(order_id=key, note="x" * 3_000) for key in keys], provenance=CLERK)
    found, cursor = list[str](), None
    while True:
        page = store.page(limit=15, cursor=cursor)
        assert len(page.entities) <= 4
        found += [ORDER.key_of(each.entity) for each in page.entities]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == keys


def test_keys_that_no_index_holds_and_times_far_ahead_are_refused(store: EntityStore) -> None:
    assert store.put(StoredOrder(order_id="k" * 2048), provenance=CLERK).version == 1
    with pytest.raises(InvalidChange, match="2,049 bytes, and 2,048 are the most"):
        store.put(StoredOrder(order_id="k" * 2049), provenance=CLERK)
    ahead = datetime.now(UTC) + timedelta(hours=25)
    with pytest.raises(InvalidChange, match="more than 24 hours ahead"):
        store.put(StoredOrder(order_id="a"), provenance=CLERK, occurred_at=ahead)
    with pytest.raises(InvalidChange, match="more than 24 hours ahead"):
        store.put_many([StoredOrder(order_id="a")], provenance=CLERK, occurred_at=ahead)
    assert store.get("a") is None
