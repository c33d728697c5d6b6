"""The log to which a store in Cassandra publishes, as recorded in its keyspace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from everstate.config import Config
from everstate.log.bound import Bound, BoundTopic, check_bound
from everstate.log.topics import TopicIdentity
from everstate.sources.stores.cassandra.session import Database

_COLUMNS: Final = "entity, topic, cluster_id, topic_id, partitions"
_READ: Final = "SELECT " + _COLUMNS + " FROM {}.published_to"
_NOTE: Final = "INSERT INTO {}.published_to (" + _COLUMNS + ") VALUES (?, ?, ?, ?, ?) IF NOT EXISTS"
_REPLACE: Final = (
    "UPDATE {}.published_to SET topic = ?, cluster_id = ?, topic_id = ?, partitions = ?"
    " WHERE entity = ? IF EXISTS"
)


def read_bound(database: Database) -> Bound:
    """The changelog of each entity type that was published."""
    return {
        row.entity: BoundTopic(
            row.topic, TopicIdentity(row.cluster_id, row.topic_id, row.partitions)
        )
        for row in database.execute(_READ.format(database.keyspace), [])
    }


def bind(database: Database, bound: Bound, *, replace: bool = False) -> None:
    """Record changelogs; existing records stay, or are replaced with ``replace``."""
    for entity, each in bound.items():
        known = each.identity
        where = [each.topic, known.cluster_id, known.topic_id, known.partitions]
        database.execute(_NOTE.format(database.keyspace), [entity, *where])
        if replace:
            database.execute(_REPLACE.format(database.keyspace), [*where, entity])


def check_log(database: Database, config: Config, entities: Iterable[str]) -> None:
    """Raise LogIdentityChanged or TopicResized if changes were published to another log before."""
    check_bound(
        config,
        entities,
        store=f"keyspace {database.keyspace}",
        read=lambda: read_bound(database),
        note=lambda missing: bind(database, missing),
    )
