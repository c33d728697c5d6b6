"""Compaction changes no row, and a topic made again from the archive is the same bytes."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from archive_cases import ORDER, Shop, change
from everstate.archive import ArchiveReader, table_path
from everstate.archive.sums import summed
from everstate.changes import Kind
from everstate.cli import cli
from everstate.errors import ArchiveError, LogError
from everstate.log.consumer import Consumer
from everstate.log.record import OutRecord, Record
from everstate.pipeline.archiving.audit import audit
from everstate.pipeline.archiving.compact import compact
from everstate.pipeline.archiving.replay import replay
from everstate.pipeline.archiving.selection import Selection, replay_to_topic
from kit.served_s3 import each_lake_in_full

pytestmark = each_lake_in_full


def digest(shop: Shop, topic: str) -> list[str]:
    """One hash a partition over partition, order, key, value, headers and timestamp."""
    digests = []
    with Consumer(shop.config) as consumer:
        for (_, partition), end in sorted(shop.offsets.stable_ends([topic]).items()):
            hashed = hashlib.sha256()
            for record in consumer.read(topic, partition, 0, end):
                parts = (record.key, record.value, record.headers, record.timestamp_ms)
                hashed.update(repr(parts).encode())
            digests.append(hashed.hexdigest())
    return digests


def contents(shop: Shop) -> list[tuple[Any, ...]]:
    table = shop.table().to_pyarrow_table()
    columns = ("partition", "offset", "raw_key", "raw_value", "version", "reason")
    return sorted(tuple(row[name] for name in columns) for row in table.to_pylist())


@pytest.mark.full
def test_compaction_leaves_rows_and_position_and_the_audit_holds(shop: Shop) -> None:
    for version in (1, 2, 3):
        shop.write_orders(keys=12, versions=1, first=version)
        shop.archiver().step()
    before, position = contents(shop), ArchiveReader(shop.config, "order").position()
    done = compact(shop.spark, shop.config, "order")
    assert done.clustered
    assert done.files_before > done.files_after == 1
    assert contents(shop) == before
    assert ArchiveReader(shop.config, "order").position() == position
    shop.write_orders(keys=12, versions=1, first=4)
    assert shop.archiver().catch_up() == 12
    again = compact(shop.spark, shop.config, "order")
    assert not again.clustered
    report = audit(shop.spark, shop.config, "order", against_log=True)
    assert report.problems == []
    assert (report.rows, report.compared_with_log) == (48, 48)
    with pytest.raises(ArchiveError, match="no archive of nothing yet"):
        compact(shop.spark, shop.config, "nothing")


def test_c25_an_archive_that_was_idle_until_delta_cleaned_its_log_goes_on_by_the_ledger(
    shop: Shop,
) -> None:
    for version in (1, 2):
        shop.write_orders(keys=12, versions=1, first=version)
        shop.archiver().step()
    position = ArchiveReader(shop.config, "order").position()
    compact(shop.spark, shop.config, "order")
    # What Delta does after 30 days: a checkpoint, and no commit before it.
    table = shop.table()
    table.create_checkpoint()
    log = shop.folder / "_delta_log"
    for commit in log.glob("*.json"):
        if int(commit.stem) < table.version():
            commit.unlink()
            commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)
    assert ArchiveReader(shop.config, "order").position() == position
    shop.write_orders(keys=12, versions=1, first=3)
    assert shop.archiver().catch_up() == 12
    report = audit(shop.spark, shop.config, "order", against_log=True)
    assert report.problems == []
    assert report.rows == 36


def test_appends_go_on_beside_a_compaction(shop: Shop) -> None:
    shop.write_orders(keys=12, versions=1)
    shop.archiver().step()
    failures: list[BaseException] = []
    stop = threading.Event()

    def compact_until_stopped() -> None:
        try:
            while not stop.is_set():
                compact(shop.spark, shop.config, "order", cluster=True)
        except BaseException as error:
            failures.append(error)

    beside = threading.Thread(target=compact_until_stopped)
    beside.start()
    archiver = shop.archiver()
    try:
        for version in range(2, 6):
            shop.write_orders(keys=12, versions=1, first=version)
            archiver.step()
    finally:
        stop.set()
        beside.join(120)
    assert failures == []
    report = audit(shop.spark, shop.config, "order")
    assert report.problems == []
    assert report.rows == 60


def test_replay_is_byte_identical_with_tombstones_headers_and_null_keys(shop: Shop) -> None:
    good = shop.record(change("a", 1))
    shop.write_orders(keys=20, versions=2)
    shop.transact([shop.record(change("z", 1))], commit=False)
    shop.write(
        [
            shop.record(change("o3", 3, Kind.DELETED), timestamp_ms=1_357_000_000_123),
            OutRecord(topic=shop.topic, key=b"o3", value=None),
            OutRecord(topic=shop.topic, key=None, value=b"\xff\x00", headers=[("h", None)]),
            OutRecord(topic=shop.topic, key=b"", value=b"", headers=[("h", b"1"), ("h", b"\xfe")]),
            OutRecord(topic=shop.topic, key=b"q", value=good.value, partition=2),
        ]
    )
    shop.archiver().catch_up()
    # An idle archive: the next compaction replaces its files, which are deleted seven days later.
    compact(shop.spark, shop.config, "order")
    shop.table().vacuum(0, dry_run=False, enforce_retention_duration=False)
    target = f"{shop.topic}.again"
    done = replay(shop.spark, shop.config, "order", target)
    try:
        assert (done.records, done.partitions) == (45, 3)
        assert digest(shop, target) == digest(shop, shop.topic)
        with pytest.raises(LogError, match="is not empty"):
            replay(shop.spark, shop.config, "order", target)
    finally:
        shop.topics.delete([target])
    shop.topics.create(f"{target}.small", 2, {})
    with pytest.raises(LogError, match="has 2 partitions"):
        replay(shop.spark, shop.config, "order", f"{target}.small")
    shop.topics.delete([f"{target}.small"])


@pytest.mark.full
def test_a_selected_part_is_the_same_bytes_also_in_another_number_of_partitions(shop: Shop) -> None:
    def written(topic: str) -> list[Record]:
        with Consumer(shop.config) as consumer:
            return list(consumer.read_topic(topic))

    def by_key(records: list[Record], *, placed: bool) -> dict[Any, list[tuple[Any, ...]]]:
        found: dict[Any, list[tuple[Any, ...]]] = {}
        for each in records:
            place = each.partition if placed else None
            what = (place, each.key, each.value, each.headers, each.timestamp_ms)
            found.setdefault(each.key, []).append(what)
        return found

    odd = [("h", b"\xfe"), ("h", None), ("h", b"")]
    shop.write_orders(keys=8, versions=3)
    shop.write(
        [
            shop.record(change("o3", 4), headers=odd, timestamp_ms=1_357_000_000_123),
            OutRecord(shop.topic, b"o3", None, odd, timestamp_ms=1),
            OutRecord(shop.topic, b"\xff", b"no json \xff"),
        ]
    )
    shop.archiver().catch_up()
    log = written(shop.topic)
    mine = [each for each in log if each.key == b"o3" and each.value is not None]
    for name, selection, wanted in (("o3", Selection(key="o3"), mine), ("all", Selection(), log)):
        for partitions in (3, 5):
            target = f"{shop.topic}.{name}.{partitions}"
            shop.topics.create(target, partitions, {})
            done = replay_to_topic(shop.config, "order", selection, target)
            assert (done.records, done.restamped) == (len(wanted), 0)
            found = written(target)
            is_same = partitions == 3
            assert by_key(found, placed=is_same) == by_key(wanted, placed=is_same)
            assert len({(each.key, each.partition) for each in found}) == len(
                by_key(found, placed=False)
            )
            shop.topics.delete([target])


@pytest.mark.full
def test_the_verbs_tell_what_they_did_as_tables_and_as_json(shop: Shop, tmp_path: Path) -> None:
    shop.write_orders(keys=12, versions=2)
    shop.archiver().step()
    assert ORDER.name == "order"
    config, url = shop.config, shop.config.s3_endpoint
    (tmp_path / "everstate.toml").write_text(
        f'[log]\nbootstrap_servers = "{config.bootstrap_servers}"\nprefix = "{config.log.prefix}"\n'
        f'[store]\ndsn = "{config.store_dsn}"\n[archive]\npath = "{config.archive_path}"\n'
        + (f'[archive.s3]\nendpoint = "{url}"\npath_style = true\n' if url else "")
    )

    def verb(*words: str, code: int = 0) -> str:
        group = [] if words[0] == "replay" else ["archive"]
        result = CliRunner().invoke(cli, ["-C", str(tmp_path), *group, *words])
        assert result.exit_code == code, result.output
        return result.stdout

    (report,) = orjson.loads(verb("verify", "order", "--json"))
    assert (report["holds"], report["rows"], report["keys"]) == (True, 24, 12)
    assert "markers" in verb("verify", "order")
    files = orjson.loads(verb("files", "order", "--json"))
    assert sum(file["rows"] for file in files["files"]) == 24
    assert files["position"]["1"]
    assert "part-" in verb("files", "order")
    (done,) = orjson.loads(verb("compact", "order", "--json"))
    assert (done["files_after"], done["clustered"]) == (1, True)
    target = f"{shop.topic}.verb"
    assert orjson.loads(verb("replay", "order", "--to", target, "--json"))["records"] == 24
    assert digest(shop, target) == digest(shop, shop.topic)
    some = ("replay", "order", "--key", "o3", "--by", "actor=ann")
    assert [part["records"] for part in orjson.loads(verb(*some, "--dry-run", "--json"))] == [2]
    verb(*some, "--to", target, code=1)
    assert orjson.loads(verb(*some, "--to", target, "--append", "--json"))["records"] == 2
    verb(*some, "--to", shop.topic, "--append", code=1)
    verb(*some, "--file", str(tmp_path / "o3.jsonl"))
    lines = (tmp_path / "o3.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["version"] for line in lines] == [1, 2]
    verb("replay", "order", code=2)
    shop.topics.delete([target])
    with summed(table_path(config, "order")):
        shop.table().delete("partition = 0 AND offset = 0")
    verb("verify", "order", code=8)
