"""The outbox: a store in PostgreSQL as source of truth, and the relay to the log."""

from everstate.sources.outbox.schema import install
from everstate.sources.outbox.store import EntityStore, Versioned, Written, WrittenMany

__all__ = ["EntityStore", "Versioned", "Written", "WrittenMany", "install"]
