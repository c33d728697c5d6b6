"""The log to which a store in Cassandra publishes, as recorded in its keyspace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from everstate.cassandra import Database
from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.log.bound import Bound, BoundTopic, check_bound
from everstate.log.topics import TopicIdentity
from everstate.sources.stores.cassandra.schema import IndexStatements

_COLUMNS: Final = "entity, topic, cluster_id, topic_id, partitions"
_READ: Final = "SELECT " + _COLUMNS + " FROM {}.published_to"
_NOTE: Final = "INSERT INTO {}.published_to (" + _COLUMNS + ") VALUES (?, ?, ?, ?, ?) IF NOT EXISTS"
_REPLACE: Final = (
    "UPDATE {}.published_to SET topic = ?, cluster_id = ?, topic_id = ?, partitions = ?"
    " WHERE entity = ? IF EXISTS"
)
BATCH: Final = ("", "batch")
BEGUN: Final = ("", "begun")
"""Rows of the table `published` that belong to no entity: the newest batch of the publisher, and
the newest one when the keyspace was bound to its present log."""


def read_bound(database: Database) -> Bound:
    """The changelog of each entity type that was published."""
    return {
        row.entity: BoundTopic(
            row.topic, TopicIdentity(row.cluster_id, row.topic_id, row.partitions)
        )
        for row in database.execute(_READ.format(database.keyspace), [])
    }


def bind(database: Database, bound: Bound, *, replace: bool = False) -> None:
    """Record changelogs; existing records stay, or are replaced with ``replace``.

    A new log need not have the batches that were published until then.
    """
    for entity, each in bound.items():
        known = each.identity
        where = [each.topic, known.cluster_id, known.topic_id, known.partitions]
        database.execute(_NOTE.format(database.keyspace), [entity, *where])
        if replace:
            database.execute(_REPLACE.format(database.keyspace), [*where, entity])
    if replace and (batch := read_batch(database, BATCH)):
        write_batch(database, BEGUN, batch)


def read_batch(database: Database, name: EntityKey) -> int:
    """A batch that is recorded in the keyspace; 0: none."""
    rows = database.execute(IndexStatements(database.keyspace).published, list(name))
    return int(rows[0].version) if rows else 0


def write_batch(database: Database, name: EntityKey, batch: int) -> None:
    """Record a batch; a lower one than the recorded one changes nothing."""
    statement = IndexStatements(database.keyspace).set_published
    database.execute(statement, [*name, batch, batch])


def check_log(database: Database, config: Config, entities: Iterable[str]) -> None:
    """Raise LogIdentityChanged or TopicResized if changes were published to another log before."""
    check_bound(
        config,
        entities,
        store=f"keyspace {database.keyspace}",
        read=lambda: read_bound(database),
        note=lambda missing: bind(database, missing),
    )
