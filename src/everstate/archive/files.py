"""The data files of an archive's newest version, by the statistics of the table's log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One data file of the table, by its statistics."""

    path: str
    bytes: int
    rows: int
    unreadable: int
    partition_min: int | None
    partition_max: int | None
    offset_min: int | None
    offset_max: int | None
    key_min: str | None
    """Text statistics are truncated; use them to skip files, never to find a key."""
    key_max: str | None

    def may_hold(self, partition: int, start: int, end: int) -> bool:
        """Whether it may have records of a partition with offsets ``[start, end)``."""
        if self.partition_min is None or self.partition_max is None:
            return False
        if self.offset_min is None or self.offset_max is None:
            return False
        is_mine = self.partition_min <= partition <= self.partition_max
        return is_mine and self.offset_min < end and self.offset_max >= start

    def may_hold_key(self, key: str) -> bool:
        """Whether it may have changes of a key."""
        if self.rows <= self.unreadable:
            return False
        is_above = self.key_min is None or self.key_min <= key
        return is_above and (self.key_max is None or key <= self.key_max)


def files_of(table: DeltaTable) -> list[ArchiveFile]:
    """The data files of a table, by path. Cost: no file is opened."""
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return sorted((_file(action) for action in actions), key=lambda file: file.path)


def _file(action: dict[str, Any]) -> ArchiveFile:
    return ArchiveFile(
        path=action["path"],
        bytes=action["size_bytes"],
        rows=action["num_records"] or 0,
        unreadable=action.get("null_count.recorded_at") or 0,
        partition_min=action.get("min.partition"),
        partition_max=action.get("max.partition"),
        offset_min=action.get("min.offset"),
        offset_max=action.get("max.offset"),
        key_min=action.get("min.key"),
        key_max=action.get("max.key"),
    )
