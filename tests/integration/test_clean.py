"""Clean on a real broker with pretended captures: restarts, lost states, both lanes (C10)."""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from prometheus_client import REGISTRY
from pyspark.sql import SparkSession

from clean_cases import DSN, ITEM, UNAVAILABLE, Database, Made, broken_laws, capture_of
from clean_role import send_raw
from everstate.changes import Change, ChangeCodec, DomainEvent
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import Fenced, LocalStateError, LogError, SourceReplaced, Unavailable
from everstate.log.client import admin_settings
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.asking import Asker
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.holding import read_held
from everstate.sources.cdc.reading import SourceIdentity, encode_source
from everstate.sources.cdc.snapshots import Signalled
from everstate.testing.log_checker import read_topic
from kit.settings import altered, cleaning
from log_cases import forget

pytestmark = cleaning(log={"partitions": 3})

ENTITIES = {"item": ITEM}
OWN = capture_of("debezium", dsn=DSN)


@pytest.fixture(params=["one raw log", "a topic per table"])
def capture(request: pytest.FixtureRequest) -> Capture:
    return OWN if request.param == "one raw log" else capture_of("debezium")


class Rig:
    """Writes raw records as a connector does, cleans them, and reads what came out."""

    def __init__(self, config: Config, capture: Capture, spark: SparkSession) -> None:
        self.config, self.capture, self.spark = config, capture, spark
        self.connector = config
        self.names = TopicNames(config.log.prefix)
        self.database = Database("debezium, default")
        self.sent = 0
        with Topics(config) as topics:
            topics.ensure(["item"])
            count = 1 if capture.is_ours else 3
            topics.ensure_raw([self.raw], partitions=count, settings={})

    @property
    def raw(self) -> str:
        if self.capture.is_ours:
            return self.names.raw_prefix("shop")
        return self.names.raw("shop", "item")

    def send(self, *, again: int = 0) -> None:
        """What the database has logged since, after the last ``again`` messages once more."""
        first = max(0, self.sent - again)
        send_raw(self.connector, self.raw, self.database.log[first:])
        self.sent = len(self.database.log)

    def clean(self, **options: Any) -> Cleaning:
        return Cleaning(self.config, self.capture, ENTITIES, **options)

    def cleaner(self, **options: Any) -> Cleaner:
        return Cleaner(self.config, self.clean(), session=lambda: self.spark, **options)

    def catch_up(self) -> None:
        with closing(self.cleaner()) as cleaner:
            cleaner.catch_up()

    def changes(self) -> list[Change[dict[str, Any]]]:
        codec = ChangeCodec(ITEM)
        return [codec.decode(r.value) for r in self.records(self.names.changes("item")) if r.value]

    def records(self, topic: str) -> list[Any]:
        return read_topic(self.config, topic)

    def broken(self, *, is_whole: bool = True) -> list[str]:
        # A commit is decided before its markers are in every partition: `records` waits for them.
        changes = [json.loads(r.value) for r in self.records(self.names.changes("item"))]
        return broken_laws(map(Made.of_message, changes), self.database.history, is_whole=is_whole)

    def work(self, count: int, start: int = 0) -> None:
        for number in range(start, start + count):
            key = number % 7
            if number % 11 == 10:
                self.database.write(key, None)
            else:
                values = {"name": f"n{number}", "amount": number}
                if number % 5 == 0:
                    values["note"] = f"long {number}"
                self.database.write(key, values)

    @property
    def local_files(self) -> list[Path]:
        return list((self.config.project.data_dir / "clean").glob("*/0"))


@pytest.fixture
def make_rig(config: Config, spark: SparkSession) -> Callable[[Capture], Rig]:
    return lambda capture: Rig(config, capture, spark)


@pytest.fixture
def rig(make_rig: Callable[[Capture], Rig], capture: Capture) -> Rig:
    return make_rig(capture)


def test_raw_rows_become_whole_changes_in_changes_and_state(rig: Rig) -> None:
    rig.work(60)
    assert any(UNAVAILABLE in json.dumps(value) for _, value in rig.database.log)
    rig.send()
    rig.catch_up()
    assert rig.broken() == []
    newest: dict[str, int] = defaultdict(int)
    for change in rig.changes():
        newest[change.key] = max(newest[change.key], change.version)
    codec = ChangeCodec(ITEM)
    state = {r.key.decode(): codec.decode(r.value) for r in rig.records(rig.names.state("item"))}
    assert {key: change.version for key, change in state.items()} == newest
    first = min(rig.changes(), key=lambda change: change.extra["source"]["position"]["lsn"])
    assert first.provenance.service_name == "shop"
    assert first.extra["source"]["position"] == {"lsn": [1, 110]}


