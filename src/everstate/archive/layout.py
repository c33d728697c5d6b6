"""Paths of an archive, and properties of its table on which other programs may rely."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from deltalake.exceptions import DeltaError, TableNotFoundError

from everstate.config import Config
from everstate.errors import ArchiveDamaged, ArchiveError, ArchiveFull

INDEXED_COLUMNS: Final = ("partition", "offset", "key", "recorded_at")
"""First columns of the table; only these have statistics. ``recorded_at`` is null only in
unreadable records, so a file's null count is the number of these, without reading the file."""

TABLE_PROPERTIES: Final = {
    "delta.dataSkippingNumIndexedCols": str(len(INDEXED_COLUMNS)),
    # Positions are in the commits; the ledger copies them long before these are deleted.
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}


def table_path(config: Config, entity: str) -> str:
    """Folder or URL of an entity type's table."""
    return f"{config.archive_path.rstrip('/')}/{entity}"


def ledger_path(config: Config, entity: str) -> str:
    """Folder or URL of the ledger of an entity type's archive."""
    return f"{config.archive_path.rstrip('/')}/_ledger/{entity}"


def app_id(entity: str) -> str:
    """Constant writer id of the table's transactions: it fences a second writer (C25)."""
    return f"everstate-archive-{entity}"


@contextmanager
def archive_errors(doing: str) -> Iterator[None]:
    """Translate errors of the lake's reader in the block into ArchiveError."""
    try:
        yield
    except TableNotFoundError as cause:
        raise ArchiveError(
            f"{doing}: there is no archive yet.", advice="Start one with `everstate run`."
        ) from cause
    except (DeltaError, pa.ArrowException, OSError, ValueError) as cause:  # ValueError: no JSON
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
        reason = re.sub(r"\s+", " ", plain).strip()[:300]
        if "No space left on device" in reason:
            raise ArchiveFull(f"{doing}: the disk is full ({reason}).") from cause
        if "CRC checksum" in reason:
            raise ArchiveDamaged(f"{doing}: a page differs from its sum ({reason}).") from cause
        raise ArchiveError(f"{doing}: {reason}") from cause
