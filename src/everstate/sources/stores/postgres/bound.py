"""The log to which a store in PostgreSQL publishes, as recorded in the store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from everstate.config import Config
from everstate.log.bound import Bound, BoundTopic, check_bound
from everstate.log.topics import TopicIdentity
from everstate.sources.stores.postgres.database import OutboxConnection

_READ: Final = (
    "SELECT entity, topic, cluster_id, topic_id, partitions FROM everstate_store.published_to"
)
_NOTE: Final = """
INSERT INTO everstate_store.published_to (entity, topic, cluster_id, topic_id, partitions)
VALUES (%s, %s, %s, %s, %s) ON CONFLICT (entity) DO NOTHING
"""
_REPLACE: Final = _NOTE.replace(
    "DO NOTHING",
    "DO UPDATE SET topic = excluded.topic, cluster_id = excluded.cluster_id,"
    " topic_id = excluded.topic_id, partitions = excluded.partitions",
)
BEGIN: Final = """
INSERT INTO everstate_store.relay AS present (name, batch)
SELECT name || '.begun', batch FROM everstate_store.relay WHERE name NOT LIKE '%.begun'
ON CONFLICT (name) DO UPDATE SET batch = excluded.batch, updated_at = now()
"""
"""The log need not have the batches that were published until now."""


def read_bound(connection: OutboxConnection) -> Bound:
    """The changelog of each entity type that was published."""
    rows = connection.execute(_READ).fetchall()
    return {row[0]: BoundTopic(row[1], TopicIdentity(*row[2:])) for row in rows}


def bind(connection: OutboxConnection, bound: Bound, *, replace: bool = False) -> None:
    """Record changelogs; existing records stay, or are replaced with ``replace``.

    A new log need not have the batches that were published until then.
    """
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(_REPLACE if replace else _NOTE, _rows(bound))
        if replace:
            cursor.execute(BEGIN)


def check_log(connection: OutboxConnection, config: Config, entities: Iterable[str]) -> None:
    """Raise LogIdentityChanged or TopicResized if changes were published to another log before."""
    check_bound(
        config,
        entities,
        store="this store",
        read=lambda: read_bound(connection),
        note=lambda missing: bind(connection, missing),
    )


def _rows(bound: Bound) -> list[tuple[object, ...]]:
    return [
        (entity, each.topic, each.identity.cluster_id, each.identity.topic_id,
         each.identity.partitions)
        for entity, each in bound.items()
    ]  # fmt: skip
