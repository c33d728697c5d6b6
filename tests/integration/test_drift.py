"""Drift of both sources of truth: found, classified, mended, and gone."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import psycopg
import pytest
from pyspark.sql import SparkSession

from cassandra_cases import own_keyspace
from everstate.changes import ChangeCodec, Kind
from everstate.changes.drift import Drifted, DriftReport, Truth, What
from everstate.config import Config
from everstate.errors import StoreBehindLog
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.parts import Journal, run_parts
from everstate.pipeline.drift.check import ScheduledDrift, check_drift
from everstate.runtime.worker import part_of
from everstate.sources.outbox import Relay
from everstate.sources.stores.cassandra import CassandraStore, Database, Publisher
from everstate.sources.stores.cassandra.schema import table_of
from everstate.sources.stores.cassandra.truth import CassandraTruth
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.stores.postgres.truth import PostgresTruth
from everstate.testing.log_checker import read_topic
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from kit.changes import change_of
from kit.settings import altered


class Side(Protocol):
    """A source of truth with its way to the log, and how its memory is damaged."""

    config: Config
    store: Any
    truth: Truth

    def publish(self) -> None:
        """Send everything that is unpublished."""

    def lose(self) -> None:
        """Forget what is unpublished."""

    def overwrite(self, key: str, state: str) -> None:
        """Change a state behind the store's back."""

    def record_ahead(self, key: str) -> None:
        """As if the clock of the writer of an entity were half a minute ahead."""


class PostgresSide:
    def __init__(self, config: Config) -> None:
        self.config, self.store = config, EntityStore(config, ORDER)
        self.store.install()
        self.truth: Truth = PostgresTruth.of(config, ORDER.name, 1)

    def publish(self) -> None:
        with Relay(self.config, [ORDER]) as relay:
            while relay.step():
                pass

    def lose(self) -> None:
        self.execute("DELETE FROM everstate_store.outbox_pending")

    def forget_history(self) -> None:
        self.execute("DELETE FROM everstate_store.outbox")

    def overwrite(self, key: str, state: str) -> None:
        self.execute('UPDATE everstate_store."order" SET state = %s WHERE key = %s', state, key)

    def record_ahead(self, key: str) -> None:
        for table in ("order", "outbox"):
            later = "SET recorded_at = recorded_at + interval '30 s' WHERE key = %s"
            self.execute(f'UPDATE everstate_store."{table}" {later}', key)

    def execute(self, statement: str, *values: Any) -> None:
        with psycopg.connect(self.config.store_dsn) as connection:
            connection.execute(statement.encode(), values)

    def close(self) -> None:
        self.store.close()


class CassandraSide:
    def __init__(self, config: Config) -> None:
        self.config, self.database = config, Database(config)
        self.store = CassandraStore(config, ORDER, database=self.database)
        self.truth: Truth = CassandraTruth(config, ORDER.name, 1)

    def publish(self) -> None:
        with Publisher(self.config, [ORDER], database=self.database) as publisher:
            # Older seconds of the index are looked at again after one.
            moved_at = time.monotonic()
            while time.monotonic() - moved_at < 1.2:
                if publisher.step():
                    moved_at = time.monotonic()
                time.sleep(0.05)

    def lose(self) -> None:
        self.database.define(f"TRUNCATE {self.database.keyspace}.unpublished")

    def overwrite(self, key: str, state: str) -> None:
        found = self.store.get(key)
        assert found is not None
        table = table_of(self.database.keyspace, ORDER.name)
        # By the one way in which this row may be written.
        statement = f"UPDATE {table} SET after = ? WHERE key = ? AND version = ? IF EXISTS"
        self.database.execute(statement, [state, key, found.version])

    def record_ahead(self, key: str) -> None:
        later = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
        table = table_of(self.database.keyspace, ORDER.name)
        statement = f"UPDATE {table} SET recorded_at = ? WHERE key = ? AND version = 1 IF EXISTS"
        self.database.execute(statement, [later, key])

    def close(self) -> None:
        self.database.close()


@pytest.fixture(params=["postgres", "cassandra"])
def side(request: pytest.FixtureRequest, stack: Any, topic_prefix: str) -> Iterator[Side]:
    log = stack.config.log.model_copy(update={"prefix": topic_prefix})
    drift = stack.config.drift.model_copy(update={"settle_s": 0.1, "ranges": 64})
    update: dict[str, Any] = {"log": log, "drift": drift}
    made: PostgresSide | CassandraSide
    opened = ExitStack()
    if request.param == "postgres":
        dsn = request.getfixturevalue("database")
        update["store"] = stack.config.store.model_copy(update={"dsn": dsn})
        made = PostgresSide(stack.config.model_copy(update=update))
    else:
        running: Config = request.getfixturevalue("cassandra").config
        own = own_keyspace(running.model_copy(update=update))
        made = CassandraSide(opened.enter_context(own))
    with opened:
        with Topics(made.config) as topics:
            topics.ensure([ORDER.name])
        yield made
        made.close()


