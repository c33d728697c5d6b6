"""The log that a store in PostgreSQL publishes to, as the store has noted it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from everstate.config import Config
from everstate.log.bound import Bound, BoundTopic, check_bound
from everstate.log.topics import TopicIdentity
from everstate.sources.outbox.database import Connection

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


def read_bound(connection: Connection) -> Bound:
    """The changelog of each entity type that was published."""
    rows = connection.execute(_READ).fetchall()
    return {row[0]: BoundTopic(row[1], TopicIdentity(*row[2:])) for row in rows}


def bind(connection: Connection, bound: Bound, *, replace: bool = False) -> None:
    """Note changelogs; what is noted already stays, or is replaced."""
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(_REPLACE if replace else _NOTE, _rows(bound))


def check_log(connection: Connection, config: Config, entities: Iterable[str]) -> None:
    """Raise LogIdentityChanged or TopicResized where changes went to another log before."""
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
