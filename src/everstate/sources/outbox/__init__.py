"""The outbox: a store in PostgreSQL as source of truth, and the relay to the log."""

from everstate.sources.outbox.importing import Imported, import_file
from everstate.sources.outbox.marks import Blocked, OutboxStatus, read_status
from everstate.sources.outbox.relay import Relay
from everstate.sources.outbox.schema import install
from everstate.sources.outbox.store import EntityStore, Versioned, Written, WrittenMany

__all__ = [
    "Blocked",
    "EntityStore",
    "Imported",
    "OutboxStatus",
    "Relay",
    "Versioned",
    "Written",
    "WrittenMany",
    "import_file",
    "install",
    "read_status",
]
