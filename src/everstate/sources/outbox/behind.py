"""A store that is behind its log: it was restored from an older backup, or made anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from everstate.changes import EntityType
from everstate.changes.codec import decode_wire
from everstate.changes.drift import Heard
from everstate.config import Config
from everstate.errors import StoreBehindLog
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.parts import tries
from everstate.sources.stores.postgres.database import OutboxConnection
from everstate.sources.stores.postgres.schema import missing_tables
from everstate.sources.stores.postgres.truth import PostgresTruth

_KEYS_EACH: Final = 2_000


def check_store(
    database: OutboxConnection, config: Config, entity_types: Iterable[EntityType], who: str
) -> None:
    """Raise StoreBehindLog when the log has versions that the store lacks, or would send again.

    Cost: reads `.state` of each entity type until the first such version; some microseconds for
    each entity. The store has no table of facts: they have one version, and never fall behind.
    """
    names = [each.name for each in entity_types]
    without_table = missing_tables(database, names)
    behind = [
        name
        for name in names
        if name not in without_table
        and any(map(PostgresTruth.of(config, name, 1).is_behind, _pages(config, name)))
    ]
    if behind:
        raise StoreBehindLog(who, behind)


def _pages(config: Config, entity: str) -> Iterator[dict[str, Heard]]:
    """The log's newest version of each key, and possibly older ones before it."""
    page: dict[str, Heard] = {}
    with Consumer(config, client_id=f"{config.log.prefix}.behind") as consumer:
        for record in consumer.read_topic(TopicNames(config.log.prefix).state(entity)):
            heard = _heard(record.value)
            if record.key is None or heard is None:
                continue
            page[record.key.decode(errors="replace")] = heard
            if len(page) == _KEYS_EACH:
                tries()
                yield page
                page = {}
    if page:
        yield page


def _heard(value: bytes | None) -> Heard | None:
    """The change of a record; ``None`` where it cannot be read: `everstate drift` reports those."""
    try:
        wire = None if value is None else decode_wire(value)
    except msgspec.DecodeError:
        return None
    return None if wire is None else Heard(wire.version, str(wire.id))
