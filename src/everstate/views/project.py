"""What the verbs need to know of a project: its entity types and its views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from everstate.changes import EntityType

if TYPE_CHECKING:
    # The SQL parser takes a fifth of a second, which reading an entity does not need.
    from everstate.views.plan import ViewPlan


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
        """Compiled SQL views by name."""

    def keeps_history(self, entity: str) -> bool:
        """Whether every version of an entity type's entities is kept in the store."""


def kept_always(project: Project, entity: str) -> tuple[str, ...]:
    """What is kept of an entity type without a view's declaration."""
    return ("latest", "history") if project.keeps_history(entity) else ("latest",)