@pytest.fixture
def check(side: Side, spark: SparkSession) -> Callable[..., DriftReport]:
    def run(*, repair: bool = False, **drift: Any) -> DriftReport:
        config = altered(side.config, drift=drift)
        return check_drift(spark, config, ORDER, side.truth, repair=repair)

    return run


def put(side: Side, keys: range, note: str) -> None:
    orders = [StoredOrder(order_id=f"o-{number:04}", note=note) for number in keys]
    side.store.put_many(orders, provenance=CLERK)


def tamper(side: Side, key: str, note: str) -> None:
    """With a field that only another release of the model has."""
    state = StoredOrder(order_id=key, note=note).model_dump(mode="json")
    side.overwrite(key, json.dumps({**state, "tier": "gold"}))


def invent(config: Config, key: str, version: int, kind: Kind, state: StoredOrder | None) -> None:
    """Put a change into the log that no source knows."""
    before = None if kind is Kind.CREATED else StoredOrder(order_id=key, note="a")
    change = change_of(ORDER.name, key, version, state, before, who=CLERK, kind=kind)
    name, value, headers = ChangeCodec(ORDER).encode(change)
    names = TopicNames(config.log.prefix)
    with Producer(config) as producer:
        for topic in (names.changes(ORDER.name), names.state(ORDER.name)):
            producer.send(OutRecord(topic, name, value, headers))


def without_block(change: dict[str, Any]) -> dict[str, Any]:
    """The change but its transaction block: sent again, it is of the transaction that did so."""
    provenance = {k: v for k, v in change["provenance"].items() if k != "transaction"}
    return {**change, "provenance": provenance}


