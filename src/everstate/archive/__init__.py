"""The long memory: a lake table for each entity type, its commits, its ledger; read without Spark.

Layer: imports config, telemetry and errors only.
"""

from everstate.archive.commits import (
    AddedFile,
    ArchiveLog,
    Commit,
    CommitNote,
    CommittedRange,
    Position,
)
from everstate.archive.layout import app_id, ledger_path, table_path
from everstate.archive.ledger import Ledger, LedgerRow, last_commit
from everstate.archive.reader import ArchiveFile, ArchiveReader, Counts, Location

__all__ = [
    "AddedFile",
    "ArchiveFile",
    "ArchiveLog",
    "ArchiveReader",
    "Commit",
    "CommitNote",
    "CommittedRange",
    "Counts",
    "Ledger",
    "LedgerRow",
    "Location",
    "Position",
    "app_id",
    "last_commit",
    "ledger_path",
    "table_path",
]
