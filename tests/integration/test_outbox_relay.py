"""The relay: each change once (C2, C3), a refused one blocks only itself (C4), graves (C7)."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from prometheus_client import REGISTRY

from everstate.changes import DomainEvent
from everstate.config import Config
from everstate.errors import (
    ChangeTooLarge,
    Fenced,
    LogIdentityChanged,
    LogTruncated,
    StoreBehindLog,
    Unavailable,
)
from everstate.log.bound import changelogs
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.publisher import read_progress
from everstate.log.record import OutRecord
from everstate.log.tails import Tail, decode_tails, encode_tails
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import OutboxStatus, Relay, marks, read_status
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.stores.postgres.bound import bind
from everstate.sources.stores.postgres.database import connect
from everstate.testing.log_checker import check_log, read_topic
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder
from kit.settings import altered
from kit.waiting import until

pytestmark = pytest.mark.settings(topics=[ORDER.name])


@pytest.fixture
def relay(config: Config, store: EntityStore) -> Iterator[Relay]:
    with Relay(config, [ORDER], retry_blocked_s=0.05) as relay:
        yield relay


def drain(relay: Relay) -> int:
    total = 0
    while moved := relay.step():
        total += moved
    return total


def put(store: EntityStore, key: str, note: str = "", **more: Any) -> None:
    store.put(StoredOrder(order_id=key, note=note), provenance=CLERK, **more)


def status_of(config: Config) -> OutboxStatus:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        return read_status(connection)


def problems_of(config: Config, **more: Any) -> list[str]:
    return check_log(config, [ORDER.name], **more).problems


def test_a_message_is_the_committed_change_with_its_transaction_block(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    with store.transaction() as connection:
        at = datetime.fromisoformat("2013-01-01T05:17:00-05:00")
        opened = DomainEvent(type="Opened", data={"by": "web"})
        put(store, "o-1", 'née "x" \\ \n', occurred_at=at, event=opened, connection=connection)
        put(store, "o-2", connection=connection)
    assert drain(relay) == 2
    first, second = sorted(
        read_topic(config, TopicNames(config.log.prefix).changes("order")), key=by_key
    )
    message = json.loads(first.value or b"")
    assert message["occurredAt"] == "2013-01-01T05:17:00-05:00"
    assert message["event"] == {"type": "Opened", "data": {"by": "web"}}
    assert message["currentEntityState"]["note"] == 'née "x" \\ \n'
    block = message["provenance"]["transaction"]
    assert (block["index"], block["count"]) == (1, 2)
    assert json.loads(second.value or b"")["provenance"]["transaction"]["id"] == block["id"]
    assert dict(first.headers)["ce_type"] == b"Opened"
    assert dict(first.headers)["ce_id"] == message["id"].encode()
    assert problems_of(config) == []


def by_key(record: Any) -> bytes:
    key: bytes = record.key
    return key


def test_C7_a_delete_is_a_record_in_state_and_the_version_goes_on(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    put(store, "o-1")
    store.delete("o-1", provenance=CLERK)
    drain(relay)
    grave = read_topic(config, TopicNames(config.log.prefix).state("order"))[-1]
    message = json.loads(grave.value or b"")
    assert (message["kind"], message["version"]) == ("deleted", 2)
    put(store, "o-1", "again")
    drain(relay)
    reborn = read_topic(config, TopicNames(config.log.prefix).state("order"))[-1]
    assert json.loads(reborn.value or b"")["version"] == 3
    assert problems_of(config) == []


def test_C3_a_batch_that_was_published_and_not_marked_is_not_sent_again(
    config: Config, store: EntityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> int:
        raise psycopg.OperationalError("the server is gone")

    put(store, "o-1", "a")
    with Relay(config, [ORDER]) as killed, monkeypatch.context() as patch:
        patch.setattr(marks, "mark", lost)
        with pytest.raises(Unavailable):
            killed.step()
        put(store, "o-1", "b")
        # The same process goes on by itself, too.
        patch.undo()
        assert drain(killed) == 1
    with Relay(config, [ORDER]) as other, monkeypatch.context() as patch:
        put(store, "o-1", "c")
        patch.setattr(marks, "mark", lost)
        with pytest.raises(Unavailable):
            other.step()
    with Relay(config, [ORDER]) as restarted:
        put(store, "o-2")
        assert drain(restarted) == 1
    assert problems_of(config) == []
    assert status_of(config).oldest_unpublished_s is None


def test_C3_a_second_relay_fences_the_first(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    put(store, "o-1", "a")
    assert relay.step() == 1
    with Relay(config, [ORDER]) as second:
        put(store, "o-1", "b")
        assert second.step() == 1
        put(store, "o-1", "c")
        with pytest.raises(Fenced):
            relay.step()
        assert drain(second) == 1
    assert problems_of(config) == []


def test_the_memory_of_another_store_is_not_applied_to_this_one(
    config: Config, store: EntityStore
) -> None:
    """The database is made anew under the same topics: its ids begin at 1 again."""
    put(store, "o-1")
    with Relay(config, [ORDER]) as relay:
        drain(relay)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA everstate_store CASCADE")
    store.install()
    put(store, "o-2")
    with Relay(config, [ORDER]) as relay:
        with pytest.raises(StoreBehindLog, match="order") as behind:
            relay.step()
        assert behind.value.advice is not None
        assert "`everstate drift repair order`" in behind.value.advice
        put(store, "o-1")
        with pytest.raises(StoreBehindLog):
            relay.step()
    assert len(read_topic(config, TopicNames(config.log.prefix).changes(ORDER.name))) == 1


def test_what_was_written_since_a_restore_is_not_sent_as_versions_that_the_log_has(
    config: Config, store: EntityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "o-1")
    with Relay(config, [ORDER]) as relay, monkeypatch.context() as patch:
        patch.setattr(marks, "mark", lambda *_: 1)
        relay.step()
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("UPDATE everstate_store.outbox SET change_id = gen_random_uuid()")
    with Relay(config, [ORDER]) as relay, pytest.raises(StoreBehindLog):
        drain(relay)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("UPDATE everstate_store.outbox SET version = 2")
    with Relay(config, [ORDER]) as relay:
        assert drain(relay) == 1


def test_C4_what_the_broker_refuses_blocks_itself_its_transaction_and_its_keys_only(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    topic = TopicNames(config.log.prefix).changes("order")
    with Topics(config) as topics:
        limit = topics.config(topic)["max.message.bytes"]
        topics.set_config(topic, {"max.message.bytes": "20000"})
        put(store, "big", "first")
        put(store, "free", "1")
        with store.transaction() as connection:
            put(store, "big", random.randbytes(40_000).hex(), connection=connection)
            put(store, "mate", "1", connection=connection)
        put(store, "big", "later")
        put(store, "mate", "2")
        with store.transaction() as connection:
            put(store, "mate-of-mate", "1", connection=connection)
            put(store, "mate", "3", connection=connection)
        put(store, "free", "2")
        for number in range(20):
            put(store, f"other-{number}")
        until(lambda: not drain(relay) and status_of(config).blocked, 30)
        (blocked,) = status_of(config).blocked
        assert (blocked.entity, blocked.key, blocked.version) == ("order", "big", 2)
        assert "larger" in blocked.reason
        assert status_of(config).oldest_unpublished_s is not None
        report = check_log(config, [ORDER.name], complete=False)
        assert report.problems == []
        assert report.changes == 23
        topics.set_config(topic, {"max.message.bytes": limit})
    deadline = time.monotonic() + 30
    while problems_of(config) and time.monotonic() < deadline:
        drain(relay)
        time.sleep(0.1)
    assert problems_of(config) == []
    assert status_of(config).blocked == ()


def test_rows_that_no_message_can_be_made_of_block_only_themselves(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    put(store, "o-1", "a")
    put(store, "o-2")
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        broken = "UPDATE everstate_store.outbox SET provenance = '{\"no\"' WHERE key = 'o-1'"
        connection.execute(broken)
        for table in ("outbox", "outbox_pending"):
            strange = f"UPDATE everstate_store.{table} SET entity = 'ghost' WHERE key = 'o-2'"
            connection.execute(strange)
    put(store, "o-1", "b")
    put(store, "o-3")
    assert drain(relay) == 1
    reasons = {blocked.key: blocked.reason for blocked in status_of(config).blocked}
    assert set(reasons) == {"o-1", "o-2"}
    assert "no entity type of this name" in reasons["o-2"]


def test_a_two_mebibyte_entity_goes_through_when_the_limit_is_raised(
    config: Config, store: EntityStore
) -> None:
    with pytest.raises(ChangeTooLarge, match=r"log\.message_bytes_max is 1,048,576"):
        put(store, "o-1", "x" * 2_097_152)
    raised = altered(config, log={"message_bytes_max": 6 * 1_048_576})
    with Topics(raised) as topics:
        topics.ensure([ORDER.name])
    with EntityStore(raised, ORDER) as store, Relay(raised, [ORDER]) as relay:
        put(store, "o-1", "x" * 2_097_152)
        put(store, "o-1", "y" * 2_097_152)
        assert drain(relay) == 2
    assert problems_of(raised) == []


def test_a_transaction_larger_than_a_batch_goes_out_whole(
    config: Config, store: EntityStore
) -> None:
    orders = [StoredOrder(order_id=f"o-{number % 40}", note=f"{number}") for number in range(100)]
    put(store, "o-1", "before")
    store.put_many(orders, provenance=CLERK)
    put(store, "o-1", "after")
    with Relay(altered(config, store={"relay_batch_rows": 10}), [ORDER]) as relay:
        assert drain(relay) == 102
    assert problems_of(config) == []


def in_parts(config: Config) -> Config:
    """Batches of ten changes, and source transactions of more than 25 in parts."""
    return altered(config, store={"relay_batch_rows": 10, "relay_transaction_rows": 25})


def blocks_of(config: Config) -> list[tuple[int, int]]:
    """Index and count of each change in its source transaction, in the order of the indexes."""
    records = read_topic(config, TopicNames(config.log.prefix).changes(ORDER.name))
    changes = [json.loads(record.value or b"") for record in records]
    blocks = [change["provenance"]["transaction"] for change in changes]
    return sorted((block["index"], block["count"]) for block in blocks)


def test_a_transaction_too_large_for_one_kafka_transaction_goes_out_in_parts(
    config: Config, store: EntityStore
) -> None:
    put(store, "o-1", "before")
    orders = [StoredOrder(order_id=f"o-{number % 40}", note=f"{number}") for number in range(100)]
    store.put_many(orders, provenance=CLERK)
    put(store, "o-1", "after")
    put(store, "another")
    moved = []
    for _ in range(3):
        # Killed twice in the middle: the log says how many of the transaction it has.
        with Relay(in_parts(config), [ORDER]) as relay:
            moved += [relay.step() for _ in range(4)]
    assert sum(moved) == 103
    assert max(moved) <= 10 + 2
    assert problems_of(config) == []
    blocks = blocks_of(config)
    assert blocks == sorted([(1, 1)] * 3 + [(index, 100) for index in range(1, 101)])


def test_a_part_that_the_log_refuses_blocks_what_is_left_of_its_transaction(
    config: Config, store: EntityStore
) -> None:
    """What was sent is not sent again when it is mended, and other keys go on meanwhile."""
    orders = [StoredOrder(order_id=f"o-{number}") for number in range(100)]
    store.put_many(orders, provenance=CLERK)
    mend = "UPDATE everstate_store.outbox SET kind = %s WHERE key = 'o-55'"
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute(mend, ["strange"])
        with Relay(in_parts(config), [ORDER], retry_blocked_s=0.05) as relay:
            assert drain(relay) == 50
            assert [each.key for each in status_of(config).blocked] == ["o-55"]
            put(store, "o-7", "sent already")
            put(store, "o-99", "waits")
            assert drain(relay) == 1
            connection.execute(mend, ["created"])
            deadline = time.monotonic() + 30
            while status_of(config).blocked:
                assert time.monotonic() < deadline
                relay.step()
            drain(relay)
    assert problems_of(config) == []
    assert blocks_of(config)[-1] == (100, 100)
    assert len(blocks_of(config)) == 102


def test_published_rows_are_trimmed_late_and_unpublished_ones_never(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    put(store, "o-1", "a")
    put(store, "o-2")
    drain(relay)
    put(store, "o-1", "b")
    assert relay.trim() == 0
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        aged = "UPDATE everstate_store.outbox_published SET minute = minute - interval '25 hours'"
        connection.execute(aged)
        assert relay.trim() == 2
        left = connection.execute("SELECT key, version FROM everstate_store.outbox").fetchall()
    assert left == [("o-1", 2)]
    assert drain(relay) == 1


def test_C3_a_log_that_lost_its_tail_is_refilled_with_the_same_changes(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    for version in range(30):
        put(store, f"o-{version % 4}", f"{version}")
        drain(relay)
    names = TopicNames(config.log.prefix)
    with Offsets(config) as offsets:
        ends = offsets.high_watermarks([names.changes("order")])
    with Topics(config) as topics:
        topics.delete([names.changes("order"), names.state("order")])
        deadline = time.monotonic() + 30
        while True:
            try:
                topics.ensure([ORDER.name])
                break
            except Unavailable:
                assert time.monotonic() < deadline
    relay.close()
    put(store, "o-1", "more")
    with pytest.raises(LogIdentityChanged):
        drain(relay)
    # As `everstate log begin` does.
    with connect(config.store_dsn, "test") as connection:
        bind(connection, changelogs(config, [ORDER.name]), replace=True)
    assert relay.refill(datetime.now(UTC) - timedelta(hours=1)) == 30
    assert drain(relay) == 31
    assert problems_of(config) == []
    # A reader that was at the old end sees each of them.
    with Consumer(config) as consumer:
        passed = [
            record
            for record in consumer.read_topic(names.changes("order"))
            if record.offset < ends[names.changes("order"), record.partition]
        ]
    assert passed == []


def test_a_message_that_somebody_writes_to_the_wal_is_not_listed_as_a_change(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    """Any login role may write one; the relay reads only rows of the outbox (decision 28)."""
    with connect(config.store_dsn, "test") as connection:
        for prefix in ("everstate", "everstate_outbox", "everstate_store"):
            connection.execute(
                "SELECT pg_logical_emit_message(true, %s, %s)", [prefix, '{"xid": "x"}']
            )
    put(store, "o-1")
    assert drain(relay) == 1
    assert problems_of(config) == []


def test_C8_a_log_that_lost_batches_is_noticed_before_anything_is_published(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    """A broker that was restored from a backup: its newest batch is older than the outbox's."""
    put(store, "o-1")
    drain(relay)
    relay.close()
    with connect(config.store_dsn, "test") as connection:
        connection.execute("UPDATE everstate_store.relay SET batch = batch + 9")
        put(store, "o-2")
        with pytest.raises(LogTruncated, match="up to 1, and the store has marked those up to 10"):
            relay.step()
        # As `everstate log begin` does: a new log has none of the batches.
        bind(connection, changelogs(config, [ORDER.name]), replace=True)
        assert drain(relay) == 1
        relay.close()
        connection.execute(
            "UPDATE everstate_store.relay SET batch = batch + 9 WHERE name NOT LIKE '%.begun'"
        )
        with pytest.raises(LogTruncated):
            relay.step()
        assert relay.refill(datetime.now(UTC) - timedelta(hours=1)) == 2
    assert drain(relay) == 2
    # This log had lost nothing: it has both changes twice, which readers skip by their versions.
    assert [each.partition(": ")[2].split(" ")[0] for each in problems_of(config)] == [
        "doubled"
    ] * 2


