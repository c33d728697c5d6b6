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
from everstate.archive.ledger import Ledger, LedgerRow, frozen, last_commit
from everstate.archive.lookup import KeyRecords
from everstate.archive.ordered import Where
from everstate.archive.reader import ArchiveReader, Counts, Location
from everstate.archive.records import record_parts

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
    "frozen",
    "last_commit",
    "ledger_path",
    "record_parts",
    "table_path",
]
