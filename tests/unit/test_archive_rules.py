"""Rules of the archive that need no server: notes, ledger rows, tiling, fair spans, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from py4j.protocol import Py4JNetworkError

from everstate.archive import AddedFile, Commit, CommitNote, CommittedRange, LedgerRow
from everstate.archive.ledger import ledger_rows
from everstate.config import load
from everstate.errors import (
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
from everstate.log.positions import Range
from everstate.pipeline.archiving.audit import tiling_problems
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


def test_a_note_survives_the_commit() -> None:
    assert CommitNote.from_json(NOTE.to_json()) == NOTE


@pytest.mark.parametrize("text", [None, "", "x", "[]", "{}", '{"everstate":1}', '{"other":{}}'])
def test_metadata_of_others_is_no_note(text: str | None) -> None:
    assert CommitNote.from_json(text) is None


def test_c26_a_commit_gives_a_ledger_row_for_each_range_with_its_rows() -> None:
    files = (
        AddedFile("a", 100, 8, 1, partition=0, offset_min=11, offset_max=19),
        AddedFile("b", 100, 5, 0, partition=1, offset_min=0, offset_max=4),
    )
    commit = Commit(7, NOW, "WRITE", NOTE.to_json(), files, 0)
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
        ("java.lang.Error: odd", PipelineError),
    ],
)
def test_errors_of_spark_are_told_as_ours(text: str, error: type[EverstateError]) -> None:
    assert type(translate(RuntimeError(text), "archiving x")) is error


def test_a_jvm_that_is_gone_is_not_waited_for() -> None:
    assert not translate(Py4JNetworkError("gone"), "archiving x").retryable
    assert not translate(ConnectionRefusedError(), "archiving x").retryable


def test_settings_that_carry_a_guarantee_cannot_be_changed() -> None:
    config = load(".", pipeline={"options": {"spark.speculation": "true"}})
    with pytest.raises(InvalidConfig, match=r"spark\.speculation"):
        session_settings(config)


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition", "kafka.group.id"])
def test_c12_options_of_the_reader_are_refused(name: str) -> None:
    """They would cut a partition's range in pieces, or share its consumers."""
    with pytest.raises(InvalidConfig, match=name):
        session_settings(load(pipeline={"options": {name: "8"}}))
