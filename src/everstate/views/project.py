"""The declarations of a project that commands need: its entity types and its views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from everstate.changes import EntityType

if TYPE_CHECKING:
    # The SQL parser takes a fifth of a second, which reading an entity does not need.
    from everstate.changes.derived import Derivation
    from everstate.errors import InvalidView
    from everstate.views.kinds import ViewPlan


class Project(Protocol):
    """A project's declarations; :class:`everstate.app.App` is one."""

    @property
    def name(self) -> str:
        """Name of the project."""

    @property
    def entities(self) -> Mapping[str, EntityType]:
        """Entity types by name."""

    @property
    def views(self) -> Mapping[str, ViewPlan]:
        """Compiled views by name; none is refused."""

    @property
    def refused_views(self) -> Mapping[str, InvalidView]:
        """Declared views and derived topics that cannot be kept, each with the reason."""

    @property
    def derivations(self) -> Mapping[str, Derivation]:
        """Derived topics by name."""

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
