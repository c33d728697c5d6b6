"""Derived topics of accepted changes: each once, in order, from version to version."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing
from typing import Any

import jsonpatch
import pytest
from keep_cases import Together, World, drain, orders_app
from pydantic import BaseModel
from pyspark.sql import SparkSession

from everstate.changes.derived import Derivation, joined, notices_of, patch_of
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.errors import LogTruncated, NotFound
from everstate.log.consumer import Consumer
from everstate.log.derived import DerivedNote, DerivedReader, DerivedRecord, forget_topic
from everstate.log.positions import Ends, Offsets
from everstate.log.record import OutRecord, Record
from everstate.log.topics import TopicNames
from everstate.pipeline.derive import deriver as deriver_module
from everstate.pipeline.derive.declare import retire_topics
from everstate.pipeline.derive.deriver import Deriver
from everstate.pipeline.derive.verify import _judge, _stand, verify_topic
from everstate.postgres import connect_views
from everstate.views.changing import ask_rebuild, ask_undo, drop
from everstate.views.control import Control
from everstate.views.source import RecordSource
from log_cases import forget, lose_records

pytestmark = pytest.mark.settings(archive={"trigger_s": 1})

DERIVER_READS_HISTORY = "everstate.pipeline.derive.deriver.history_vector"


class Rig:
    """A world, its keeper, and a derived topic of it, all in the thread of the test."""

    def __init__(self, config: Config, spark: SparkSession, *declared: Any, **options: Any) -> None:
        self.world = World(config, spark, orders_app())
        self.declared: list[Derivation] = [
            self.world.app.derive(name, form, **options) for name, form in declared
        ]
        self.keeper: Together = self.world.keeper()
        self.derivers = {each.name: self.deriver(each) for each in self.declared}
        self.gone: list[Deriver] = []

    def deriver(self, declared: Derivation) -> Deriver:
        made = Deriver(self.world.config, self.world.app, declared)
        made.open()
        return made

    def close(self) -> None:
        for deriver in (*self.derivers.values(), *self.gone):
            deriver.close()
        self.keeper.close()

    def restart(self, name: str) -> None:
        """As after a kill: nothing is handed over."""
        self.gone.append(self.derivers[name])
        self.derivers[name] = self.deriver(self.derivers[name]._declared)

    def settle(self) -> None:
        """Keep and derive until both stand at the log's end."""
        drain(self.keeper)
        for deriver in self.derivers.values():
            while not self.at_end(deriver):
                deriver.step()

    def at_end(self, deriver: Deriver) -> bool:
        wanted = self.world.ends()
        with connect_views(self.world.config.views_dsn) as connection:
            control = Control(connection, self.world.config.views.schema_name)
            rows = control.versions(deriver.name)
            return all(
                control.vector(row.name, row.version) == wanted
                for row in rows
                if row.status in ("live", "building")
            ) and all(row.status != "building" for row in rows)

    def read(self, name: str, **options: Any) -> list[DerivedRecord]:
        with DerivedReader(self.world.config, name, **options) as reader:
            return list(reader.records(idle_s=0.6))

    def send(self, *records: OutRecord) -> None:
        self.world.send(*records)


