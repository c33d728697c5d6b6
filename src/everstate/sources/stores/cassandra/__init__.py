"""Cassandra as source of truth: the store, and the publisher that sends its changes to the log."""

from everstate.cassandra import Database as Database
from everstate.sources.stores.cassandra.publisher import Publisher as Publisher
from everstate.sources.stores.cassandra.store import CassandraStore as CassandraStore