@pytest.mark.parametrize(("ends", "sent"), [(9, 0), (0, 9)])
def test_C8_a_changelog_that_lost_its_tail_is_noticed_by_its_relay(
    config: Config, store: EntityStore, relay: Relay, ends: int, sent: int
) -> None:
    """The progress of the relay is a topic of its own: it may be whole when a changelog is not."""
    put(store, "o-1")
    put(store, "o-2")
    drain(relay)
    relay.close()
    assert relay.step() == 0  # a whole log is taken
    relay.close()
    progress = read_progress(config, "relay-main")
    assert progress is not None
    ((topic, tail),) = decode_tails(progress.tails).items()
    assert (topic, tail.sent) == (TopicNames(config.log.prefix).changes("order"), 2)
    # As if the changelog had had more records, or the newest batch had.
    more = Tail(tuple(end + ends for end in tail.ends), tail.sent + sent)
    headers = [("batch", b"1"), ("tails", encode_tails({topic: more}))]
    with Producer(config) as producer:
        names = TopicNames(config.log.prefix)
        producer.send(OutRecord(names.progress, b"relay-main", progress.note, headers))
    put(store, "o-3")
    with pytest.raises(LogTruncated, match=r"has 2 of the newest 11|ended at \d+ before"):
        relay.step()
    relay.close()
    with connect(config.store_dsn, "test") as connection:
        # As `everstate log begin` does.
        bind(connection, changelogs(config, [ORDER.name]), replace=True)
    assert drain(relay) == 1
    relay.close()
    assert relay.step() == 0
    assert problems_of(config) == []


