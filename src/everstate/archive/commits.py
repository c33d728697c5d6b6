"""The offsets of each commit, read from the table's own log; they give the archive's position.

The position is stored nowhere else, so there is no checkpoint to lose (C25).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeAlias

import msgspec
from deltalake import DeltaTable
from pyarrow.fs import FileSystem, FileType

from everstate.archive.files import ArchiveFile
from everstate.archive.layout import app_id, archive_errors, table_path
from everstate.archive.sums import filesystem_of, is_table, table_of
from everstate.config import Config
from everstate.errors import ArchiveError

_NOTE: Final = "everstate"

Position: TypeAlias = dict[int, dict[int, int]]
"""generation → partition → next offset, exclusive."""


@dataclass(frozen=True, slots=True)
class CommittedRange:
    """Offsets ``[start, end)`` of one partition that one commit added."""

    generation: int
    partition: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNote:
    """The user metadata that everstate writes into a commit."""

    entity: str
    epoch: int
    """Number of the append; dense from 0, and also the table's transaction version."""
    writer: str
    """The process that wrote it, so that a concurrent one detects that it came second."""
    ranges: tuple[CommittedRange, ...]
    positions: Position
    topics: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """generation → cluster id and topic id to which the positions belong (C8)."""

    def to_json(self) -> str:
        """The user metadata of the commit."""
        return msgspec.json.encode({_NOTE: self}).decode()

    @classmethod
    def from_json(cls, text: str | None) -> CommitNote | None:
        """Parse user metadata; ``None`` when the commit moves no position or is not everstate's."""
        try:
            note = json.loads(text or "{}").get(_NOTE)
        except (ValueError, AttributeError):
            return None
        if not isinstance(note, dict) or "ranges" not in note:
            return None
        # Raises ValueError for a note that lacks a part: to pass over it would move the position.
        return msgspec.convert(note, cls, str_keys=True)


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the table."""

    version: int
    committed_at: datetime
    operation: str
    user_metadata: str | None
    added: tuple[ArchiveFile, ...]
    """An append writes one file for each partition."""

    @property
    def note(self) -> CommitNote | None:
        """The positions of a commit; ``None`` for compaction and commits of other programs."""
        return CommitNote.from_json(self.user_metadata)


class PositionForgotten(ArchiveError):
    """The table's log no longer has the commit with the archive's position."""


class ArchiveLog:
    """Reads the commits of one entity type's table."""

    def __init__(self, config: Config, entity: str) -> None:
        self.entity = entity
        self.path = table_path(config, entity)

    def exists(self) -> bool:
        """Whether the table was ever written."""
        with archive_errors(f"looking for the archive of {self.entity}"):
            return is_table(self.path)

    def version(self) -> int:
        """Number of the table's newest commit."""
        return int(self._table().version())

    def epoch(self) -> int | None:
        """Number of the newest append, from the table's transaction version."""
        version = self._table().transaction_version(app_id(self.entity))
        return None if version is None else int(version)

    def last(self) -> Commit | None:
        """The newest commit that moved the position; ``None`` before the first.

        Later commits without a position (compaction, other programs) are skipped. Raises
        PositionForgotten when the table has data, but its log no longer has the commit with the
        position: see :func:`everstate.archive.ledger.last_commit`. Cost: a listing and a small
        file or two.
        """
        if not self.exists():
            return None
        table = self._table()
        epoch = table.transaction_version(app_id(self.entity))
        files = self._files()
        for version in range(table.version(), -1, -1):
            commit = self._read(files, version)
            if commit is None:
                break
            note = commit.note
            if note is not None:
                if note.epoch != epoch:
                    raise ArchiveError(
                        f"archive of {self.entity}: commit {version} has epoch {note.epoch}, but "
                        f"the table's transaction has epoch {epoch}.",
                        advice="Restore the table to a version written by everstate.",
                    )
                return commit
        raise PositionForgotten(
            f"archive of {self.entity}: no commit in the table's log has its position, and the "
            "ledger beside it lacks its newest append.",
            advice="Restore the table, or the ledger beside it, from a copy.",
        )

    def commits(self, after: int = -1) -> Iterator[Commit]:
        """Commits with a version above ``after`` that the log still has, oldest first."""
        if not self.exists():
            return
        files = self._files()
        newest = self.version()
        kept = takewhile(partial(self._has, files), range(newest, after, -1))
        for version in reversed(list(kept)):
            commit = self._read(files, version)
            assert commit is not None, "it existed a moment ago"
            yield commit

    def _table(self) -> DeltaTable:
        with archive_errors(f"opening the archive of {self.entity}"):
            return table_of(self.path)

    def _files(self) -> FileSystem:
        with archive_errors(f"opening the archive of {self.entity}"):
            return filesystem_of(self.path)

    def _has(self, files: FileSystem, version: int) -> bool:
        with archive_errors(f"reading the archive of {self.entity}"):
            info = files.get_file_info([f"_delta_log/{version:020d}.json"])[0]
            return bool(info.type == FileType.File)

    def _read(self, files: FileSystem, version: int) -> Commit | None:
        with archive_errors(f"reading commit {version} of the archive of {self.entity}"):
            try:
                text = files.open_input_file(f"_delta_log/{version:020d}.json").read()
            except FileNotFoundError:
                return None
            return _parse(version, bytes(text))


def _parse(version: int, text: bytes) -> Commit:
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
    return Commit(
        version=version,
        committed_at=datetime.fromtimestamp(info.get("timestamp", 0) / 1000, UTC),
        operation=str(info.get("operation", "")),
        user_metadata=info.get("userMetadata"),
        added=tuple(_added(action["add"]) for action in actions if "add" in action),
    )


def _added(action: Mapping[str, Any]) -> ArchiveFile:
    stats = json.loads(action.get("stats") or "{}")
    low, high = stats.get("minValues", {}), stats.get("maxValues", {})
    return ArchiveFile(
        path=action["path"],
        bytes=action["size"],
        rows=stats.get("numRecords", 0),
        unreadable=stats.get("nullCount", {}).get("recorded_at", 0),
        partition_min=low.get("partition"),
        partition_max=high.get("partition"),
        offset_min=low.get("offset"),
        offset_max=high.get("offset"),
        key_min=low.get("key"),
        key_max=high.get("key"),
    )
