"""Cassandra as source of truth: the store, and the publisher that brings its changes to the log."""

from everstate.sources.crud.stores.cassandra.publisher import Publisher
from everstate.sources.crud.stores.cassandra.session import Database
from everstate.sources.crud.stores.cassandra.store import CassandraStore

__all__ = ["CassandraStore", "Database", "Publisher"]
