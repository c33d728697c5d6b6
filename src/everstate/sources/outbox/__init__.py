"""The outbox: a store in PostgreSQL as source of truth, and the relay to the log.

Other people's services emit their changes with :func:`emit`, in their own transactions.
"""

from everstate.sources.outbox.emit import emit, emit_async, emit_event
from everstate.sources.outbox.importing import Imported, import_file
from everstate.sources.outbox.installing import (
    Installation,
    Registered,
    install_outbox,
    read_registered,
)
from everstate.sources.outbox.marks import Blocked, OutboxStatus, read_status
from everstate.sources.outbox.relay import Relay
from everstate.sources.outbox.schema import install
from everstate.sources.outbox.slot import SlotStatus, drop_slot, read_slot
from everstate.sources.outbox.store import EntityStore, Versioned, Written, WrittenMany
from everstate.sources.outbox.streaming import StreamingRelay, relay_of

__all__ = [
    "Blocked",
    "EntityStore",
    "Imported",
    "Installation",
    "OutboxStatus",
    "Registered",
    "Relay",
    "SlotStatus",
    "StreamingRelay",
    "Versioned",
    "Written",
    "WrittenMany",
    "drop_slot",
    "emit",
    "emit_async",
    "emit_event",
    "import_file",
    "install",
    "install_outbox",
    "read_registered",
    "read_slot",
    "read_status",
    "relay_of",
]
