"""Rules of the archive that need no server: notes, ledger rows, tiling, fair spans, errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError

from everstate.archive import ArchiveFile, Commit, CommitNote, CommittedRange, LedgerRow
from everstate.archive.ledger import ledger_rows
from everstate.config import load
from everstate.errors import (
    ArchiveDamaged,
    ArchiveError,
    ArchiveFull,
    DataLoss,
    EverstateError,
    Fenced,
    InvalidConfig,
    PipelineError,
    PositionMoved,
    Unavailable,
)
from everstate.log.client import READ_COMMITTED
from everstate.log.positions import Range
from everstate.log.record import LOG_APPEND_TIME, Record
from everstate.pipeline.archiving.audit import tiling_problems
from everstate.pipeline.archiving.audit_offsets import PieceResult, _compare, _Proofs
from everstate.pipeline.spark.session import session_settings, translate
from everstate.pipeline.spark.source import fair_spans

NOTE = CommitNote(
    entity="order",
    epoch=2,
    writer="w",
    ranges=(CommittedRange(1, 0, 10, 20), CommittedRange(1, 1, 0, 5)),
    positions={1: {0: 20, 1: 5}},
    topics={1: ("cluster", "topic")},
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def row(version: int, partition: int, start: int, end: int) -> LedgerRow:
    return LedgerRow(
        version, NOW, version, 1, partition, start, end, end - start, 0, None, "c", "t"
    )


def test_a_note_survives_the_commit_in_the_form_that_archives_have() -> None:
    written = (
        '{"everstate":{"entity":"order","epoch":2,"writer":"w","ranges":['
        '{"generation":1,"partition":0,"start":10,"end":20},'
        '{"generation":1,"partition":1,"start":0,"end":5}],'
        '"positions":{"1":{"0":20,"1":5}},"topics":{"1":["cluster","topic"]}}}'
    )
    assert NOTE.to_json() == written
    assert CommitNote.from_json(written) == NOTE


def test_a_note_that_lacks_a_part_is_never_passed_over() -> None:
    with pytest.raises(ValueError, match="entity"):
        CommitNote.from_json('{"everstate":{"ranges":[]}}')


@pytest.mark.parametrize("text", [None, "", "x", "[]", "{}", '{"everstate":1}', '{"other":{}}'])
def test_metadata_of_others_is_no_note(text: str | None) -> None:
    assert CommitNote.from_json(text) is None


def test_c26_a_commit_gives_a_ledger_row_for_each_range_with_its_rows() -> None:
    files = (
        ArchiveFile("a", 100, 8, 1, 0, 0, offset_min=11, offset_max=19, key_min="a", key_max="z"),
        ArchiveFile("b", 100, 5, 0, 1, 1, offset_min=0, offset_max=4, key_min="a", key_max="z"),
    )
    commit = Commit(7, NOW, "WRITE", NOTE.to_json(), files)
    first, second = ledger_rows(commit)
    assert (first.rows, first.unreadable, first.file) == (8, 1, "a")
    assert (second.rows, second.file, second.cluster_id) == (5, "b", "cluster")
    assert ledger_rows(replace(commit, user_metadata=json.dumps({"x": 1}))) == []


def problems(*rows: LedgerRow) -> list[str]:
    ends: dict[int, dict[int, int]] = {}
    for each in rows:
        offsets = ends.setdefault(each.generation, {})
        offsets[each.partition] = max(each.end, offsets.get(each.partition, 0))
    return [p.message for p in tiling_problems(rows, replace(NOTE, positions=ends))]


def test_c26_ranges_that_tile_have_no_problem() -> None:
    assert problems(row(0, 0, 7, 7), row(1, 0, 7, 9), row(2, 0, 9, 12)) == []


def test_c26_holes_overlaps_and_forgotten_commits_are_told() -> None:
    assert problems(row(0, 0, 0, 0), row(1, 0, 2, 9)) == ["offsets 0 to 2 are in no commit"]
    assert problems(row(0, 0, 0, 0), row(1, 0, 0, 9), row(2, 0, 5, 9)) == [
        "offsets 5 to 9 are in two commits"
    ]
    assert problems(row(0, 0, 0, 0), row(2, 0, 0, 9)) == ["epochs [1] have no ranges"]
    wrong = tiling_problems([row(0, 0, 0, 0), row(1, 0, 0, 9)], NOTE)
    assert [p.message for p in wrong] == [
        "the position is 20, but the ranges end at 9",
        "the position is 5, but the ranges end at 0",
    ]


RECORD = Record("t", 0, 7, 1_700_000_000_123, b"k", b"v", (("h", b"1"), ("h", None)))


def archived(*records: Record) -> pa.Table:
    """Rows of the archive as Spark hands them to a task."""
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows: list[tuple[pa.Array[Any], str]] = [
        (pa.array([r.partition for r in records], pa.int32()), "partition"),
        (pa.array([r.offset for r in records], pa.int64()), "offset"),
        (
            pa.array([1_000 * r.timestamp_ms for r in records], pa.timestamp("us", tz="UTC")),
            "timestamp",
        ),
        (pa.array([r.timestamp_type for r in records], pa.int32()), "timestamp_type"),
        (pa.array([r.key for r in records], pa.binary()), "raw_key"),
        (pa.array([r.value for r in records], pa.binary()), "raw_value"),
        (
            pa.array(
                [[{"key": n, "value": v} for n, v in r.headers] or None for r in records], headers
            ),
            "raw_headers",
        ),
    ]
    return pa.table({name: column for column, name in rows})


@pytest.mark.parametrize(
    "change",
    [
        {"key": None},
        {"value": b""},
        {"headers": (("h", b"1"), ("h", b""))},
        {"headers": (("h", None), ("h", b"1"))},
        {"headers": ()},
        {"timestamp_ms": 1_700_000_000_124},
        {"timestamp_ms": 1_700_000_000_123_000},
        {"timestamp_type": LOG_APPEND_TIME},
    ],
    ids=str,
)
def test_the_audit_compares_every_part_of_a_record_with_the_log(change: dict[str, Any]) -> None:
    other = msgspec.structs.replace(RECORD, **change)
    for row, record in ((RECORD, other), (other, RECORD)):
        result = PieceResult(1, 0, 0)
        _compare(result, archived(row), (0, 10), iter([record]))
        assert (result.compared, result.differing, result.differing_at) == (1, 1, [7])
        same = PieceResult(1, 0, 0)
        _compare(same, archived(row), (0, 10), iter([row]))
        assert (same.compared, same.differing) == (1, 0)


@pytest.mark.parametrize(
    ("run", "log", "lost", "unproved"),
    [
        ((90, 110), (100, 200), range(100, 110), [(90, 100)]),
        ((190, 210), (100, 200), range(190, 200), [(200, 210)]),
        ((90, 210), (100, 200), range(100, 200), [(90, 100), (200, 210)]),
        ((120, 130), (100, 200), range(120, 130), []),
        ((50, 60), (100, 200), [], [(50, 60)]),
        ((250, 260), (100, 200), [], [(250, 260)]),
        ((90, 110), (0, 0), [], [(90, 110)]),
        ((90, 110), (100, 100), [], [(90, 100), (100, 110)]),
    ],
)
def test_a_missing_run_is_looked_up_in_the_log_as_far_as_the_log_has_it(
    run: tuple[int, int], log: tuple[int, int], lost: list[int], unproved: list[tuple[int, int]]
) -> None:
    def served(runs: Any, isolation: str) -> set[int]:
        at = {offset for start, end in runs for offset in range(start, end)}
        assert all(log[0] <= offset < log[1] for offset in at), isolation
        return at if isolation == READ_COMMITTED else set()

    nothing: Any = None
    proofs, result = _Proofs(nothing, "t", 0), PieceResult(1, 0, 0)
    proofs._served = served  # type: ignore[method-assign]
    proofs.prove(result, [run], log)
    assert (result.lost, result.lost_at) == (len(lost), list(lost)[:20])
    assert result.unproved_offsets == sum(end - start for start, end in unproved)
    assert (result.aborted_offsets, result.marker_offsets) == (0, 0)
    found = zip(result.run_starts, result.run_ends, result.run_kinds, strict=True)
    assert [(start, end) for start, end, kind in found if kind == "unproved"] == unproved


def test_a_batch_is_bounded_and_takes_a_fair_part_of_each_partition() -> None:
    ends = {0: 1000, 1: 10, 2: 1000, 3: 50}
    spans = fair_spans({0: 0, 1: 0, 2: 500, 3: 50}, ends, 210)
    assert spans == {1: Range(0, 10), 2: Range(500, 600), 0: Range(0, 100)}
    assert fair_spans({0: 5}, {0: 5}, 10) == {}
    assert fair_spans({}, {0: 3}, 100) == {0: Range(0, 3)}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x\nCaused by: java.io.IOException: No space left on device", ArchiveFull),
        ("[DELTA_CONCURRENT_TRANSACTION] y", Fenced),
        ("io.delta.exceptions.ConcurrentDeleteReadException: z", PositionMoved),
        ("[DELTA_FAILED_TO_MERGE_FIELDS] Failed to merge fields", ArchiveError),
        ("Some data may have been lost because they are not available", DataLoss),
        ("UnknownTopicOrPartitionException: This server does not host", DataLoss),
        ("org.apache.kafka.common.errors.TimeoutException: fetch", Unavailable),
        ("TimeoutException: Cannot fetch record for offset 5 in 30000 milliseconds", Unavailable),
        ("ChecksumException: Checksum error: file:/x.parquet at 512", ArchiveDamaged),
        ("java.lang.Error: odd", PipelineError),
    ],
)
def test_errors_of_spark_are_told_as_ours(text: str, error: type[EverstateError]) -> None:
    assert type(translate(RuntimeError(text), "archiving x")) is error


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("p.ParquetDecodingException: could not verify page integrity, CRC checksum verification "
         "failed", ArchiveDamaged),
        ("org.apache.thrift.TProtocolException: Required field 'count' was not found",
         PipelineError),
    ],
)  # fmt: skip
def test_a_file_that_spark_cannot_read_is_named(cause: str, error: type[EverstateError]) -> None:
    text = (
        "SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file "
        f"file:///lake/order/part-0.parquet.  SQLSTATE: KD001\n\tat x\nCaused by: {cause}"
    )
    found = translate(RuntimeError(text), "compacting")
    assert type(found) is error
    assert "/lake/order/part-0.parquet: " in str(found)


def test_a_jvm_that_is_gone_is_not_waited_for() -> None:
    assert not translate(Py4JNetworkError("gone"), "archiving x").retryable
    assert not translate(ConnectionRefusedError(), "archiving x").retryable


@pytest.mark.parametrize("name", ["spark.speculation", "spark.sql.files.ignoreCorruptFiles"])
def test_settings_that_carry_a_guarantee_cannot_be_changed(name: str) -> None:
    config = load(".", pipeline={"options": {name: "true"}})
    with pytest.raises(InvalidConfig, match=re.escape(name)):
        session_settings(config)


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition", "kafka.group.id"])
def test_c12_options_of_the_reader_are_refused(name: str) -> None:
    """They would cut a partition's range in pieces, or share its consumers."""
    with pytest.raises(InvalidConfig, match=name):
        session_settings(load(pipeline={"options": {name: "8"}}))
