"""The log checker sees what it must (C3, C4, C7): each message has a defect that brings it out.

Every test about the relay ends in this checker, so each way to be wrong is planted here under the
real relay.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import psycopg
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.publisher import OncePublisher, PublishedProgress
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import Relay, marks
from everstate.sources.outbox.compose import Composer, OutboxRow
from everstate.sources.outbox.pending import Transaction
from everstate.sources.stores.postgres import EntityStore
from everstate.testing.log_checker import check_log, read_topic
from everstate.testing.store_contract import CLERK, ORDER, StoredOrder

pytestmark = pytest.mark.settings(log={"partitions": 1}, topics=[ORDER.name])

_CLEANED_S = 30.0
_CLEANER_MS = 100
_CLEANER_MS_DEFAULT = 15_000
_COMPACT_AT_ONCE = {
    "segment.ms": "50",
    "min.cleanable.dirty.ratio": "0.0",
    "min.compaction.lag.ms": "0",
    "delete.retention.ms": "0",
}


def relay(config: Config) -> None:
    """A relay that starts, publishes what there is, and ends."""
    with Relay(config, [ORDER]) as relay:
        while relay.step():
            pass


def problems(config: Config) -> list[str]:
    return check_log(config, [ORDER.name]).problems


def put(store: EntityStore, *keys: str, note: str = "") -> None:
    store.put_many([StoredOrder(order_id=key, note=note) for key in keys], provenance=CLERK)


def test_C3_planted_a_relay_that_doubles_is_caught(
    config: Config, store: EntityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets what it published, and does not ask the log what came last."""
    real_open = OncePublisher.open

    def ask_nothing(self: OncePublisher, timeout_s: float = 60.0) -> PublishedProgress | None:
        real_open(self, timeout_s)
        self._progress = None
        return None

    put(store, "a", "b")
    with monkeypatch.context() as planted:
        planted.setattr(marks, "mark", lambda *_: 0)
        planted.setattr(OncePublisher, "open", ask_nothing)
        with Relay(config, [ORDER]) as first:
            first.step()
        with Relay(config, [ORDER]) as second:
            second.step()
    found = problems(config)
    assert [each.partition(" at ")[0] for each in found] == [
        "order 'a' version 1: doubled",
        "order 'b' version 1: doubled",
    ]


def test_planted_changes_that_nobody_committed_and_that_differ_are_caught(
    config: Config, store: EntityStore
) -> None:
    put(store, "a")
    relay(config)
    (record,) = read_topic(config, TopicNames(config.log.prefix).changes("order"))
    assert record.value is not None
    topic = TopicNames(config.log.prefix).changes("order")
    foreign = record.value.replace(record.value[7:43], b"00000000-0000-0000-0000-000000000001")
    with Producer(config) as producer:
        producer.send_many([OutRecord(topic, b"a", foreign, [])])
        producer.flush(30)
    assert problems(config) == ["order 'a' version 1: was never committed"]
    put(store, "a", note="second")
    with EntityStore(config, ORDER) as other, other.transaction() as connection:
        connection.execute("UPDATE everstate_store.outbox SET after = '{}' WHERE version = 1")
    found = problems(config)
    assert "order 'a' version 2: missing" in found
    assert any("version 1: current is {'order_id': 'a'" in each for each in found)


@pytest.mark.parametrize(
    ("committed", "what"),
    [
        ("after = replace(after, '2.5', '2.50')", "current is"),
        ("after = replace(after, '2.5', '2.5000000000000001')", "current is"),
        ("provenance = replace(provenance, 'clerk-7', 'clerk-8')", "provenance is"),
        ("occurred_at = '2020-02-29T12:00:00Z'", "occurredAt is"),
        ('event = \'{"type": "Moved", "data": 1}\'', "event is"),
        ("key = 'b'", "record key is"),
    ],
)
def test_planted_a_digit_a_writer_a_time_or_an_event_that_differs_is_caught(
    config: Config, store: EntityStore, committed: str, what: str
) -> None:
    store.put_many([StoredOrder(order_id="a", weight=2.5)], provenance=CLERK)
    relay(config)
    assert problems(config) == []
    with psycopg.connect(config.store_dsn) as connection:
        connection.execute(f"UPDATE everstate_store.outbox SET {committed}".encode())
    assert any(f"version 1: {what}" in each for each in problems(config))


