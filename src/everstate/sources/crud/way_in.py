"""The ways in over REST: entities in PostgreSQL or Cassandra, and events in the log."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, ClassVar

from everstate.changes import EntityType
from everstate.changes.drift import Truth
from everstate.declarations.source import Source
from everstate.parts import PartRun
from everstate.runtime.worker import Worker, part_of
from everstate.sources.stores.store import Store
from everstate.sources.way_in import Served, Serving, WayIn

if TYPE_CHECKING:
    from everstate.log.bound import Bound, Moved

# Drivers, clients and the web framework are imported when they are used.


class _Crud(WayIn):
    """CRUD on a store, which is the source of truth of its entity types."""

    source: ClassVar[Source]

    @property
    def entity_types(self) -> tuple[EntityType, ...]:
        return self.project.entities_from(self.source)

    @abstractmethod
    def open_store(self, entity_type: EntityType) -> Store:
        """The store of one of its entity types."""

    def serve(self, serving: Serving) -> Served | None:
        from everstate.sources.crud.serving import ServedStores

        if not self.entity_types:
            return None
        with ExitStack() as opened:
            stores = [
                opened.enter_context(closing(self.open_store(each))) for each in self.entity_types
            ]
            for store in stores:
                store.install()
            opened.pop_all()
        return ServedStores(self.config, self.project.name, stores, serving)


class PostgresCrud(_Crud):
    """CRUD on PostgreSQL; its changes go to the outbox."""

    source = "store"

    def open_store(self, entity_type: EntityType) -> Store:
        """A store with connections of its own."""
        from everstate.sources.stores.postgres import EntityStore

        return EntityStore(self.config, entity_type)

    def truths(self) -> Mapping[str, Truth]:
        """The tables of its entity types."""
        from everstate.sources.stores.postgres.truth import PostgresTruth

        return {
            each.name: PostgresTruth.of(self.config, each.name, each.schema_version)
            for each in self.entity_types
        }


class CassandraCrud(_Crud):
    """CRUD on Cassandra, and the publisher of its changes."""

    source = "cassandra"
    role = "publisher"

    def open_store(self, entity_type: EntityType) -> Store:
        """A store with a session of its own."""
        from everstate.sources.stores.cassandra import CassandraStore

        return CassandraStore(self.config, entity_type)

    def parts(self) -> Mapping[str, PartRun]:
        """The publisher alone."""
        return {"publisher": part_of(self._publisher)}

    def _publisher(self) -> Worker:
        from everstate.log.topics import Topics
        from everstate.sources.stores.cassandra import Publisher

        with Topics(self.config) as topics:
            topics.ensure(self.project.entities)
        return Publisher(self.config, self.entity_types)

    def truths(self) -> Mapping[str, Truth]:
        """The partitions of its entity types."""
        if not self.entity_types:
            return {}
        from everstate.sources.stores.cassandra.truth import CassandraTruth

        return {
            each.name: CassandraTruth(self.config, each.name, each.schema_version)
            for each in self.entity_types
        }

    def move(self, bound: Bound) -> Moved:
        """Record the changelogs in the keyspace."""
        if not self.entity_types:
            return {}
        from everstate.cassandra import Database
        from everstate.log.bound import moved
        from everstate.sources.stores.cassandra import bound as stored_bound
        from everstate.sources.stores.cassandra.schema import install

        names = tuple(each.name for each in self.entity_types)
        with closing(Database(self.config)) as database:
            install(database, names)
            before = stored_bound.read_bound(database)
            mine = {name: bound[name] for name in names}
            stored_bound.bind(database, mine, replace=True)
        return moved(before, mine)


class Events(WayIn):
    """Events: facts that the API appends to the log, and to nothing else."""

    @property
    def entity_types(self) -> tuple[EntityType, ...]:
        """Entity types whose source of truth is the log."""
        return self.project.entities_from("log")

    def serve(self, serving: Serving) -> Served | None:
        """The routes of events."""
        from everstate.sources.crud.serving import ServedEvents

        if not self.entity_types:
            return None
        return ServedEvents(self.config, self.project.name, self.entity_types, serving)
