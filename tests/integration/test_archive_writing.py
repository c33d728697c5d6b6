"""The archive: each record once, byte for byte, and the position in the commit (law 5, C25)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import duckdb
import pytest

from archive_cases import ORDER, Shop, change
from everstate.archive import ArchiveLog, ArchiveReader, Ledger
from everstate.changes import Kind
from everstate.errors import (
    ArchiveError,
    DataLoss,
    Fenced,
    LogIdentityChanged,
    LogTruncated,
    TopicResized,
)
from everstate.log.consumer import Consumer
from everstate.log.record import OutRecord, Record
from everstate.pipeline.archiving.audit import audit
from kit.served_s3 import each_lake_in_full
from log_cases import forget, grow, lose_records

pytestmark = each_lake_in_full


def archived(shop: Shop) -> list[dict[str, Any]]:
    rows = shop.table().to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


def served(shop: Shop) -> list[Record]:
    consumer = Consumer(shop.config)
    ends = shop.offsets.stable_ends([shop.topic])
    return [
        record
        for (topic, partition), end in sorted(ends.items())
        for record in consumer.read(topic, partition, 0, end)
    ]


def test_every_record_is_archived_once_and_byte_for_byte(shop: Shop) -> None:
    count = shop.write_orders(keys=40, versions=3)
    batch = shop.archiver().step()
    assert batch is not None
    assert (batch.rows, batch.unreadable, batch.epoch, batch.caught_up) == (count, 0, 1, True)
    assert shop.archiver().step() is None
    rows = archived(shop)
    records = served(shop)
    assert len(rows) == len(records) == count
    for row, record in zip(rows, records, strict=True):
        assert (row["partition"], row["offset"]) == (record.partition, record.offset)
        assert (row["raw_key"], row["raw_value"]) == (record.key, record.value)
        headers = [(h["key"], h["value"]) for h in row["raw_headers"]]
        assert headers == list(record.headers)
        assert round(row["timestamp"].timestamp() * 1000) == record.timestamp_ms
    first = next(row for row in rows if row["version"] == 2)
    assert first["current"]["amount"] == 2
    assert first["original"]["amount"] == 1
    assert first["provenance"]["serviceName"] == "shop"


def test_c25_a_new_archiver_goes_on_where_the_table_says(shop: Shop) -> None:
    shop.write_orders(keys=10, versions=1)
    shop.archiver().step()
    shop.write_orders(keys=10, versions=2, first=2)
    small = shop.archiver(batch_changes_max=7)
    assert small.catch_up() == 20
    assert len(archived(shop)) == 30
    commits = list(ArchiveLog(shop.config, "order").commits())
    epochs = [commit.note.epoch for commit in commits if commit.note]
    assert epochs == list(range(len(epochs)))
    assert all(sum(r.end - r.start for r in c.note.ranges) <= 9 for c in commits[2:] if c.note)
    assert ArchiveReader(shop.config, "order").position() == {
        1: {p: end for (_, p), end in shop.offsets.stable_ends([shop.topic]).items()}
    }


def test_c25_two_archivers_the_second_is_fenced_and_writes_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.write_orders(keys=10, versions=1)
    slow, quick = shop.archiver(), shop.archiver()
    slow.step()
    shop.write_orders(keys=10, versions=1, first=2)
    ends: Callable[[], dict[int, int]] = slow._ends

    def overtaken() -> dict[int, int]:
        """The other one commits after this one has read the position."""
        monkeypatch.setattr(slow, "_ends", ends)
        assert quick.step() is not None
        return ends()

    monkeypatch.setattr(slow, "_ends", overtaken)
    with pytest.raises(Fenced, match="another process"):
        slow.step()
    assert len(archived(shop)) == 20


def test_unreadable_records_are_archived_with_their_reason(shop: Shop) -> None:
    good = shop.record(change("a", 1))
    shop.write(
        [
            good,
            OutRecord(topic=shop.topic, key=b"a", value=None),
            OutRecord(topic=shop.topic, key=None, value=good.value, headers=[("h", None)]),
            OutRecord(topic=shop.topic, key=b"a", value=b"{not json", headers=[("h", b"\xff")]),
            OutRecord(topic=shop.topic, key=b"b", value=good.value),
        ]
    )
    batch = shop.archiver().step()
    assert batch is not None
    assert (batch.rows, batch.unreadable) == (5, 4)
    reasons = {row["reason"] for row in archived(shop)}
    assert reasons == {None, "tombstone", "no_key", "malformed", "key_mismatch"}
    files = ArchiveReader(shop.config, "order").files()
    assert (sum(f.rows for f in files), sum(f.unreadable for f in files)) == (5, 4)
    by_reason = {row["reason"]: row for row in archived(shop)}
    assert by_reason["tombstone"]["raw_value"] is None
    assert by_reason["malformed"]["raw_headers"] == [{"key": "h", "value": b"\xff"}]
    assert by_reason["no_key"]["raw_headers"] == [{"key": "h", "value": None}]


def test_c5_aborted_transactions_are_not_archived(shop: Shop) -> None:
    shop.transact([shop.record(change(f"k{i}", 1)) for i in range(20)], commit=False)
    shop.transact([shop.record(change(f"k{i}", 1)) for i in range(20)], commit=True)
    shop.transact([shop.record(change("x", 1))], commit=False)
    batch = shop.archiver().step()
    assert batch is not None
    assert batch.rows == 20
    assert batch.caught_up


def test_c8_a_topic_made_again_is_refused(shop: Shop) -> None:
    shop.write_orders(keys=4, versions=1)
    shop.archiver().step()
    shop.topics.delete([shop.topic])
    shop.topics.create(shop.topic, 3, {})
    shop.write_orders(keys=40, versions=1)
    with pytest.raises(LogIdentityChanged, match="Nothing was read or written"):
        shop.archiver().step()
    assert len(archived(shop)) == 4


def test_c8_offsets_that_were_deleted_before_they_were_read_are_data_loss(shop: Shop) -> None:
    shop.write_orders(keys=30, versions=1)
    shop.archiver().step()
    shop.write_orders(keys=30, versions=1, first=2)
    end = shop.offsets.stable_ends([shop.topic])[shop.topic, 0]
    forget(shop.config, shop.topic, {0: end - 1})
    assert shop.offsets.beginnings([shop.topic])[shop.topic, 0] == end - 1
    with pytest.raises(DataLoss, match="no record was skipped"):
        shop.archiver().step()
    assert len(archived(shop)) == 30


def test_v12_a_topic_that_got_partitions_is_refused_and_the_audit_names_them(shop: Shop) -> None:
    shop.write_orders(keys=20, versions=1)
    archiver = shop.archiver()
    archiver.step()
    grow(shop.config, shop.topic, 5)
    shop.write([shop.record(change("new", 1), partition=4)])
    for each in (archiver, shop.archiver()):
        with pytest.raises(TopicResized, match="has 5 partitions; the stored positions belong to"):
            each.step()
    report = audit(shop.spark, shop.config, "order")
    assert {problem.rule for problem in report.problems} == {"not read"}
    assert (
        f"{shop.topic}[4] was added after the last read, and its 1 offsets were not read"
        in report.not_read
    )
    assert report.compared_with_log == report.rows == 20


def test_c8_a_log_that_lost_its_end_is_data_loss_and_the_audit_finds_what_it_took_since(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.write([shop.record(change("a", version)) for version in range(1, 8)])
    shop.archiver().step()
    lose_records(monkeypatch, shop.config, shop.topic)
    shop.write([shop.record(change("a", 8)), shop.record(change("a", 9))])
    with pytest.raises(LogTruncated, match=r"ends at 2, and offsets 2 to 6 are lost"):
        shop.archiver().step()
    report = audit(shop.spark, shop.config, "order")
    assert any("ends at 2: the log has lost offsets 2 to 6" in each for each in report.not_read)
    assert {problem.rule for problem in report.problems} == {"not read", "differs"}
    # The log grows past the position, and no end says any more that something was lost.
    shop.write([shop.record(change("a", version)) for version in range(10, 20)])
    assert shop.archiver().catch_up() == 5
    report = audit(shop.spark, shop.config, "order")
    (differs,) = [problem for problem in report.problems if problem.rule == "differs"]
    assert differs.count == 7


def test_c8_an_archive_that_lags_half_the_retention_raises_it(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    import time

    shop.topics.set_config(shop.topic, {"retention.ms": "3600000"})
    old = int(time.time() * 1000) - 45 * 60_000
    shop.write([shop.record(change("a", 1), timestamp_ms=old)])
    with caplog.at_level(logging.WARNING, "everstate.archive"):
        shop.archiver().step()
    assert "more than half the retention" in caplog.text
    assert shop.topics.config(shop.topic)["retention.ms"] == "7200000"


def test_c25_a_table_whose_commits_do_not_say_where_it_is_is_refused(shop: Shop) -> None:
    shop.write_orders(keys=4, versions=1)
    shop.archiver().step()
    log = shop.folder / "_delta_log"
    for commit in log.glob("*.json"):
        shop.replace(f"_delta_log/{commit.name}", b"everstate", b"elsewhere")
    for checksum in log.glob(".*.json.crc"):
        checksum.unlink()
    with pytest.raises(ArchiveError, match="has its position"):
        shop.archiver().step()


@pytest.mark.full
def test_c26_the_ledger_is_the_same_however_often_it_is_filled(shop: Shop) -> None:
    log, ledger = ArchiveLog(shop.config, "order"), Ledger(shop.config, "order")
    assert ledger.sync(log) == 0
    for version in (1, 2, 3):
        shop.write_orders(keys=9, versions=1, first=version)
        shop.archiver().step()
        ledger.sync(log)
    assert ledger.sync(log) == 0
    rows = ledger.rows()
    assert sum(row.rows for row in rows) == 27
    (ends,) = ArchiveReader(shop.config, "order").position().values()
    for partition, end in ends.items():
        assert max(row.end for row in rows if row.partition == partition) == end
        brought = ledger.brought(1, partition, end - 1)
        assert brought is None if end == 0 else brought in rows
    assert ledger.brought(1, 0, ends[0]) is None
    assert ledger.newest() == max(row.commit_version for row in rows)
    shutil.rmtree(shop.lake.folder / "_ledger" / "order")
    assert ledger.sync(log) == len(rows)
    assert ledger.rows() == rows


def test_explain_finds_file_and_commit_of_an_offset_and_the_changes_of_a_key(shop: Shop) -> None:
    shop.write_orders(keys=9, versions=2)
    shop.archiver().step()
    reader = ArchiveReader(shop.config, "order")
    columns = ["version", "partition", "offset", "generation"]
    found = reader.changes_of("o3", columns).records.to_pylist()
    assert [row["version"] for row in found] == [1, 2]
    place = reader.locate(1, found[1]["partition"], found[1]["offset"])
    assert place is not None
    path, row = place
    assert (row.commit_version, row.epoch) == (1, 1)
    assert any(file.path == path for file in reader.files())
    assert reader.locate(1, 0, 10_000) is None
    with pytest.raises(ArchiveError, match="no archive yet"):
        ArchiveReader(shop.config, "nothing").files()


@pytest.mark.full
def test_programs_that_know_nothing_of_us_read_the_same_counts(shop: Shop) -> None:
    shop.write_orders(keys=20, versions=2)
    shop.write([shop.record(change("o1", 3, Kind.DELETED))])
    shop.archiver().step()
    assert ORDER.name == "order"
    plain = shop.table().to_pyarrow_dataset()
    assert plain.count_rows() == 41
    with duckdb.connect() as duck:
        duck.register("orders", plain)
        query = "SELECT kind, count(*), sum(current.amount) FROM orders GROUP BY kind ORDER BY kind"
        assert duck.execute(query).fetchall() == [
            ("created", 20, 20),
            ("deleted", 1, None),
            ("updated", 20, 40),
        ]