def recorded(change: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(change["recordedAt"])


def check_log(config: Config) -> int:
    """Assert law 2 and 3 of the whole log, and that `.state` ends with the newest; its changes.

    The time of recording never runs back for a key.
    """
    names = TopicNames(config.log.prefix)
    newest: dict[str, dict[str, Any]] = {}
    ids: dict[tuple[str, int], str] = {}
    held: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in read_topic(config, names.changes(ORDER.name)):
        change = json.loads(record.value or b"")
        key, version = change["key"], change["version"]
        if (key, version) in ids:
            assert ids[key, version] == change["id"], f"{key} {version}"
            continue
        ids[key, version] = change["id"]
        held[key].append(change)
    for key, changes in held.items():
        for at, change in enumerate(changes, 1):
            assert change["version"] == at, f"{key} {[each['version'] for each in changes]}"
            below = newest.get(key, {}).get("currentEntityState")
            assert change["originalEntityState"] == below
            assert recorded(change) >= recorded(newest.get(key, change))
            newest[key] = change
    for record in read_topic(config, names.state(ORDER.name)):
        newest[f"state of {(record.key or b'').decode()}"] = json.loads(record.value or b"")
    for key in held:
        assert without_block(newest[f"state of {key}"]) == without_block(newest[key])
    return len(ids)


@pytest.mark.full
def test_there_is_no_drift_when_nothing_happened_and_lag_is_not_drift(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    put(side, range(200), "a")
    side.publish()
    side.store.delete("o-0001", provenance=CLERK)
    report = check()
    assert (report.drifted, report.pending, report.stored) == (0, 1, 200)
    side.publish()
    report = check()
    assert (report.drifted, report.pending) == (0, 0)
    assert (report.stored, report.logged) == (200, 200)
    assert report.holds


@pytest.mark.full
def test_a_topic_that_nobody_made_yet_holds_no_change(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    with Topics(side.config) as topics:
        topics.delete([TopicNames(side.config.log.prefix).state(ORDER.name)])
    put(side, range(3), "written before the relay ran")

    waiting = check()
    assert (waiting.stored, waiting.logged, waiting.pending) == (3, 0, 3)
    assert waiting.holds

    side.lose()
    assert check().missing == 3


def test_each_kind_of_drift_is_found_named_and_mended(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    put(side, range(150), "a")
    side.record_ahead("o-0030")
    side.publish()
    put(side, range(150, 155), "a")
    for note in ("b", "c"):
        put(side, range(10, 13), note)
    side.store.delete("o-0020", provenance=CLERK)
    side.lose()
    tamper(side, "o-0030", "tampered")
    tamper(side, "o-0031", "tampered")
    invent(side.config, "o-0040", 2, Kind.UPDATED, StoredOrder(order_id="o-0040", note="invented"))
    invent(side.config, "x-1", 1, Kind.CREATED, StoredOrder(order_id="x-1"))
    report = check(repair=True, rebuild_share=0.5)
    assert (report.missing, report.stale, report.different, report.extra) == (5, 4, 2, 2)
    assert (report.action, report.repaired, report.pending) == ("republished", 13, 0)
    named = {
        each.key: (each.what, each.stored_version, each.logged_version) for each in report.keys
    }
    assert len(named) == 13
    assert named["o-0150"] == ("missing", 1, 0)
    assert named["o-0010"] == ("stale", 3, 1)
    assert named["o-0030"] == ("different", 1, 1)
    assert named["o-0040"] == ("extra", 1, 2)
    assert named["x-1"] == ("extra", 0, 1)
    side.publish()
    assert check().drifted == 0
    check_log(side.config)
    records = read_topic(side.config, TopicNames(side.config.log.prefix).state(ORDER.name))
    newest = {record.key: json.loads(record.value or b"") for record in records}
    for key in (b"o-0030", b"o-0031"):
        assert newest[key]["currentEntityState"]["tier"] == "gold"
    assert side.store.get("o-0030") == (StoredOrder(order_id="o-0030", note="tampered"), 2)
    assert side.store.get("o-0040") == (StoredOrder(order_id="o-0040", note="a"), 3)
    assert side.store.get("x-1") is None
    assert side.store.put(StoredOrder(order_id="x-1"), provenance=CLERK).version == 3
    side.publish()
    check_log(side.config)


@pytest.mark.parametrize("side", ["postgres"], indirect=True)
def test_a_store_restored_from_an_older_backup_gets_above_its_log(
    side: PostgresSide, check: Callable[..., DriftReport]
) -> None:
    """Written since: nothing, less than the log has, as much, and more; deleted on both sides."""
    put(side, range(7), "a")
    side.store.delete("o-0005", provenance=CLERK)
    side.publish()
    tables = ("order", "outbox", "outbox_pending", "outbox_published", "relay")
    for name in tables:
        side.execute(f'CREATE TABLE public."{name}" AS TABLE everstate_store."{name}"')
    for note in ("b", "c", "d"):
        put(side, range(5), note)
        side.publish()
    for key in ("x-1", "x-2"):
        side.store.put(StoredOrder(order_id=key), provenance=CLERK)
    side.store.delete("x-2", provenance=CLERK)
    side.store.put(StoredOrder(order_id="o-0005"), provenance=CLERK)
    side.store.delete("o-0005", provenance=CLERK)
    side.publish()

    for name in tables:
        side.execute(f'TRUNCATE everstate_store."{name}"')
        side.execute(
            f'INSERT INTO everstate_store."{name}" OVERRIDING SYSTEM VALUE'
            f' SELECT * FROM public."{name}"'
        )
    side.execute(
        "SELECT setval(pg_get_serial_sequence('everstate_store.outbox', 'id'), max(id))"
        " FROM everstate_store.outbox"
    )
    for number in range(1, 5):
        for note in "efgh"[:number]:
            put(side, range(number, number + 1), note)
    with pytest.raises(StoreBehindLog):
        side.publish()
    report = check(repair=True, rebuild_share=1.1)
    assert (report.drifted, report.repaired, report.pending) == (8, 8, 0)
    side.publish()
    assert check().drifted == 0
    check_log(side.config)
    for number, note in enumerate("aefgh"):
        order = StoredOrder(order_id=f"o-000{number}", note=note)
        assert (side.store.get(order.order_id) or [None])[0] == order
    assert [side.store.get(key) for key in ("x-1", "x-2", "o-0005")] == [None, None, None]
    put(side, range(7), "i")
    for key in ("x-1", "x-2"):
        side.store.put(StoredOrder(order_id=key), provenance=CLERK)
    side.publish()
    assert check().drifted == 0
    check_log(side.config)


@pytest.mark.full
def test_much_drift_publishes_the_whole_type_again(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    put(side, range(60), "a")
    side.publish()
    put(side, range(40, 90), "b")
    side.lose()
    before = check()
    assert (before.missing, before.stale, before.action, before.repaired) == (30, 20, "none", 0)
    assert not before.holds
    report = check(repair=True)
    assert (report.action, report.repaired, report.sent_again) == ("rebuilt", 50, 40)
    assert report.holds
    side.publish()
    assert check().drifted == 0
    assert check_log(side.config) == 60 + 50


@pytest.mark.full
def test_a_state_that_the_entity_type_refuses_is_reported_and_not_published(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    put(side, range(20), "a")
    side.publish()
    side.overwrite("o-0003", '{"order_id":"o-0003","note":"a","weight":"4","lines":[]}')
    tamper(side, "o-0004", "tampered")
    side.overwrite("o-0005", '{"order_id":"o-0006","note":"a","lines":[]}')
    report = check(repair=True, rebuild_share=1)
    assert (report.different, report.repaired, report.refused) == (3, 1, 2)
    assert not report.holds
    side.publish()
    assert check_log(side.config) == 21
    left = check()
    assert [(each.key, each.what) for each in left.keys] == [
        ("o-0003", "different"),
        ("o-0005", "different"),
    ]
    assert "weight" in left.keys[0].why
    assert "other_key:o-0006" in left.keys[1].why
    tamper(side, "o-0003", "corrected")
    tamper(side, "o-0005", "a")
    assert check(repair=True, rebuild_share=1).holds
    side.publish()
    assert check().drifted == 0
    assert check_log(side.config) == 22


@pytest.mark.full
@pytest.mark.parametrize("side", ["postgres"], indirect=True)
def test_a_version_that_was_raised_by_hand_is_published_with_an_id_of_its_own(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    assert isinstance(side, PostgresSide)
    put(side, range(10), "a")
    side.publish()
    side.execute("UPDATE everstate_store.\"order\" SET version = 5 WHERE key = 'o-0002'")
    assert check(repair=True, rebuild_share=1).repaired == 1
    side.publish()
    assert check().drifted == 0
    assert check_log(side.config) == 10 + 4
    changes = read_topic(side.config, TopicNames(side.config.log.prefix).changes(ORDER.name))
    ids = [json.loads(record.value or b"")["id"] for record in changes]
    assert len(ids) == len(set(ids))


@pytest.mark.full
@pytest.mark.parametrize("side", ["postgres"], indirect=True)
def test_what_the_outbox_no_longer_keeps_is_mended_without_gaps(
    side: Side, check: Callable[..., DriftReport]
) -> None:
    """PostgreSQL's outbox is trimmed; the versions in between carry the state that is known."""
    assert isinstance(side, PostgresSide)
    put(side, range(3), "a")
    side.publish()
    for note in ("b", "c", "d"):
        put(side, range(2, 6), note)
    side.lose()
    side.forget_history()
    report = check(repair=True, rebuild_share=1)
    assert (report.missing, report.stale, report.repaired) == (3, 1, 4)
    side.publish()
    assert check().drifted == 0
    assert check_log(side.config) == 3 + 3 + 3 * 3


def used_by_postgres_s(stack: Any) -> float:
    """Processor seconds of the server and its sessions, whatever else the machine does."""
    server = psutil.Process(stack.servers.pid("postgres"))
    used = 0.0
    for session in server.children():
        with suppress(psutil.NoSuchProcess):  # It ended just now: the server counts its time.
            used += sum(session.cpu_times()[:4])
    return used + sum(server.cpu_times()[:4])


@pytest.mark.full
def test_sending_again_what_the_outbox_keeps_takes_time_in_step_with_its_number(
    stack: Any, database: str
) -> None:
    """It once took the square of it: minutes for twenty thousand entities."""
    side, count = PostgresSide(altered(stack.config, store={"dsn": database})), 10_000
    with closing(side):
        for note in ("first", "second"):
            side.store.put_many(
                [StoredOrder(order_id=f"o-{n:06}", note=note) for n in range(count)],
                provenance=CLERK,
            )
        side.lose()
        stale = [Drifted(f"o-{n:06}", What.STALE, 2, 1) for n in range(count)]
        before = used_by_postgres_s(stack)
        assert side.truth.repair(stale) == count
        assert used_by_postgres_s(stack) - before < 15


@pytest.mark.full
def test_scheduled_drift_needs_attention_until_a_comparison_finds_none(
    side: Side, spark: SparkSession, tmp_path: Path
) -> None:
    put(side, range(5), "a")
    side.lose()
    config = altered(side.config, drift={"every_s": 0.5, "repair": False})
    drift = ScheduledDrift(spark, config, {ORDER.name: ORDER}, {ORDER.name: side.truth})
    journal, stop = Journal("pipeline", tmp_path), threading.Event()
    role = threading.Thread(
        target=run_parts, args=(journal, {"drift": part_of(lambda: drift)}, stop)
    )
    role.start()
    try:
        found = _until(lambda: journal.state.findings)[f"drift of {ORDER.name}"]
        assert "5 of 5 entities had drifted, and 0 were repaired" in found.why
        assert found.is_bad
        check_drift(spark, side.config, ORDER, side.truth, repair=True)
        side.publish()
        _until(lambda: not journal.state.findings)
    finally:
        stop.set()
        role.join(60)


def _until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 120
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
