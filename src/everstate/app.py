"""App: a project's entity types and views; what users import first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.errors import InvalidEntityType, InvalidView, UnknownEntity, UnknownView
from everstate.views.definition import ViewDefinition
from everstate.views.names import names_of_entity, refused_name
from everstate.views.plan import ViewPlan, compile_view

M = TypeVar("M", bound=type[BaseModel])


class App:
    """A project's entity types and the views that are kept of them.

    Declaring is pure: nothing is started, read or written until a command or a library call
    takes the app and a :class:`~everstate.config.Config`. Every entity type is kept as `latest`
    and `history`; :meth:`view` adds views in SQL.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._entities: dict[str, EntityType] = {}
        self._plans: dict[str, ViewPlan] = {}
        self._without_history: set[str] = set()

    @property
    def entities(self) -> Mapping[str, EntityType]:
        """Entity types by name, in the order in which they were registered."""
        return MappingProxyType(self._entities)

    @property
    def views(self) -> Mapping[str, ViewPlan]:
        """Compiled SQL views by name, in the order in which they were declared."""
        return MappingProxyType(self._plans)

    def keeps_history(self, entity: str) -> bool:
        """Whether every version of an entity type's entities is kept in the store."""
        return entity not in self._without_history

    def entity(
        self, name: str, *, key: str, schema_version: int = 1, history: bool = True
    ) -> Callable[[M], M]:
        """Register a pydantic model as the entity type ``name``; used as a decorator.

        ``key`` names the field or property that identifies an entity. ``history=False`` keeps
        only the newest version of each in the store, which costs a third as much; older ones are
        in the archive, and duplicates of them cannot be told from conflicts (C6).

        Raises InvalidEntityType when the name is taken (an entity type has one source of truth)
        or a field has no column type.
        """

        def register(model: M) -> M:
            if name in self._entities:
                raise InvalidEntityType(
                    f"entity type {name!r} is registered already",
                    advice="An entity type has exactly one model and one source of truth.",
                )
            entity_type = EntityType(name, model, key, schema_version)
            self._check_entity_name(name)
            self._entities[name] = entity_type
            if not history:
                self._without_history.add(name)
            return model

        return register

    def view(self, name: str, *, sql: str) -> ViewPlan:
        """Declare a view in SQL over one entity type; it is kept from before and after images.

        Raises InvalidView with the reason, and the nearest form that can be kept, when the SQL
        cannot be kept incrementally.
        """
        if name in self._taken():
            raise InvalidView(name, "the name is taken", advice="Choose another name.")
        plan = compile_view(ViewDefinition(name, sql), self._entities)
        self._plans[name] = plan
        return plan

    def _taken(self) -> set[str]:
        """Names that readers of the views' schema find already."""
        return {n for entity in self._entities for n in names_of_entity(entity)} | set(self._plans)

    def _check_entity_name(self, name: str) -> None:
        """Raise InvalidEntityType when the tables of an entity type would meet others."""
        reason = refused_name(name)
        taken = self._taken().intersection(names_of_entity(name))
        if reason is None and taken:
            reason = f"{', '.join(sorted(taken))} is there already"
        if reason is not None:
            raise InvalidEntityType(
                f"entity type {name!r} cannot have this name: {reason}",
                advice="Choose another name.",
            )

    def entity_type(self, name: str) -> EntityType:
        """Entity type of that name; raises UnknownEntity."""
        if name not in self._entities:
            raise UnknownEntity(name, tuple(self._entities))
        return self._entities[name]

    def views_of(self, entity: str) -> tuple[ViewPlan, ...]:
        """SQL views kept of one entity type."""
        return tuple(plan for plan in self._plans.values() if plan.entity == entity)

    def view_plan(self, name: str) -> ViewPlan:
        """SQL view of that name; raises UnknownView."""
        if name not in self._plans:
            raise UnknownView(name, tuple(self._plans))
        return self._plans[name]
