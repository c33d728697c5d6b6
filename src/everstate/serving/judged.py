"""Reads the core's position and exceptions, for readers of changes; checks the log's identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from everstate.changes.tokens import LogPosition
from everstate.config import Config
from everstate.errors import LogIdentityChanged, MissingTable, NotFound, Unavailable
from everstate.log.positions import Range
from everstate.log.topics import TopicNames
from everstate.retrying import within
from everstate.serving.connection import pooled
from everstate.serving.places import core_position
from everstate.views.control import ViewStatuses
from everstate.views.control.notes import Judged, Notes
from everstate.views.tables import Core

_AGAIN: Final = within(30.0, Unavailable, pause_s=0.2)


class CoreNotes:
    """Reads the core of one entity type; each call holds a connection only while it runs."""

    def __init__(self, config: Config, entity: str) -> None:
        self._dsn, self._schema = config.views_dsn, config.views.schema_name
        self._core = Core(entity, TopicNames(config.log.prefix).changes(entity))

    def reached(self) -> LogPosition:
        """The core's position, and which log it is of; raises NotFound while it has none."""
        entity = self._core.entity
        try:
            with pooled(self._dsn) as connection:
                return core_position(ViewStatuses(connection, self._schema), entity)
        except MissingTable as cause:
            raise NotFound(
                f"no changes of {entity} are kept yet.",
                advice="`everstate run` creates the views when it starts.",
            ) from cause

    def position(self, mark: bytes) -> LogPosition:
        """The core's position; raises LogIdentityChanged when its log has another mark."""
        entity, found = self._core.entity, self.reached()
        if found.log != mark:
            raise LogIdentityChanged(
                f"the views of {entity} in schema {self._schema} are kept from another log than "
                f"topic {self._core.topic}. Nothing was read."
            )
        return found

    def judged(self, wanted: Mapping[int, Range]) -> dict[int, Judged]:
        """The core's positions, and its exceptions in some ranges up to them (V1).

        Retries for 30 s when the database does not answer; then raises Unavailable.
        """
        return _AGAIN(self._judged, wanted)

    def _judged(self, wanted: Mapping[int, Range]) -> dict[int, Judged]:
        with pooled(self._dsn) as connection:
            return Notes(connection, self._schema).judged(self._core, wanted)
