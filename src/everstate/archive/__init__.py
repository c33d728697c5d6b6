"""The archive: a lake table for each entity type, its commits, its ledger; read without Spark.

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
from everstate.archive.files import ArchiveFile
from everstate.archive.layout import app_id, ledger_path, table_path
from everstate.archive.ledger import Ledger, LedgerRow, last_commit
from everstate.archive.lookup import KeyRecords
from everstate.archive.ordered import Where
from everstate.archive.reader import ArchiveReader, Counts, Location

__all__ = [
    "AddedFile",
    "ArchiveFile",
    "ArchiveLog",
    "ArchiveReader",
    "Commit",
    "CommitNote",
    "CommittedRange",
    "Counts",
    "KeyRecords",
    "Ledger",
    "LedgerRow",
    "Location",
    "Position",
    "Where",
    "app_id",
    "last_commit",
    "ledger_path",
    "table_path",
]
