"""The declarations of a project that its ways in need: entity types, and what writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from everstate.changes import EntityType
from everstate.declarations.captures import Capture
from everstate.declarations.processes import HasProcesses

Source: TypeAlias = Literal["store", "cassandra", "log", "commands", "capture"]
"""Where an entity type's versions are assigned: PostgreSQL with its outbox, Cassandra, the log
itself (events: immutable facts), a command handler, or the capture of a foreign database."""


class Declarations(HasProcesses, Protocol):
    """A project's declarations; :class:`everstate.app.App` is one."""

    @property
    def name(self) -> str:
        """Name of the project."""

    def entities_from(self, source: Source) -> tuple[EntityType, ...]:
        """Entity types that have this source of truth."""

    @property
    def captures(self) -> Mapping[str, Capture]:
        """Captures by name."""

    def capture_of(self, name: str) -> Capture:
        """Capture of that name; raises UnknownCapture."""
