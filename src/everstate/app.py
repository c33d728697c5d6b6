"""App: a project's entity types and views; what users import first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import (
    InvalidCapture,
    InvalidEntityType,
    InvalidView,
    UnknownCapture,
    UnknownEntity,
    UnknownView,
)
from everstate.sources.cdc.declaration import Capture, Kind, Table, check_declaration
from everstate.views.definition import ViewDefinition
from everstate.views.plan import ViewPlan, compile_view

if TYPE_CHECKING:
    from everstate.sources.cdc.cleaning import Cleaning

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
        self._captures: dict[str, Capture] = {}
        self._debezium_forms: list[str] = []

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
            self._entities[name] = EntityType(name, model, key, schema_version)
            if not history:
                self._without_history.add(name)
            return model

        return register

    def view(self, name: str, *, sql: str) -> ViewPlan:
        """Declare a view in SQL over one entity type; it is kept from before and after images.

        Raises InvalidView with the reason, and the nearest form that can be kept, when the SQL
        cannot be kept incrementally.
        """
        reserved = {n for e in self._entities for n in (e, f"{e}_latest", f"{e}_history")}
        if name in self._plans or name in reserved:
            raise InvalidView(name, "the name is taken", advice="Choose another name.")
        plan = compile_view(ViewDefinition(name, sql), self._entities)
        self._plans[name] = plan
        return plan

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

    @property
    def captures(self) -> Mapping[str, Capture]:
        """Declared captures by name."""
        return MappingProxyType(self._captures)

    def capture(
        self, name: str, *, kind: Kind, tables: Mapping[str, Table], **options: Any
    ) -> Capture:
        """Declare that tables of another system's database are captured as entity types.

        ``options`` are the other fields of :class:`~everstate.sources.cdc.declaration.Capture`.
        Raises InvalidCapture when an entity type is not registered, has a source of truth
        already, or lacks a field that the declaration names.
        """
        capture = Capture(name=name, kind=kind, tables=tables, **options)
        if name in self._captures:
            raise InvalidCapture(name, "it is declared already", advice="Choose another name.")
        check_declaration(capture, self._entities)
        taken = {entity for other in self._captures.values() for entity in other.entities}
        for entity in capture.entities:
            if entity in taken:
                raise InvalidCapture(name, f"{entity} has another capture as its source of truth")
        self._captures[name] = capture
        return capture

    def capture_of(self, name: str) -> Capture:
        """Capture of that name; raises UnknownCapture."""
        if name not in self._captures:
            raise UnknownCapture(name, tuple(self._captures))
        return self._captures[name]

    def cleanings(self, config: Config, only: str | None = None) -> list[Cleaning]:
        """What cleans the declared captures, or one of them; each is to be closed."""
        # Imported here: what reads and writes the log is of no use to one who only declares.
        from everstate.sources.cdc.cleaning import Cleaning

        captures = [self.capture_of(only)] if only else list(self._captures.values())
        return [Cleaning(config, capture, self._entities) for capture in captures]

    @property
    def debezium_forms(self) -> tuple[str, ...]:
        """Entity types that are published in Debezium's form too."""
        return tuple(self._debezium_forms)

    def publish_debezium(self, entity: str) -> None:
        """Publish an entity type in Debezium's form too, on ``<prefix>.<entity>.debezium.g1``.

        Raises UnknownEntity.
        """
        self.entity_type(entity)
        if entity not in self._debezium_forms:
            self._debezium_forms.append(entity)
