"""Opens the source of truth of each entity type that REST writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from everstate.app import App, Source
from everstate.changes import EntityType
from everstate.config import Config
from everstate.sources.crud.postgres import PostgresStore
from everstate.sources.crud.store import Store


def _cassandra(config: Config, entity_type: EntityType) -> Store:
    # Imported here: the driver is an extra.
    from everstate.sources.crud.stores.cassandra import CassandraStore

    return CassandraStore(config, entity_type)


OPENERS: Final[Mapping[Source, Callable[[Config, EntityType], Store]]] = {
    "store": PostgresStore,
    "cassandra": _cassandra,
}
"""What opens a store, by source of truth."""


def open_stores(config: Config, app: App) -> dict[str, Store]:
    """A store for each entity type whose source of truth is one, tables made; by name.

    Raises Unavailable, with nothing left open.
    """
    stores: dict[str, Store] = {}
    try:
        for source, opener in OPENERS.items():
            for entity_type in app.entities_from(source):
                stores[entity_type.name] = opener(config, entity_type)
        for store in stores.values():
            store.install()
    except BaseException:
        close_stores(stores)
        raise
    return stores


def close_stores(stores: Mapping[str, Store]) -> None:
    """Give up the connections of all."""
    for store in stores.values():
        store.close()
