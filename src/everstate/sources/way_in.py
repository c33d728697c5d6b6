"""What a way in is: one object with its entity types, its role, its truths and its routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from everstate.changes import EntityType
from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.parts import PartRun
from everstate.views.project import Project

if TYPE_CHECKING:
    # The web framework and the client of Kafka are loaded by those who use them.
    from fastapi import APIRouter

    from everstate.http.asgi import AnswerPast, Desk
    from everstate.http.openapi import Schemas
    from everstate.log.bound import Bound, Moved

Find = Callable[[str, str, str | None], bytes]
"""Finds an entity's state in the views; takes entity type, key, and a token to wait for.

Raises NotFound, InvalidToken, NotCaughtUp.
"""

ReadinessCheck = tuple[str, Callable[[], object]]
"""What callers are told when a check fails, and the check: it raises an everstate error."""


class Serving(NamedTuple):
    """The API as the routes of a way in need it."""

    desk: Desk
    schemas: Schemas
    past: AnswerPast
    """Answers a read of a past state."""
    find: Find


class Served(ABC):
    """The routes of a way in, and the connections behind them."""

    reads: Sequence[str] = ()
    """Entity types whose present state these routes read, and not the routes of the views."""
    needs_log = False

    @abstractmethod
    def routers(self) -> Iterable[APIRouter]:
        """The routes."""

    @abstractmethod
    def checks(self) -> Iterable[ReadinessCheck]:
        """Checks of whether requests can be answered now."""

    def open(self) -> None:
        """Connect what belongs to a running API; called when it starts."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class WayIn(ABC):
    """A way in of one project: everything that the roles, the API and the jobs need of it.

    To make one opens nothing, and loads no driver. A way in implements what it has; the methods
    here are those of a way in that has none.
    """

    role: ClassVar[str | None] = None
    """Name of the role that publishes its changes."""

    def __init__(self, config: Config, project: Project) -> None:
        self.config, self.project = config, project

    @property
    @abstractmethod
    def entity_types(self) -> tuple[EntityType, ...]:
        """Entity types that it writes."""

    @property
    def is_used(self) -> bool:
        """Whether the project has work for its role."""
        return bool(self.entity_types)

    def parts(self) -> Mapping[str, PartRun]:
        """The parts of its role. A single part has the role's name, and its errors end the role."""
        return {}

    def truths(self) -> Mapping[str, Truth]:
        """Sources of truth that can be compared with the log, by entity type.

        Opens no connection; raises InvalidConfig while a store has no address.
        """
        return {}

    def check_move(self, bound: Bound) -> None:
        """Raise LogError when :meth:`move` would lose something or do it again; changes nothing."""
        return

    def move(self, bound: Bound) -> Moved:
        """Publish to these changelogs from now on; gives what has changed."""
        return {}

    def serve(self, serving: Serving) -> Served | None:
        """Its routes, on opened stores; raises Unavailable. ``None``: it has no routes."""
        return None
