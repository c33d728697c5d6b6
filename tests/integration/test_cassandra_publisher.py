"""C9: from Cassandra to the log, in version order, once, from the index of unpublished changes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cassandra_cases import committed, empty, own_keyspace
from everstate.config import Config
from everstate.errors import Fenced, LogTruncated, SourceError
from everstate.log.bound import changelogs
from everstate.log.producer import Producer
from everstate.log.publisher import read_progress
from everstate.log.record import OutRecord
from everstate.log.tails import Tail, decode_tails, encode_tails
from everstate.log.topics import TopicNames, Topics
from everstate.sources.stores.cassandra import CassandraStore, Database, Publisher
from everstate.sources.stores.cassandra import partition as partition_module
from everstate.sources.stores.cassandra import publisher as publisher_module
from everstate.sources.stores.cassandra import unpublished as unpublished_module
from everstate.sources.stores.cassandra.bound import BATCH, bind, read_batch, write_batch
from everstate.sources.stores.cassandra.partition import Partitions
from everstate.testing.log_checker import Committed, LogReport, check_changes
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from kit.settings import altered


@pytest.fixture(scope="module")
def keyspace(cassandra: Any) -> Iterator[Config]:
    with own_keyspace(cassandra.config) as config:
        yield config


@pytest.fixture
def config(keyspace: Config, topic_prefix: str) -> Config:
    config = altered(keyspace, log={"prefix": topic_prefix})
    with Topics(config) as topics:
        topics.ensure([ORDER.name])
    return config


@pytest.fixture
def database(config: Config) -> Iterator[Database]:
    with Database(config) as database:
        empty(database)
        yield database


@pytest.fixture
def store(config: Config, database: Database) -> CassandraStore:
    return CassandraStore(config, ORDER, database=database)


@pytest.fixture
def publisher(config: Config, database: Database) -> Iterator[Publisher]:
    with Publisher(config, [ORDER], database=database) as publisher:
        yield publisher


def problems(config: Config, database: Database) -> list[str]:
    report, blocks = LogReport(), defaultdict[str, list[tuple[int, int]]](list)
    rows = [Committed(*row[:8]) for row in committed(database)]
    check_changes(config, ORDER.name, rows, report, blocks)
    assert report.changes == len(rows) > 0
    return report.problems


def write_some(store: CassandraStore, note: str) -> int:
    orders = [StoredOrder(order_id=f"o-{n % 20}", note=f"{note}/{n}") for n in range(50)]
    return store.put_many(orders, provenance=CLERK).changes


def drain(publisher: Publisher) -> int:
    """Move everything; older seconds of the index are looked at again after one."""
    total, moved_at = 0, time.monotonic()
    while time.monotonic() - moved_at < 1.2:
        if moved := publisher.step():
            total, moved_at = total + moved, time.monotonic()
        time.sleep(0.05)
    return total


def test_changes_go_out_once_in_the_order_of_their_versions(
    config: Config, database: Database, store: CassandraStore, publisher: Publisher
) -> None:
    assert publisher.step() == 0
    written = write_some(store, "a")
    store.delete("o-3", provenance=CLERK)
    assert drain(publisher) == written + 1
    written = write_some(store, "b")
    assert drain(publisher) == written
    assert publisher.step() == 0
    assert problems(config, database) == []


def test_a_small_batch_leaves_the_rest_for_the_next(
    config: Config, database: Database, store: CassandraStore
) -> None:
    write_some(store, "a")
    small = altered(config, cassandra={"batch_changes": 7})
    with Publisher(small, [ORDER], database=database) as publisher:
        first = publisher.step()
        assert 7 <= first < 50
        drain(publisher)
    assert problems(config, database) == []


def test_killed_after_the_commit_it_asks_the_log_and_sends_nothing_twice(
    config: Config, database: Database, store: CassandraStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(store, "a")
    with Publisher(config, [ORDER], database=database) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "_write_down", lambda reached: (_ for _ in ()).throw(Killed))
            publisher._is_open = False
            with pytest.raises(Killed):
                publisher.step()
    write_some(store, "b")
    with Publisher(config, [ORDER], database=database) as publisher:
        drain(publisher)
    assert problems(config, database) == []


class Killed(Exception):
    """Where the process would have ended."""


def test_C8_a_log_that_lost_batches_is_noticed_before_anything_is_published(
    config: Config, database: Database, store: CassandraStore, publisher: Publisher
) -> None:
    write_some(store, "a")
    drain(publisher)
    write_batch(database, BATCH, read_batch(database, BATCH) + 10)
    write_some(store, "b")
    with Publisher(config, [ORDER], database=database) as restarted:
        with pytest.raises(LogTruncated, match="lost its newest records"):
            restarted.step()
        # As `everstate log begin` does: a new log has none of the batches.
        bind(database, changelogs(config, [ORDER.name]), replace=True)
        assert drain(restarted) == 50
    assert problems(config, database) == []


def test_C8_a_changelog_that_lost_its_tail_is_noticed_by_the_publisher(
    config: Config, database: Database, store: CassandraStore, publisher: Publisher
) -> None:
    """The progress of the publisher is a topic of its own: it may be whole."""
    write_some(store, "a")
    drain(publisher)
    name, names = f"publisher-cassandra-{database.keyspace}", TopicNames(config.log.prefix)
    progress = read_progress(config, name)
    assert progress is not None
    tails = decode_tails(progress.tails)
    more = {topic: Tail(tuple(end + 9 for end in tail.ends), 1) for topic, tail in tails.items()}
    batch = str(progress.batch).encode()
    headers = [("batch", batch), ("tails", encode_tails(more))]
    with Publisher(config, [ORDER], database=database) as whole:
        assert whole.step() == 0
    with Producer(config) as producer:
        producer.send(OutRecord(names.progress, name.encode(), progress.note, headers))
    with Publisher(config, [ORDER], database=database) as restarted:
        with pytest.raises(LogTruncated, match=names.changes("order")):
            restarted.step()


def test_a_second_publisher_fences_the_first(
    config: Config, database: Database, store: CassandraStore, publisher: Publisher
) -> None:
    write_some(store, "a")
    drain(publisher)
    with Publisher(config, [ORDER], database=database) as second:
        write_some(store, "b")
        assert drain(second) == 50
        write_some(store, "c")
        with pytest.raises(Fenced):
            drain(publisher)
        drain(second)
    assert problems(config, database) == []


def test_a_write_that_was_announced_and_never_came_is_fenced_and_forgotten(
    database: Database,
    store: CassandraStore,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a writer that was halted before its write starts over, and announces anew."""
    monkeypatch.setattr(publisher_module, "_FENCE_AFTER_S", 0.0)
    monkeypatch.setattr(publisher_module, "_ASK_AFTER_S", 0.0)
    real, announced = database.execute_if, list[int]()

    def halted(statements: Any) -> Any:
        if not announced:
            announced.append(1)
            time.sleep(0.01)
            publisher.step()
            assert publisher._unpublished.open() == []
        return real(statements)

    monkeypatch.setattr(database, "execute_if", halted)
    assert store.put(StoredOrder(order_id="o-1"), provenance=CLERK).version == 1
    assert len(publisher._unpublished.open()) == 1
    assert publisher.step() == 1


