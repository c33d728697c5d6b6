"""The routes of CRUD on stores, and of events, with what is open behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from fastapi import APIRouter

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import Unavailable
from everstate.sources.crud.event_router import event_router
from everstate.sources.crud.events import EventLog
from everstate.sources.crud.resource import Resource
from everstate.sources.crud.router import entity_router
from everstate.sources.stores.store import Store
from everstate.sources.way_in import ReadinessCheck, Served, Serving

_NOT_SENT = "events cannot be sent."


class ServedStores(Served):
    """CRUD routes of the entity types of some stores, which are open, and are closed with it."""

    def __init__(
        self, config: Config, project: str, stores: Sequence[Store], serving: Serving
    ) -> None:
        self._config, self._project = config, project
        self._stores, self._serving = stores, serving
        self.reads = [store.entity_type.name for store in stores]

    def routers(self) -> Iterable[APIRouter]:
        """One router for each entity type."""
        desk, schemas, past, _ = self._serving
        for store in self._stores:
            resource = Resource(
                store,
                project=self._project,
                page_max=self._config.api.page_max,
                message_bytes_max=self._config.log.message_bytes_max,
            )
            yield entity_router(resource, desk, schemas, past)

    def checks(self) -> Iterable[ReadinessCheck]:
        """Read one row of each store."""
        for name, store in zip(self.reads, self._stores, strict=True):
            yield f"the store of {name} does not answer.", partial(store.page, limit=1)

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores:
            store.close()


class ServedEvents(Served):
    """Routes of the entity types whose entities are events."""

    needs_log = True

    def __init__(
        self, config: Config, project: str, entity_types: Sequence[EntityType], serving: Serving
    ) -> None:
        self._project, self._entity_types, self._serving = project, entity_types, serving
        self._log = EventLog(config, entity_types)
        self.reads = [each.name for each in entity_types]

    def open(self) -> None:
        """Start to send."""
        self._log.open()

    def routers(self) -> Iterable[APIRouter]:
        """One router for each entity type."""
        desk, schemas, past, find = self._serving
        for each in self._entity_types:
            yield event_router(self._project, each, self._log, desk, schemas, find, past)

    def checks(self) -> Iterable[ReadinessCheck]:
        """Whether the sending thread runs."""
        yield _NOT_SENT, self._check

    def _check(self) -> None:
        if not self._log.sending:
            raise Unavailable(_NOT_SENT, public=_NOT_SENT)

    def close(self) -> None:
        """Send queued events, then close the connection."""
        self._log.close()
