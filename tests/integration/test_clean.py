"""Clean on a real broker with pretended captures: restarts, lost states, both lanes (C10)."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from capture_cases import eventually
from clean_cases import ITEM, UNAVAILABLE, Database, broken_laws, capture_of
from everstate.changes import Change, ChangeCodec
from everstate.config import Config
from everstate.errors import Fenced, LocalStateError, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.asking import Asker
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.holding import read_held
from everstate.sources.cdc.snapshots import Signalled
from running_stack import RunningStack

ENTITIES = {"item": ITEM}


@pytest.fixture
def config(stack: RunningStack, topic_prefix: str, tmp_path: Path) -> Config:
    found = stack.config
    log = found.log.model_copy(update={"prefix": topic_prefix, "partitions": 3})
    project = found.project.model_copy(update={"data_dir": tmp_path})
    return found.model_copy(update={"log": log, "project": project})


@pytest.fixture
def capture() -> Capture:
    return capture_of("debezium")


class Rig:
    """Writes raw records as a connector does, cleans them, and reads what came out."""

    def __init__(self, config: Config, capture: Capture) -> None:
        self.config, self.capture = config, capture
        self.names = TopicNames(config.log.prefix)
        self.database = Database("debezium, default")
        self.sent = 0
        with Topics(config) as topics:
            topics.ensure(["item"])
            topics.ensure_raw([self.raw], partitions=3, settings={})

    @property
    def raw(self) -> str:
        return self.names.raw("shop", "item")

    def send(self, *, again: int = 0) -> None:
        """What the database has logged since, after the last ``again`` messages once more."""
        first = max(0, self.sent - again)
        with Producer(self.config) as producer:
            for key, value in self.database.log[first:]:
                body = None if value is None else json.dumps(value).encode()
                producer.send_raw(self.raw, json.dumps(key).encode(), body)
        self.sent = len(self.database.log)

    def clean(self, **options: Any) -> Cleaning:
        return Cleaning(self.config, self.capture, ENTITIES, **options)

    def cleaner(self, **options: Any) -> Cleaner:
        return Cleaner(self.config, self.clean(), bulk_records=1_000_000, **options)

    def catch_up(self) -> None:
        cleaner = self.cleaner()
        try:
            cleaner.catch_up()
        finally:
            cleaner.close()

    def changes(self) -> list[Change[dict[str, Any]]]:
        codec = ChangeCodec(ITEM)
        return [codec.decode(r.value) for r in self.records(self.names.changes("item")) if r.value]

    def records(self, topic: str) -> list[Any]:
        # A commit is decided before its markers are in every partition.
        with Offsets(self.config) as offsets:
            assert eventually(
                lambda: offsets.stable_ends([topic]) == offsets.high_watermarks([topic]), 10
            )
        with Consumer(self.config) as consumer:
            return list(consumer.read_topic(topic))

    def broken(self, *, is_whole: bool = True) -> list[str]:
        changes: list[Any] = [_Versioned(change) for change in self.changes()]
        return broken_laws(changes, self.database.history, is_whole=is_whole)

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
        return list((self.config.project.data_dir / "clean").iterdir())


class _Versioned:
    """A change that was read, as the checker wants it."""

    def __init__(self, change: Change[dict[str, Any]]) -> None:
        self.key, self.version = change.key, change.version
        self.step = self
        self.kind = change.kind
        self.current = None if change.current is None else json.dumps(change.current)
        self.original = None if change.original is None else json.dumps(change.original)


@pytest.fixture
def rig(config: Config, capture: Capture) -> Iterator[Rig]:
    found = Rig(config, capture)
    yield found
    with Topics(config) as topics:
        mine = [t for t in topics.existing() if t.startswith(f"{config.log.prefix}.")]
        topics.delete(mine)


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
    assert first.extra["source"]["position"] == {"lsn": [1, 110, 0]}


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
    for file in rig.local_files:
        file.unlink()
    rig.work(40, start=40)
    rig.send(again=30)
    rig.catch_up()
    assert rig.broken() == []


def test_c10_a_damaged_local_state_is_made_again(rig: Rig) -> None:
    rig.work(30)
    rig.send()
    rig.catch_up()
    for file in rig.local_files:
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
    _cut(rig.config, rig.names.changes("item"))
    cleaning = rig.clean()
    with pytest.raises(LocalStateError, match="no longer begins at its beginning"):
        cleaning.open()
    cleaning.close()


def _cut(config: Config, topic: str) -> None:
    """Let the log forget what is in a topic, as retention does."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    from everstate.log.client import admin_settings
    from everstate.log.positions import Offsets

    with Offsets(config) as offsets:
        ends = offsets.stable_ends([topic])
    admin: Any = AdminClient(admin_settings(config))
    cut = [TopicPartition(name, part, end) for (name, part), end in ends.items()]
    for future in admin.delete_records(cut).values():
        future.result(10)


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
    assert (held.key, held.columns, held.asks_for_snapshot) == ("1", {"id": 1}, True)
    for file in rig.local_files:
        file.unlink()
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
    cleaner = Cleaner(rig.config, cleaning, bulk_records=1_000_000)
    try:
        cleaner.catch_up()
        assert tried.wait(10)
        rig.database.write(2, {"name": "c"})
        rig.send()
        cleaner.catch_up()
    finally:
        cleaner.close()
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


def test_a_backlog_is_parsed_by_spark_and_comes_to_the_same(rig: Rig, spark: SparkSession) -> None:
    rig.work(200)
    rig.send()
    cleaner = Cleaner(rig.config, rig.clean(), session=lambda: spark, bulk_records=50)
    cleaner.catch_up()
    assert cleaner.bulk_jobs == 1
    rig.work(20, start=200)
    rig.send()
    cleaner.catch_up()
    assert cleaner.bulk_jobs == 1
    cleaner.close()
    assert rig.broken() == []