def test_a_restart_in_the_middle_and_a_capture_that_reads_again_double_nothing(rig: Rig) -> None:
    for round_ in range(4):
        rig.work(20, start=20 * round_)
        rig.send(again=15)
        rig.catch_up()
    assert rig.broken() == []
    ids = [change.id for change in rig.changes()]
    assert len(ids) == len(set(ids))


def test_c10_a_lost_local_state_is_made_again_and_nothing_is_doubled(rig: Rig) -> None:
    rig.work(40)
    rig.send()
    rig.catch_up()
    for folder in rig.local_files:
        shutil.rmtree(folder)
    rig.work(40, start=40)
    rig.send(again=30)
    rig.catch_up()
    assert rig.broken() == []


def test_c10_a_damaged_local_state_is_made_again(rig: Rig) -> None:
    rig.work(30)
    rig.send()
    rig.catch_up()
    for folder in rig.local_files:
        for file in folder.iterdir():
            file.write_bytes(b"not a database at all" * 100)
    rig.work(30, start=30)
    rig.send()
    rig.catch_up()
    assert rig.broken() == []


def test_c10_an_emptied_state_topic_is_filled_again_from_changes(rig: Rig) -> None:
    rig.work(40)
    rig.send()
    rig.catch_up()
    with Topics(rig.config) as topics:
        topics.delete([rig.names.state("item")])
    rig.work(40, start=40)
    rig.send()
    rig.catch_up()
    assert rig.broken() == []
    assert {r.key for r in rig.records(rig.names.state("item"))} == {
        str(key).encode() for key in rig.database.history
    }


def test_c10_without_states_and_history_clean_refuses_to_start(rig: Rig) -> None:
    rig.work(40)
    rig.send()
    rig.catch_up()
    with Topics(rig.config) as topics:
        topics.delete([rig.names.state("item")])
    forget(rig.config, rig.names.changes("item"))
    cleaning = rig.clean()
    with pytest.raises(LocalStateError, match="no longer begins at its beginning"):
        cleaning.open()
    cleaning.close()


def test_a_lost_position_is_no_loss_the_raw_topics_are_read_again_and_known(rig: Rig) -> None:
    rig.work(40)
    rig.send()
    rig.catch_up()
    with Topics(rig.config) as topics:
        topics.delete([rig.names.progress])
    rig.work(20, start=40)
    rig.send()
    rig.catch_up()
    assert rig.broken() == []


def test_a_second_process_fences_the_first(rig: Rig) -> None:
    rig.work(10)
    rig.send()
    first, second = rig.cleaner(), rig.cleaner()
    first.catch_up()
    second.catch_up()
    rig.work(10, start=10)
    rig.send()
    with pytest.raises(Fenced):
        first.catch_up()
    second.catch_up()
    first.close()
    second.close()
    assert rig.broken() == []


def test_a_row_of_unknown_state_is_held_over_restarts_until_a_snapshot_comes(rig: Rig) -> None:
    rig.database.write(1, {"name": "a", "note": "long"})
    rig.sent = len(rig.database.log)
    rig.database.write(1, {"name": "b"})
    rig.send()
    rig.catch_up()
    assert rig.changes() == []
    (held,) = read_held(rig.config, "shop")
    assert (held.key, held.columns, held.needs_snapshot) == ("1", {"id": 1}, True)
    for folder in rig.local_files:
        shutil.rmtree(folder)
    rig.database.write(1, {"amount": 5})
    rig.send()
    rig.catch_up()
    (held,) = read_held(rig.config, "shop")
    assert len(held.rows) == 2
    rig.database.read(1)
    rig.send()
    rig.catch_up()
    assert read_held(rig.config, "shop") == []
    assert [c.current for c in rig.changes()] == [rig.database.rows[1]]


