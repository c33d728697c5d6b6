"""What the lake forgets: files that compaction replaced, and commits that Delta cleaned away."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from pydantic import BaseModel

from everstate.archive import ArchiveLog, ArchiveReader, Commit, CommitNote, Ledger, table_path
from everstate.archive.ledger import frozen
from everstate.changes import EntityType
from everstate.config import Config, load
from everstate.log.record import Record
from everstate.log.topics import TopicIdentity, TopicNames
from everstate.pipeline.archiving import archiver as archiver_module
from everstate.pipeline.archiving.archiver import Archiver
from everstate.pipeline.archiving.audit import tiling_problems
from everstate.pipeline.keeping.spans import ArchivedOffsets
from hand_archive import HandArchive


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(tmp_path, archive={"path": str(tmp_path / "lake")})


def record(offset: int) -> Record:
    value = b'{"key": "k%d", "recordedAt": "2026-01-01T00:00:00Z"}' % offset
    return Record("t", 0, offset, 1_700_000_000_000, b"k%d" % offset, value, ())


def clean(config: Config, before: int | None = None) -> None:
    """What Delta does after 30 days: a checkpoint, and no commit before it (or ``before``)."""
    table = DeltaTable(table_path(config, "order"))
    table.create_checkpoint()
    for commit in Path(table_path(config, "order"), "_delta_log").glob("*.json"):
        if int(commit.stem) < (table.version() if before is None else before):
            commit.unlink()


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_an_idle_archive_is_read_after_compaction_and_the_deletion_of_old_files(
    config: Config, is_forgotten: bool
) -> None:
    archive = HandArchive(config, "order")
    archive.begin({0: 0})
    for offset in range(5):
        archive.append([record(offset)], {0: offset + 1})
    log, ledger = ArchiveLog(config, "order"), Ledger(config, "order")
    ledger.sync(log)
    path = table_path(config, "order")
    DeltaTable(path).optimize.compact()
    deleted = DeltaTable(path).vacuum(0, dry_run=False, full=True, enforce_retention_duration=False)
    assert len(deleted) == 5
    if is_forgotten:
        clean(config)
    version, note = frozen(log, ledger)
    assert note.positions == {1: {0: 5}}
    assert DeltaTable(path, version=version).to_pyarrow_table().num_rows == 5


class Order(BaseModel):
    order_id: str


class AtHand(Archiver):
    """An archiver of a log that ends at ``end``; its appends go through delta-rs, not Spark."""

    def __init__(self, config: Config, archive: HandArchive, end: int = 0) -> None:
        self.archive, self.end = archive, end
        topic = TopicNames(config.log.prefix).changes("order")
        spark: Any = SimpleNamespace(createDataFrame=lambda *_: None)
        offsets: Any = SimpleNamespace(
            beginnings=lambda _: {(topic, 0): 0}, stable_ends=lambda _: {(topic, 0): self.end}
        )
        topics: Any = SimpleNamespace(
            names=TopicNames(config.log.prefix),
            identity=lambda _: TopicIdentity(*archive.topic, 1),
            check_identity=lambda _: None,
            config=lambda _: {},
        )
        order = EntityType("order", Order, "order_id")
        super().__init__(spark, config, order, offsets=offsets, topics=topics)

    def _append(self, rows: Any, note: CommitNote) -> Commit:
        if note.epoch == 0:
            self.archive.begin(note.positions[1])
        else:
            (span,) = note.ranges
            self.archive.append([record(o) for o in range(span.start, span.end)], {0: span.end})
        commit = self._log.last()
        assert commit is not None
        return commit


@pytest.fixture
def _no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archiver_module, "parse", lambda *_: None)
    monkeypatch.setattr(archiver_module, "read_ranges", lambda *_: None)


@pytest.mark.usefixtures("_no_spark")
def test_c26_commits_are_in_the_ledger_before_an_append_can_clean_them_away(
    config: Config,
) -> None:
    """Runs shorter than an hour with few appends, and one that writes Delta's next checkpoint."""
    archive = HandArchive(config, "order")
    for first in range(0, 20, 5):
        archiver = AtHand(config, archive)
        for archiver.end in range(first, first + 5):
            archiver.step()
    assert AtHand(config, archive, 20).step() is not None
    version = DeltaTable(table_path(config, "order")).version()
    clean(config, before=version - 2)
    log, ledger = ArchiveLog(config, "order"), Ledger(config, "order")
    ledger.sync(log)
    last = log.last()
    assert last is not None
    assert last.note is not None
    assert list(tiling_problems(ledger.rows(), last.note)) == []
    assert ArchiveReader(config, "order").begins(1) == {0: 0}
    assert ArchivedOffsets(config).of("order").is_whole


@pytest.mark.usefixtures("_no_spark")
def test_c26_the_ledger_is_filled_daily_and_after_some_appends(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(archiver_module, "_LEDGER_APPENDS", 5)
    archive = HandArchive(config, "order")
    archiver = AtHand(config, archive)
    sync = archiver._ledger.sync

    def noted(log: ArchiveLog) -> int:
        filled.append(archive.epoch)
        return sync(log)

    archiver._ledger.sync = noted  # type: ignore[method-assign]
    for archiver.end in range(1, 12):
        now[0] += 86_400 if archiver.end == 4 else 1
        archiver.step()
    assert filled == [0, 3, 8]


def test_c26_a_commit_that_was_cleaned_away_before_it_was_copied_is_told(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    archive = HandArchive(config, "order")
    archive.begin({0: 0})
    log, ledger = ArchiveLog(config, "order"), Ledger(config, "order")
    for offset in range(3):
        archive.append([record(offset)], {0: offset + 1})
    ledger.sync(log)
    for offset in range(3, 8):
        archive.append([record(offset)], {0: offset + 1})
    assert caplog.text == ""
    clean(config, before=6)
    with caplog.at_level(logging.WARNING, "everstate.archive"):
        assert ledger.sync(log) == 3
    assert "appends 4 to 5 of order" in caplog.text
    caplog.clear()
    archive.append([record(8)], {0: 9})
    assert ledger.sync(log) == 1
    assert caplog.text == ""