class Cutting(Composer):
    """Planted: leaves the last change of a transaction out."""

    def compose(
        self, transactions: Sequence[Transaction], rows: Mapping[int, OutboxRow]
    ) -> list[OutRecord]:
        cut = [replace(each, rows=each.rows[:-1]) for each in transactions]
        return super().compose(cut, rows)


class NullGraves(Composer):
    """Planted (C7): a deletion goes to `.state` as a null, which compaction forgets."""

    def compose(
        self, transactions: Sequence[Transaction], rows: Mapping[int, OutboxRow]
    ) -> list[OutRecord]:
        return [
            msgspec.structs.replace(record, value=None)
            if ".state." in record.topic and b'"kind":"deleted"' in (record.value or b"")
            else record
            for record in super().compose(transactions, rows)
        ]


def test_planted_a_transaction_that_is_cut_is_caught(
    config: Config, store: EntityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.outbox.relay.Composer", Cutting)
    put(store, "a", "b", "c")
    relay(config)
    missing, cut = problems(config)
    assert missing == "order 'c' version 1: missing"
    assert cut.startswith("transaction pg:")
    assert "of 3 changes came as [(1, 2), (2, 2)]" in cut


def compacted(config: Config, store: EntityStore) -> dict[bytes, bytes | None]:
    """`.state` after the broker has compacted it, and forgot what it may forget."""
    look_for_garbage_every(config, _CLEANER_MS)
    try:
        return _compacted(config, store)
    finally:
        look_for_garbage_every(config, _CLEANER_MS_DEFAULT)


def _compacted(config: Config, store: EntityStore) -> dict[bytes, bytes | None]:
    state = state_topic(config)
    with Topics(config) as topics:
        topics.set_config(state, _COMPACT_AT_ONCE)
    deadline = time.monotonic() + _CLEANED_S
    turn = 0
    while True:
        # A segment is closed, and so can be compacted, when a later record comes.
        turn += 1
        put(store, "roll", note=str(turn))
        relay(config)
        records = [each for each in read_topic(config, state) if each.key != b"roll"]
        keys = [each.key or b"" for each in records]
        if len(keys) == len(set(keys)) and all(each.value for each in records):
            return {each.key or b"": each.value for each in records}
        assert time.monotonic() < deadline, f"not compacted: {records}"
        time.sleep(0.3)


def look_for_garbage_every(config: Config, pause_ms: int) -> None:
    """Set how often the broker looks for something to compact."""
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    operation = AlterConfigOpType.SET
    for broker in admin.list_topics(timeout=30).brokers:
        entry = ConfigEntry(
            "log.cleaner.backoff.ms", str(pause_ms), incremental_operation=operation
        )
        resource = ConfigResource(ResourceType.BROKER, str(broker), incremental_configs=[entry])
        for done in admin.incremental_alter_configs([resource]).values():
            done.result(30)


def test_C7_after_compaction_the_grave_tells_the_version_which_goes_on(
    config: Config, store: EntityStore
) -> None:
    for note in ("first", "second"):
        put(store, "gone", "stays", note=note)
        relay(config)
    store.delete("gone", provenance=CLERK)
    relay(config)
    state = compacted(config, store)
    assert state.keys() == {b"gone", b"stays"}
    grave = state[b"gone"] or b""
    assert b'"kind":"deleted"' in grave
    assert b'"version":3' in grave
    put(store, "gone", note="again")
    relay(config)
    assert problems(config) == []
    again = {each.key: each.value for each in read_topic(config, state_topic(config))}
    assert b'"version":4' in (again[b"gone"] or b"")


def state_topic(config: Config) -> str:
    return TopicNames(config.log.prefix).state("order")


def test_C7_planted_a_null_for_a_deletion_is_caught_and_compaction_forgets_the_version(
    config: Config, store: EntityStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.outbox.relay.Composer", NullGraves)
    put(store, "gone", "stays")
    relay(config)
    store.delete("gone", provenance=CLERK)
    relay(config)
    assert problems(config) == ["order: .state differs from .changes at ['gone']"]
    assert compacted(config, store).keys() == {b"stays"}