def test_a_database_that_cannot_be_asked_does_not_stop_cleaning(rig: Rig) -> None:
    tried = threading.Event()

    def ask(table: str, keys: Sequence[Mapping[str, Any]]) -> Signalled:
        assert (table, keys) == ("public.item", [{"id": 1}])
        tried.set()
        raise Unavailable("the database is away.")

    rig.database.write(1, {"name": "a", "note": "long"})
    rig.sent = len(rig.database.log)
    rig.database.write(1, {"name": "b"})
    rig.send()
    cleaning = rig.clean(asker=Asker("shop", ask))
    with closing(Cleaner(rig.config, cleaning, session=lambda: rig.spark)) as cleaner:
        cleaner.catch_up()
        assert tried.wait(10)
        rig.database.write(2, {"name": "c"})
        rig.send()
        cleaner.catch_up()
    assert [change.key for change in rig.changes()] == ["2"]


def test_what_cannot_be_read_is_a_dead_letter_and_makes_its_entity_unsure(rig: Rig) -> None:
    rig.database.write(1, {"name": "a", "note": "long"})
    rig.database.write(1, {"amount": "no number"})
    rig.database.write(1, {"name": "c"})
    rig.send()
    rig.catch_up()
    (dead,) = rig.records(rig.names.dead("item"))
    reason = dict(dead.headers)["everstate_reason"].decode()
    assert "amount" in reason
    assert json.loads(dead.value) == rig.database.log[1][1]
    assert [change.version for change in rig.changes()] == [1]
    (held,) = read_held(rig.config, "shop")
    assert held.is_unsure


@pytest.fixture
def small(rig: Rig) -> Rig:
    """A log that takes states of at most ten kilobytes."""
    rig.config = altered(rig.config, log={"message_bytes_max": 10_240})
    return rig


def test_a_row_too_large_for_the_log_is_a_dead_letter_and_all_others_go_on(small: Rig) -> None:
    rows, large = small.database.write, 50
    for key in range(101):
        rows(key, {"name": f"n{key}", "note": "x" * 12_000 if key == large else "short"})
    rows(large, {"note": "y" * 12_000})
    for key in range(40, 60):
        rows(key, {"note": "changed"})
    small.send()
    small.catch_up()
    first, second = small.records(small.names.dead("item"))
    for letter, note in ((first, "x"), (second, "y")):
        assert json.loads(letter.value)["after"]["note"] == note * 12_000
        reason = dict(letter.headers)["everstate_reason"].decode()
        assert "log.message_bytes_max is 10,240" in reason
    history = small.database.history
    history[large] = history[large][2:]
    assert small.broken() == []


def test_a_state_that_the_log_takes_can_be_updated_and_deleted(small: Rig) -> None:
    for note in ("x" * 9_000, "y" * 9_000, "z" * 9_000):
        small.database.write(1, {"name": "n", "note": note})
    small.database.write(1, None)
    small.send()
    small.catch_up()
    assert [change.version for change in small.changes()] == [1, 2, 3, 4]
    assert small.broken() == []


def test_what_waits_for_one_key_beyond_a_record_is_refused_until_a_whole_row_comes(
    small: Rig,
) -> None:
    small.database.write(1, {"name": "a", "note": "long"})
    small.sent = len(small.database.log)
    for number in range(40):
        small.database.write(1, {"name": f"{number} " + "x" * 9_000})
    small.database.write(2, {"name": "b"})
    small.send()
    small.catch_up()
    dead = small.records(small.names.dead("item"))
    (held,) = read_held(small.config, "shop")
    assert len(dead) + len(held.rows) == 40
    assert (len(dead) > 0, held.is_unsure, held.needs_snapshot) == (True, True, True)
    small.database.read(1)
    small.send()
    small.catch_up()
    assert read_held(small.config, "shop") == []
    states = {change.key: change.current for change in small.changes()}
    assert states == {"1": small.database.rows[1], "2": small.database.rows[2]}


def test_what_cannot_be_composed_is_a_dead_letter_and_all_others_go_on(
    make_rig: Callable[[Capture], Rig],
) -> None:
    def event(before: Any, after: Any) -> DomainEvent | None:
        assert after is None or after["amount"] != 13, "unlucky"
        return None

    rig = make_rig(capture_of("debezium", table={"event": event}))
    for number in range(20):
        rig.database.write(number, {"name": f"n{number}", "amount": number, "note": "n"})
    rig.database.write(13, {"amount": 14, "note": "changed"})
    rig.send()
    rig.catch_up()
    (dead,) = rig.records(rig.names.dead("item"))
    assert b"the event function failed" in dict(dead.headers)["everstate_reason"]
    rig.database.history[13] = rig.database.history[13][1:]
    assert rig.broken() == []


