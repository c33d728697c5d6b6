"""The archive: a lake table for each entity type, its commits, its ledger; read without Spark."""

from everstate.archive.commits import ArchiveLog as ArchiveLog
from everstate.archive.commits import Commit as Commit
from everstate.archive.commits import CommitNote as CommitNote
from everstate.archive.commits import CommittedRange as CommittedRange
from everstate.archive.commits import Position as Position
from everstate.archive.files import ArchiveFile as ArchiveFile
from everstate.archive.layout import app_id as app_id
from everstate.archive.layout import table_path as table_path
from everstate.archive.ledger import Ledger as Ledger
from everstate.archive.ledger import LedgerRow as LedgerRow
from everstate.archive.ledger import frozen as frozen
from everstate.archive.ledger import last_commit as last_commit
from everstate.archive.ordered import Where as Where
from everstate.archive.ordered import record_parts as record_parts
from everstate.archive.reader import ArchiveReader as ArchiveReader
