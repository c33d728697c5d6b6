"""The way in by the outbox: services and the store write to it, and the relay publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from everstate.changes import EntityType
from everstate.parts import PartRun
from everstate.runtime.worker import Worker, part_of
from everstate.sources.way_in import WayIn

if TYPE_CHECKING:
    from everstate.log.bound import Bound, Moved


class OutboxRelay(WayIn):
    """The outbox of the store in PostgreSQL."""

    role = "relay"

    @property
    def facts(self) -> tuple[EntityType, ...]:
        """Events; they come through the outbox too, beside those that the API sends to the log."""
        return self.project.entities_from("log")

    @property
    def entity_types(self) -> tuple[EntityType, ...]:
        """Entity types whose changes services may emit, facts included."""
        return (*self.project.entities_from("store"), *self.facts)

    @property
    def is_used(self) -> bool:
        """Always: a service may emit entity types that the app does not declare."""
        return True

    def parts(self) -> Mapping[str, PartRun]:
        """The relay alone."""
        return {"relay": part_of(self._relay)}

    def _relay(self) -> Worker:
        from everstate.log.topics import Topics
        from everstate.sources.outbox import Relay

        # The pipeline creates them too, but Spark takes long to start, and the relay need not wait.
        with Topics(self.config) as topics:
            topics.ensure(self.project.entities)
        return Relay(self.config, self.entity_types)

    def move(self, bound: Bound) -> Moved:
        """Publish the outbox to these changelogs, also entity types that were published before."""
        from everstate.log.bound import moved
        from everstate.sources.stores.postgres import bound as stored_bound
        from everstate.sources.stores.postgres.database import connect, translated
        from everstate.sources.stores.postgres.schema import install

        names = [each.name for each in self.entity_types]
        if not names:
            return {}
        dsn = self.config.store_dsn
        with translated(dsn, "beginning a new log"), connect(dsn, "everstate-log") as connection:
            install(connection, ())
            before = stored_bound.read_bound(connection)
            mine = {name: bound[name] for name in {*before, *names} if name in bound}
            stored_bound.bind(connection, mine, replace=True)
        return moved(before, mine)