def accepted(log: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By key, the first message of each version, from version 1 without a hole: a plain fold."""
    versions: dict[str, dict[int, Any]] = defaultdict(dict)
    for message in log:
        versions[message["key"]].setdefault(message["version"], message)
    found = {}
    for key, of_key in versions.items():
        count = next(n for n in range(1, len(of_key) + 2) if n not in of_key)
        found[key] = [of_key[n] for n in range(1, count)]
    return found


def by_key(records: list[DerivedRecord]) -> dict[str, list[DerivedRecord]]:
    found: dict[str, list[DerivedRecord]] = defaultdict(list)
    for record in records:
        found[record.key or ""].append(record)
    return found


def check_patches(
    rig: Rig, records: list[DerivedRecord], expired: Sequence[dict[str, Any]] = ()
) -> None:
    """Each accepted change is there once and in order, and its patch makes current of original.

    ``expired``: messages that the log has no more.
    """
    wanted, found = accepted([*expired, *rig.world.log()]), by_key(records)
    assert {k: [r.version for r in v] for k, v in found.items()} == {
        key: [m["version"] for m in messages] for key, messages in wanted.items() if messages
    }
    for key, messages in wanted.items():
        for message, record in zip(messages, found[key], strict=True):
            original = json.loads(json.dumps(message["originalEntityState"], default=str))
            current = json.loads(json.dumps(message["currentEntityState"], default=str))
            assert record.id == message["id"]
            assert jsonpatch.JsonPatch(record.value).apply(original) == current


def some(rig: Rig, count: int, *, first: int = 0) -> list[OutRecord]:
    records = []
    for number in range(first, first + count):
        key = f"o{number % 7}"
        if number % 11 == 10 and rig.world.states.get(key, (0, None))[1] is not None:
            records.append(rig.world.change(key, None))
        else:
            records.append(rig.world.put(key, ("AT", "DE", None)[number % 3], f"{number}.50"))
    return records


@pytest.fixture
def patches(config: Config, spark: SparkSession) -> Iterator[Rig]:
    rig = Rig(config, spark, ("order_patches", patch_of("ordr")))
    yield rig
    rig.close()


def test_each_accepted_change_is_in_the_topic_once_with_its_patch(patches: Rig) -> None:
    sent = some(patches, 40)
    lone = sent[5]
    unreadable = OutRecord(patches.world.topic, b"o1", b"no JSON")
    # A duplicate, one that cannot be read, and a version that comes before the one it follows.
    late, early = patches.world.put("late", "AT", "1"), patches.world.put("late", "DE", "2")
    third = patches.world.put("late", "DE", "3")
    patches.send(*sent[:20], lone, unreadable, third, early)
    patches.settle()
    assert "late" not in by_key(patches.read("order_patches"))
    patches.send(*sent[20:], late, lone)
    patches.settle()
    records = patches.read("order_patches")
    check_patches(patches, records)
    assert [r.version for r in by_key(records)["late"]] == [1, 2, 3]
    assert records[0].provenance["serviceName"] == "test"


def test_a_publisher_that_is_gone_between_any_two_steps_doubles_and_loses_nothing(
    patches: Rig,
) -> None:
    for turn in range(4):
        patches.send(*some(patches, 15, first=15 * turn))
        drain(patches.keeper)
        deriver = patches.derivers["order_patches"]
        deriver.step()
        if turn % 2:
            # It has read and not published.
            for reader in deriver._readers.values():
                if (reading := reader.read_on()) is not None:
                    wait([reading], 0.3)
                reader.gather()
        patches.restart("order_patches")
    patches.settle()
    check_patches(patches, patches.read("order_patches"))


def test_what_follows_the_core_never_passes_it(patches: Rig) -> None:
    patches.send(*some(patches, 10))
    deriver = patches.derivers["order_patches"]
    assert sum(deriver.step() for _ in range(5)) == 0
    patches.settle()
    check_patches(patches, patches.read("order_patches"))


def test_c8_a_log_that_lost_its_end_is_not_read_on_even_before_the_core_looked(
    patches: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches.send(*some(patches, 10))
    patches.settle()
    known = patches.read("order_patches")
    # The core has read further than the topic when the end is lost.
    patches.send(*some(patches, 10, first=10))
    drain(patches.keeper)
    lose_records(monkeypatch, patches.world.config, patches.world.topic)
    patches.send(*some(patches, 15, first=20))
    patches.restart("order_patches")
    with pytest.raises(LogTruncated, match="derived topic order_patches: the log lost records"):
        patches.derivers["order_patches"].step()
    assert patches.read("order_patches") == known


def test_a_new_version_is_built_beside_the_old_one_and_readers_follow_the_barrier(
    patches: Rig,
) -> None:
    rig = patches
    rig.send(*some(rig, 30))
    rig.settle()
    reader = DerivedReader(rig.world.config, "order_patches")
    before = list(reader.records(idle_s=0.5))
    rig.world.archive()
    with connect_views(rig.world.config.views_dsn) as connection:
        control = Control(connection, rig.world.config.views.schema_name)
        assert ask_rebuild(control, "order_patches").version == 2
    rig.send(*some(rig, 20, first=30))
    rig.settle()
    rig.send(*some(rig, 10, first=50))
    rig.settle()
    after = list(reader.records(idle_s=0.6))
    assert {record.topic_version for record in before} == {1}
    assert 2 in {record.topic_version for record in after}
    check_patches(rig, before + after)
    # Who comes now sees the whole topic in the new version.
    check_patches(rig, fresh := rig.read("order_patches"))
    assert {record.topic_version for record in fresh} == {2}
    # Back, and on: each reader goes where it is sent.
    with connect_views(rig.world.config.views_dsn) as connection:
        ask_undo(Control(connection, rig.world.config.views.schema_name), "order_patches")
    rig.send(*some(rig, 10, first=60))
    rig.settle()
    rig.send(*some(rig, 5, first=70))
    rig.settle()
    again = list(reader.records(idle_s=0.6))
    assert again[-1].topic_version == 1
    check_patches(rig, before + after + again)
    on = rig.read("order_patches", token=(before + after)[-1].token)
    check_patches(rig, before + after + on)
    reader.close()


def test_a_version_that_is_built_goes_on_where_it_was_when_its_process_is_killed(
    patches: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, name = patches, "order_patches"
    rig.send(*some(rig, 40))
    rig.settle()
    monkeypatch.setattr(deriver_module, "_PART_CHANGES", 3)
    rig.send(*some(rig, 5, first=40))
    with connect_views(rig.world.config.views_dsn) as connection:
        control = Control(connection, rig.world.config.views.schema_name)
        ask_rebuild(control, name)

        def made() -> int:
            rig.derivers[name].step()
            note = rig.derivers[name]._note
            return 0 if note is None else sum(note.versions.get(2, {}).values())

        while not (before := made()):
            pass
        (row,) = (row for row in control.versions(name) if row.version == 2)
        assert row.progress is not None
        assert row.progress["doing"] == "building"
        rig.restart(name)
        assert before <= made() < sum(rig.world.ends().values())
    rig.settle()
    check_patches(rig, found := rig.read(name))
    assert {record.topic_version for record in found} == {2}


def test_a_build_that_begins_again_and_again_has_held_changes_whose_bytes_were_trimmed(
    patches: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, name, fetched = patches, "order_patches", list[int]()
    one, two, three = (rig.world.put("g", "AT", str(n)) for n in (1, 2, 3))
    rig.send(one, three, *(rig.world.put(f"k{n}", "AT", "1") for n in range(60)), two)
    rig.settle()
    rig.world.archive()
    expired, fetch = rig.world.log(), RecordSource.fetch

    def noted(source: RecordSource, partition: int, offsets: Iterable[int]) -> list[Record]:
        found = fetch(source, partition, offsets)
        fetched.extend(record.offset for record in found)
        return found

    monkeypatch.setattr(RecordSource, "fetch", noted)
    monkeypatch.setattr(deriver_module, "_PART_CHANGES", 3)
    with connect_views(rig.world.config.views_dsn) as connection:
        control = Control(connection, rig.world.config.views.schema_name)
        assert control.trim("ordr", 1, rig.world.ends()) == 1
        forget(rig.world.config, rig.world.topic)
        ask_rebuild(control, name)

    def place() -> tuple[int | None, dict[int, int]]:
        note = rig.derivers[name]._note or DerivedNote()
        return note.published, note.versions.get(2, {})

    restarts = 0
    while place()[0] != 2:
        rig.derivers[name].step()
        before = place()
        while place() == before and before[0] != 2:
            rig.derivers[name].step()
        rig.restart(name)
        rig.derivers[name].step()
        restarts += 1
    assert restarts > 3
    assert fetched
    rig.send(*some(rig, 5))
    rig.settle()
    check_patches(rig, rig.read(name), expired)


def test_readers_go_on_behind_a_commit_whose_markers_come_later(
    patches: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = patches
    rig.send(*some(rig, 20))
    rig.settle()
    offsets = rig.derivers["order_patches"]._offsets
    stable_ends = offsets.stable_ends

    def early(topics: Iterable[str]) -> Ends:
        """The stable ends that a broker gives while the newest transaction is being decided."""
        found = stable_ends(topics)
        return {p: max(0, at - 3) if ".derived." in p[0] else at for p, at in found.items()}

    monkeypatch.setattr(offsets, "stable_ends", early)
    with DerivedReader(rig.world.config, "order_patches") as reader:
        known = list(reader.records(idle_s=0.5))
        rig.world.archive()
        with connect_views(rig.world.config.views_dsn) as connection:
            ask_rebuild(Control(connection, rig.world.config.views.schema_name), "order_patches")
        rig.send(*some(rig, 20, first=20))
        rig.settle()
        rig.send(*some(rig, 5, first=40))
        rig.settle()
        known += reader.records(idle_s=0.6)
    assert known[-1].topic_version == 2
    check_patches(rig, known)


def test_a_proof_waits_for_the_markers_of_the_newest_commit(
    patches: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches.send(*some(patches, 20))
    patches.settle()
    stable_ends, asked = Offsets.stable_ends, list[str]()

    def early(offsets: Offsets, topics: Iterable[str]) -> Ends:
        """The stable ends that a broker gives while the newest transaction is being decided."""
        found = stable_ends(offsets, topics)
        asked.extend({topic for topic, _ in found if ".derived." in topic})
        late = 2 if len(asked) < 3 else 0
        return {p: max(0, at - late) if ".derived." in p[0] else at for p, at in found.items()}

    monkeypatch.setattr(Offsets, "stable_ends", early)
    _, _, spans = _stand(patches.world.config, "order_patches")
    assert len(asked) == 3
    topic = TopicNames(patches.world.config.log.prefix).derived("order_patches", 1)
    with Offsets(patches.world.config) as offsets:
        ends = offsets.high_watermarks([topic])
    assert {(topic, part): span.end for part, span in spans.items()} == ends


@pytest.mark.full
def test_a_topic_that_is_declared_later_has_all_changes_from_the_first_one(
    config: Config, spark: SparkSession
) -> None:
    with closing(Rig(config, spark)) as rig:
        one, two, three = (rig.world.put("g", "AT", str(n)) for n in (1, 2, 3))
        # The third waits for the second: it is accepted behind it.
        rig.send(*some(rig, 20), one, three, two)
        drain(rig.keeper)
        rig.world.archive()
        expired = rig.world.log()
        forget(config, rig.world.topic)
        rig.send(*some(rig, 12, first=20))
        rig.derivers["late"] = rig.deriver(rig.world.app.derive("late", patch_of("ordr")))
        rig.settle()
        check_patches(rig, rig.read("late"), expired)


def test_notices_and_triggers(config: Config, spark: SparkSession) -> None:
    rig = Rig(config, spark, ("moved", notices_of("ordr")), when=when("country").changes(to="DE"))
    with closing(rig):
        rig.send(*some(rig, 40))
        rig.settle()
        found = rig.read("moved")
        wanted = {
            (m["key"], m["version"])
            for messages in accepted(rig.world.log()).values()
            for m in messages
            if m["originalEntityState"] is not None
            and (m["currentEntityState"] or {}).get("country") == "DE"
            and m["originalEntityState"]["country"] != "DE"
        }
        assert {(r.key, r.version) for r in found} == wanted
        assert wanted
        for record in found:
            assert record.value["key"] == record.key
            assert record.value["old"]["country"] != "DE"
            assert record.value["new"]["country"] == "DE"


class Scan(BaseModel):
    scan_id: str
    order: str | None = None


def scans_world(config: Config, spark: SparkSession) -> tuple[Rig, World]:
    """Orders, and a stream of scans that name an order."""
    rig = Rig(config, spark)
    app = rig.world.app
    app.entity("scan", key="scan_id", source="log")(Scan)
    rig.keeper.close()
    rig.keeper = rig.world.keeper()
    declared = app.derive("scans", joined("scan", to="ordr", on="order"))
    rig.derivers["scans"] = rig.deriver(declared)
    return rig, World(config, spark, app, "scan")


def test_a_joined_stream_has_each_entity_as_it_was_and_a_batch_finds_the_same(
    config: Config, spark: SparkSession
) -> None:
    rig, scans = scans_world(config, spark)
    world, deriver = rig.world, rig.derivers["scans"]
    with closing(rig):
        late = world.put("b", "AT", "1")
        rig.send(world.put("a", "AT", "1"))
        scans.send(scans.change("s1", Scan(scan_id="s1", order="a")))
        scans.send(
            scans.change("s2", Scan(scan_id="s2", order="b")),
            scans.change("s3", Scan(scan_id="s3")),
        )
        # The orders' history does not have what the log has: the records wait for it.
        assert sum(deriver.step() for _ in range(3)) == 0
        rig.keeper.step()
        while len(rig.read("scans") if deriver._note and deriver._note.published else []) < 3:
            rig.keeper.step()
            deriver.step()
        rig.send(late, world.put("a", "DE", "2"))
        drain(rig.keeper)
        world.occurred_hours = -1
        scans.occurred_hours = -2
        scans.send(scans.change("s4", Scan(scan_id="s4", order="a")))
        scans.occurred_hours = 0
        scans.send(scans.change("s5", Scan(scan_id="s5", order="a")))
        while len(found := by_key(rig.read("scans"))) < 5:
            drain(rig.keeper)
            deriver.step()
        joins = {key: (r[0].value["joined"] or {}).get("version") for key, r in found.items()}
        assert joins == {"s1": 1, "s2": 0, "s3": None, "s4": 0, "s5": 2}
        assert found["s5"][0].value["ordr"]["country"] == "DE"
        assert found["s5"][0].value["scan"] == {"scan_id": "s5", "order": "a"}
        world.archive()
        scans.archive()
        report = verify_topic(spark, config, world.app, world.app.derivations["scans"])
        assert report.holds, report
        assert (report.expected_rows, report.kept_rows) == (5, 5)


def test_a_scan_that_was_read_while_another_waits_waits_for_its_own_flight(
    config: Config, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, scans = scans_world(config, spark)
    world, derived_scans = rig.world, rig.derivers["scans"]

    def read(count: int) -> None:
        while sum(each.waiting for each in derived_scans._readers.values()) < count:
            assert derived_scans.step() == 0

    with closing(rig):
        rig.send(world.put("a", "AT", "1"))
        behind = world.ends()
        scans.send(scans.change("s1", Scan(scan_id="s1", order="a")))
        read(1)
        rig.send(world.put("a", "DE", "2"))
        scans.send(scans.change("s2", Scan(scan_id="s2", order="a")))
        read(2)
        drain(rig.keeper)
        with monkeypatch.context() as patched:
            # As while the orders are kept more slowly than the scans.
            patched.setattr(DERIVER_READS_HISTORY, lambda *_: behind)
            assert [derived_scans.step() for _ in range(4)] == [1, 0, 0, 0]
        assert [derived_scans.step() for _ in range(2)] == [1, 0]
        found = by_key(rig.read("scans"))
        assert {key: r[0].value["joined"]["version"] for key, r in found.items()} == {
            "s1": 2,
            "s2": 2,
        }


def test_the_proof_of_a_topic_finds_what_is_lost_doubled_or_wrong(patches: Rig) -> None:
    rig = patches
    rig.send(*some(rig, 30))
    rig.settle()
    rig.world.archive()
    declared = rig.declared[0]
    config, app = rig.world.config, rig.world.app
    report = verify_topic(rig.world.spark, config, app, declared)
    assert report.holds, report
    assert report.kept_rows == report.expected_rows == 30
    topic = TopicNames(config.log.prefix).derived("order_patches", 1)
    with Consumer(config) as consumer:
        (first, *_) = consumer.read_topic(topic)
    spoilt = OutRecord(
        topic, first.key, b'[{"op":"replace","path":"","value":1}]', first.headers, first.partition
    )
    rig.send(spoilt)
    wrong = verify_topic(rig.world.spark, config, app, declared)
    assert not wrong.holds
    assert any("2 records" in (each.kept or "") for each in wrong.differences)
    assert any("the patch is wrong" in each.key for each in wrong.differences)


def test_a_topic_is_not_compared_with_an_archive_that_lacks_the_first_changes(
    patches: Rig,
) -> None:
    rig = patches
    rig.send(*some(rig, 20))
    rig.settle()
    forget(rig.world.config, rig.world.topic)
    rig.send(*some(rig, 5, first=20))
    rig.settle()
    rig.world.archive()
    report = verify_topic(rig.world.spark, rig.world.config, rig.world.app, rig.declared[0])
    assert report.outcome == "not compared"
    assert report.not_compared == ("ordr: its archive lacks the first changes of the log",)


def test_the_proof_of_a_topic_finds_versions_of_a_key_in_another_order(spark: SparkSession) -> None:
    declared = Derivation("notices", notices_of("ordr"))

    def wrong(*found_at: int) -> list[str]:
        rows = []
        for version, at in enumerate(found_at, 1):
            message = f'{{"id":"i{version}","kind":"updated","provenance":{{}},"version":{version},'
            message += '"originalEntityState":1,"currentEntityState":2}'
            change = (f"k{version % 2}", version, b"k", message.encode(), 0, version)
            record = (b'{"key":"k%d","old":1,"new":2}' % (version % 2), at, b"k", version)
            rows.append((*change, *record, f"i{version}", "updated", "{}"))
        beside = spark.createDataFrame(
            rows,
            "key string, version long, raw_key binary, raw_value binary, partition int, "
            "offset long, found binary, found_at long, found_key binary, found_version long, "
            "found_id string, found_kind string, found_provenance string",
        )
        return [each.key for each in _judge(beside, declared, False)[0]]

    assert wrong(10, 11, 12, 13) == []
    assert wrong(12, 11, 13, 10) == ["k0: out of order"], "keys may come in any order"


@pytest.mark.full
def test_a_topic_that_was_dropped_and_is_declared_again_begins_anew(patches: Rig) -> None:
    rig = patches
    rig.send(*some(rig, 12))
    rig.settle()
    config = rig.world.config
    with connect_views(config.views_dsn) as connection:
        control = Control(connection, config.views.schema_name)
        retire_topics(control, {})
        drop(control, "order_patches")
    forget_topic(config, "order_patches")
    with pytest.raises(NotFound):
        rig.read("order_patches")
    rig.world.archive()
    rig.restart("order_patches")
    rig.send(*some(rig, 8, first=12))
    rig.settle()
    check_patches(rig, rig.read("order_patches"))