def test_settled_seconds_are_deleted_and_a_late_announcement_is_still_found(
    config: Config,
    database: Database,
    store: CassandraStore,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unpublished_module, "_GRACE_S", 0)
    monkeypatch.setattr(unpublished_module, "_RELOOK", 0)
    store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
    drain(publisher)
    deadline = time.monotonic() + 10
    while database.execute(publisher._unpublished._sql.buckets):
        assert time.monotonic() < deadline
        publisher.step()
        time.sleep(0.1)
    late = Partitions(database, ORDER.name, 1)
    monkeypatch.setattr("everstate.sources.stores.cassandra.partition.BUCKET_S", 2)
    late.announce("o-1", 1, again_from=1)
    publisher._unpublished._discovered_at = -1e9
    assert publisher.step() == 1


def test_a_change_of_a_writer_whose_clock_is_behind_is_published(
    config: Config,
    store: CassandraStore,
    database: Database,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second in which it believes to write was settled and deleted long ago."""
    moment = float(int(time.time()) - 3_600) + 0.5
    behind = SimpleNamespace(time=lambda: moment, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(partition_module, "time", behind)
    monkeypatch.setattr("cassandra.timestamps.time", behind)

    def publish() -> int:
        publisher._unpublished._discovered_at = -1e9
        return publisher.step()

    # A writer of its own, whose driver has told no other time yet.
    with CassandraStore(config, ORDER) as writer:
        writer.put(StoredOrder(order_id="o-1"), provenance=CLERK)
        assert publish() == 1
        deadline = time.monotonic() + 120
        while database.execute(publisher._unpublished._sql.buckets):
            assert time.monotonic() < deadline
            publish()
        writer.put(StoredOrder(order_id="o-2"), provenance=CLERK)
        assert publish() == 1


def test_what_the_app_has_no_type_for_stays(
    config: Config, database: Database, store: CassandraStore
) -> None:
    store.put(StoredOrder(order_id="o-1"), provenance=CLERK)
    with Publisher(config, [], database=database) as publisher:
        assert publisher.step() == 0
        assert len(publisher._unpublished.open()) == 1
    with pytest.raises(SourceError):
        database.execute("SELECT nothing FROM nowhere.at_all")