def test_a_relay_that_starts_before_any_writer_finds_an_empty_store(config: Config) -> None:
    with Relay(config, [ORDER]) as relay:
        assert relay.step() == 0
    assert status_of(config) == OutboxStatus(batch=0, oldest_unpublished_s=None, blocked=())


def test_installing_again_does_not_wait_for_a_transaction_that_writes(
    config: Config, store: EntityStore
) -> None:
    with store.transaction() as connection:
        put(store, "o-1", connection=connection)
        store.install()


def test_the_age_of_the_oldest_unpublished_change_is_told(
    config: Config, store: EntityStore, relay: Relay
) -> None:
    put(store, "o-1")
    time.sleep(0.05)
    age_s = status_of(config).oldest_unpublished_s
    assert age_s is not None
    assert 0.05 <= age_s < 60
    relay._report()
    gauge = "everstate_outbox_oldest_unpublished_seconds"
    assert (REGISTRY.get_sample_value(gauge) or 0.0) >= age_s
    drain(relay)
    relay._report()
    assert REGISTRY.get_sample_value(gauge) == 0


def test_run_moves_what_comes_and_ends_when_told(config: Config, store: EntityStore) -> None:
    stop = threading.Event()
    with Relay(config, [ORDER]) as relay:
        running = threading.Thread(target=relay.run, args=[stop])
        running.start()
        put(store, "o-1")
        deadline = time.monotonic() + 20
        while problems_of(config) and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
        running.join(10)
        assert not running.is_alive()
    assert problems_of(config) == []