def test_a_row_that_no_dead_letter_takes_is_told_with_its_place(small: Rig) -> None:
    small.database.write(1, {"name": "n", "note": "x" * 400_000})
    small.database.write(2, {"name": "m", "note": "short"})
    small.send()
    small.catch_up()
    (dead,) = small.records(small.names.dead("item"))
    assert (dead.key, dead.value) == (None, None)
    told = dict(dead.headers)
    assert b"are in the raw topic only" in told["everstate_reason"]
    place = int(told["everstate_partition"]), int(told["everstate_offset"])
    (raw,) = [r for r in small.records(small.raw) if (r.partition, r.offset) == place]
    assert json.loads(raw.value)["after"]["id"] == 1
    assert [change.key for change in small.changes()] == ["2"]


def test_every_row_that_was_read_is_accounted_for_over_restarts(small: Rig) -> None:
    for number in range(1, 8):
        small.database.write(number, {"name": f"n{number}", "note": "long"})
    small.database.write(8, {"name": "large", "note": "x" * 12_000})
    small.send()
    small.catch_up()
    small.send(again=3)
    small.database.write(9, {"name": "unknown", "note": "long"})
    small.sent = len(small.database.log)
    small.database.write(9, {"name": "waits"})
    small.send()
    balance = read_balance(small.config, small.capture)
    assert (balance.tables[0].table, balance.tables[0].read) == ("public.item", 8)
    assert balance.unread == 4
    small.catch_up()
    balance = read_balance(small.config, small.capture)
    (table,) = balance.tables
    outcomes = {name: getattr(table, name) for name in ("published", "skipped", "dead", "held")}
    # Of one raw log it is known that the refused row, too, was read before.
    dead = 1 if small.capture.is_ours else 2
    assert outcomes == {"published": 7, "skipped": 4 - dead, "dead": dead, "held": 1}
    assert (table.read, table.vanished, balance.unread) == (12, 0, 0)
    metric = {
        (each.labels.get("outcome"), each.name): each.value
        for family in REGISTRY.collect()
        for each in family.samples
        if each.labels.get("table") == "public.item" and not each.name.endswith("_created")
    }
    assert metric["read", "everstate_clean_rows_total"] >= 12
    assert metric[None, "everstate_clean_vanished_rows"] == 0


def test_a_raw_log_that_grew_is_refused(config: Config, make_rig: Callable[[Capture], Rig]) -> None:
    rig = make_rig(OWN)
    rig.work(5)
    rig.send()
    rig.catch_up()
    admin: Any = AdminClient(admin_settings(config))
    for future in admin.create_partitions([NewPartitions(rig.raw, 2)]).values():
        future.result(10)
    with pytest.raises(LogError, match="has 2 partitions"):
        rig.catch_up()
    assert rig.broken() == []


def test_rows_of_a_restored_database_wait_for_a_new_epoch(
    config: Config, make_rig: Callable[[Capture], Rig]
) -> None:
    rig = make_rig(OWN)

    def reads(identity: str, epoch: int) -> None:
        """What `everstate cdc` writes when another database is read from here on."""
        value = encode_source(SourceIdentity(identity=identity, epoch=epoch))
        with Producer(config) as producer:
            producer.send_raw(rig.raw, None, value, [("kind", b"source")])

    reads("system 1", 1)
    rig.work(20)
    rig.send()
    rig.catch_up()
    assert rig.broken() == []
    reads("system 2", 1)
    with pytest.raises(SourceReplaced, match="system 2"):
        rig.catch_up()
    assert rig.broken() == [], "nothing became of it"
    before = len(rig.changes())
    reads("system 2", 2)
    # Its log begins anew; what it says is newer all the same.
    restored = Database("debezium, default")
    restored.write(1, {"name": "restored", "note": "n"})
    send_raw(config, rig.raw, restored.log)
    rig.catch_up()
    assert len(rig.changes()) == before + 1
    (last,) = [one for one in rig.changes() if (one.current or {}).get("name") == "restored"]
    assert last.extra["source"]["position"]["lsn"][0] == 2
    (table,) = read_balance(config, OWN).tables
    assert table.vanished == 0
