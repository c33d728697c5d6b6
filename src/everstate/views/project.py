"""The declarations of a project: its entity types, what writes them, and its views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from everstate.changes import EntityType
from everstate.declarations.captures import Capture
from everstate.declarations.commands import CommandGroup
from everstate.declarations.handlers import Handler
from everstate.declarations.processes import ProcessManager
from everstate.declarations.source import Source

if TYPE_CHECKING:
    # The SQL parser takes a fifth of a second, which reading an entity does not need.
    from everstate.changes.derived import Derivation
    from everstate.errors import InvalidView
    from everstate.views.kinds import ViewPlan


class Project(Protocol):
    """A project's declarations, as the rooms see an :class:`everstate.app.App`."""

    @property
    def name(self) -> str:
        """Name of the project."""

    @property
    def entities(self) -> Mapping[str, EntityType]:
        """Entity types by name."""

    def entities_from(self, source: Source) -> tuple[EntityType, ...]:
        """Entity types that have this source of truth."""

    @property
    def command_groups(self) -> Mapping[str, CommandGroup]:
        """Handler groups of commands by the name of their entity type."""

    @property
    def processes(self) -> Mapping[str, ProcessManager]:
        """Process managers by name."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers by group and name."""

    @property
    def captures(self) -> Mapping[str, Capture]:
        """Captures by name."""

    def capture_of(self, name: str) -> Capture:
        """Capture of that name; raises UnknownCapture."""

    @property
    def views(self) -> Mapping[str, ViewPlan]:
        """Compiled views by name; none is refused."""

    @property
    def refused_views(self) -> Mapping[str, InvalidView]:
        """Declared views and derived topics that cannot be kept, each with the reason."""

    @property
    def derivations(self) -> Mapping[str, Derivation]:
        """Derived topics by name."""

    @property
    def debezium_forms(self) -> tuple[str, ...]:
        """Entity types that are published in Debezium's form too."""

    def keeps_history(self, entity: str) -> bool:
        """Whether an entity type has a history in the store."""


def kept_always(project: Project, entity: str) -> tuple[str, ...]:
    """Views of an entity type that are kept without a declaration, without the entity's name."""
    return ("latest", "history") if project.keeps_history(entity) else ("latest",)


def known_views(project: Project) -> tuple[str, ...]:
    """All names that readers of a project's views may use."""
    implicit = (
        name
        for entity in project.entities
        for name in (entity, *(f"{entity}_{kept}" for kept in kept_always(project, entity)))
    )
    return (*project.views, *implicit)


def entities_of(project: Project, view: str) -> tuple[str, ...]:
    """Names of the entity types that a view, `latest`, `history` or entity name is read from."""
    for entity in project.entities:
        if view in (entity, f"{entity}_latest", f"{entity}_history"):
            return (entity,)
    plan = project.views[view]
    return tuple(dict.fromkeys((plan.entity, *(part.entity for part in plan.parts))))
