"""App: a project's entity types and views; what users import first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, get_args

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.errors import (
    EverstateError,
    InvalidCapture,
    InvalidEntityType,
    InvalidView,
    UnknownCapture,
    UnknownEntity,
    UnknownView,
    WrongSource,
)
from everstate.sources.cdc.declaration import Capture, Kind, Table, check_declaration
from everstate.sources.commands.group import CommandGroup, Decide, Evolve
from everstate.sources.outbox.truth import PostgresTruth
from everstate.views.definition import ViewDefinition
from everstate.views.names import names_of_entity, refused_name

if TYPE_CHECKING:
    from everstate.sources.cdc.cleaning import Cleaning
    from everstate.sources.commands.process import ProcessManager, React, Start
    from everstate.views.plan import ViewPlan

M = TypeVar("M", bound=type[BaseModel])

Source: TypeAlias = Literal["store", "cassandra", "log", "commands", "capture"]
"""Where an entity type's versions are assigned: PostgreSQL with its outbox, Cassandra, the log
itself (events: immutable facts), a command handler, or the capture of a foreign database."""


_compiled_later: ContextVar[bool] = ContextVar("views are compiled later", default=False)


@contextmanager
def views_compiled_later() -> Iterator[None]:
    """Views that are declared inside are compiled when they are first needed.

    For commands that only read entities: the SQL parser would take half of their time. An error
    in a view's SQL is raised when the view is needed.
    """
    token = _compiled_later.set(True)
    try:
        yield
    finally:
        _compiled_later.reset(token)


class _LaterPlan:
    """A plan that compiles its view at the first look at it."""

    def __init__(self, app: App, name: str) -> None:
        self._app, self._name = app, name

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._app.view_plan(self._name), attribute)


class App:
    """A project's entity types and the views that are kept of them.

    Declaring is pure: nothing is started, read or written until a command or a library call
    takes the app and a :class:`~everstate.config.Config`. Every entity type is kept as `latest`
    and `history`; :meth:`view` adds views in SQL.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._entities: dict[str, EntityType] = {}
        self._views: dict[str, ViewDefinition] = {}
        self._plans: dict[str, ViewPlan] = {}
        self._without_history: set[str] = set()
        self._sources: dict[str, Source] = {}
        self._command_groups: dict[str, CommandGroup] = {}
        self._processes: dict[str, ProcessManager] = {}
        self._captures: dict[str, Capture] = {}
        self._debezium_forms: list[str] = []

    @property
    def entities(self) -> Mapping[str, EntityType]:
        """Entity types by name, in the order in which they were registered."""
        return MappingProxyType(self._entities)

    @property
    def views(self) -> Mapping[str, ViewPlan]:
        """Compiled SQL views by name, in the order in which they were declared."""
        for name in self._views:
            self.view_plan(name)
        return MappingProxyType({name: self._plans[name] for name in self._views})

    def keeps_history(self, entity: str) -> bool:
        """Whether every version of an entity type's entities is kept in the store."""
        return entity not in self._without_history

    def entity(
        self,
        name: str,
        *,
        key: str,
        schema_version: int = 1,
        history: bool = True,
        source: Source = "store",
    ) -> Callable[[M], M]:
        """Register a pydantic model as the entity type ``name``; used as a decorator.

        ``key`` names the field or property that identifies an entity. ``history=False`` keeps
        only the newest version of each in the store, which costs a third as much; older ones are
        in the archive, and duplicates of them cannot be told from conflicts (C6). ``source`` is
        its source of truth, which assigns versions: there is exactly one. With ``"log"`` its
        entities are events: immutable facts, never changed, each with the key that its writer
        gave it.

        Raises InvalidEntityType when the name is taken (an entity type has one source of truth),
        there is no such source, or a field has no column type.
        """
        if source not in get_args(Source):
            raise InvalidEntityType(
                f"{name}: there is no source of truth {source!r}",
                advice=f"Use one of {', '.join(get_args(Source))}.",
            )

        def register(model: M) -> M:
            if name in self._entities:
                raise InvalidEntityType(
                    f"entity type {name!r} is registered already, "
                    f"and its source of truth is {self._sources[name]!r}",
                    advice="An entity type has exactly one model and one source of truth.",
                )
            entity_type = EntityType(name, model, key, schema_version)
            self._check_entity_name(name)
            self._entities[name] = entity_type
            self._sources[name] = source
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
        self._views[name] = ViewDefinition(name, sql)
        if _compiled_later.get():
            return cast("ViewPlan", _LaterPlan(self, name))
        try:
            return self.view_plan(name)
        except EverstateError:
            del self._views[name]
            raise

    def _taken(self) -> set[str]:
        """Names that readers of the views' schema find already."""
        return {n for entity in self._entities for n in names_of_entity(entity)} | set(self._views)

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
        return tuple(plan for plan in self.views.values() if plan.entity == entity)

    def view_plan(self, name: str) -> ViewPlan:
        """SQL view of that name; raises UnknownView."""
        if name not in self._views:
            raise UnknownView(name, tuple(self._views))
        if name not in self._plans:
            # Imported here: the SQL parser takes a fifth of a second, for who has no views too.
            from everstate.views.plan import compile_view

            self._plans[name] = compile_view(self._views[name], self._entities)
        return self._plans[name]

    def source_of(self, name: str) -> Source:
        """Source of truth of an entity type; raises UnknownEntity."""
        return self._sources[self.entity_type(name).name]

    def entities_from(self, source: Source) -> tuple[EntityType, ...]:
        """Entity types that have this source of truth."""
        return tuple(e for name, e in self._entities.items() if self._sources[name] == source)

    def check_source(self, name: str, source: Source) -> EntityType:
        """The entity type, when ``source`` is its source of truth; called before it is written.

        Raises WrongSource for another one, and UnknownEntity.
        """
        declared = self.source_of(name)
        if declared != source:
            raise WrongSource(name, declared, source)
        return self._entities[name]

    def truths(self, config: Config) -> dict[str, Truth]:
        """Entity types whose source of truth can be compared with the log, each with it.

        Opens no connection; raises InvalidConfig while the store has no address.
        """
        found: dict[str, Truth] = {}
        for each in self.entities_from("store"):
            found[each.name] = PostgresTruth.of(config, each.name, each.schema_version)
        if in_cassandra := self.entities_from("cassandra"):
            # Imported here: the driver is an extra.
            from everstate.sources.crud.stores.cassandra.truth import CassandraTruth

            for each in in_cassandra:
                found[each.name] = CassandraTruth(config, each.name, each.schema_version)
        return found

    @property
    def command_groups(self) -> Mapping[str, CommandGroup]:
        """Handler groups by the name of their entity type."""
        return MappingProxyType(self._command_groups)

    @property
    def processes(self) -> Mapping[str, ProcessManager]:
        """Process managers by name."""
        return MappingProxyType(self._processes)

    def commands(
        self,
        entity: str,
        *,
        decide: Decide,
        evolve: Evolve,
        commands: Sequence[type[BaseModel]],
    ) -> CommandGroup:
        """Have an entity type (``source="commands"``) decided by commands: event sourcing.

        ``decide(state, command)`` gives the facts that follow (one, several, or ``None``), or
        raises Rejected; ``evolve(state, fact)`` gives the state after a fact, ``None`` when the
        entity is deleted by it. Both are pure: time and ids come with the command. ``commands``
        are the models that it takes; facts are pydantic models or dataclasses.

        Raises UnknownEntity, and InvalidEntityType when the entity type has another source of
        truth or a handler group already.
        """
        if self.source_of(entity) != "commands":
            raise InvalidEntityType(
                f"{entity}: its source of truth is {self.source_of(entity)!r}",
                advice='Register it with source="commands".',
            )
        if entity in self._command_groups:
            raise InvalidEntityType(f"{entity}: its commands are declared already")
        group = CommandGroup(self.entity_type(entity), decide, evolve, tuple(commands))
        self._command_groups[entity] = group
        return group

    def process(
        self, name: str, *, on: Sequence[str], react: React, start: Start = "beginning"
    ) -> ProcessManager:
        """Declare a process manager: ``react(change)`` gives the commands that follow a change.

        ``on`` names the entity types whose changes it follows; ``start`` says where a new one
        begins. Raises UnknownEntity, and InvalidEntityType when the name is taken or no name.
        """
        for entity in on:
            self.entity_type(entity)
        if name in self._processes:
            raise InvalidEntityType(f"process manager {name!r} is declared already")
        # Imported here: it loads the client of Kafka.
        from everstate.sources.commands.process import ProcessManager

        self._processes[name] = ProcessManager(name, tuple(on), react, start)
        return self._processes[name]

    @property
    def captures(self) -> Mapping[str, Capture]:
        """Declared captures by name."""
        return MappingProxyType(self._captures)

    def capture(
        self, name: str, *, kind: Kind, tables: Mapping[str, Table] | None = None, **options: Any
    ) -> Capture:
        """Declare that tables of another system's database are captured as entity types.

        ``options`` are the other fields of :class:`~everstate.sources.cdc.declaration.Capture`;
        among them ``outbox``, instead of ``tables``: an outbox table, whose rows are changes.
        Raises InvalidCapture when an entity type is not registered, has a source of truth
        already, or lacks a field that the declaration names.
        """
        capture = Capture(name=name, kind=kind, tables=tables or {}, **options)
        if name in self._captures:
            raise InvalidCapture(name, "it is declared already", advice="Choose another name.")
        check_declaration(capture, self._entities)
        taken = {entity for other in self._captures.values() for entity in other.entities}
        for entity in capture.entities:
            if entity in taken:
                raise InvalidCapture(name, f"{entity} has another capture as its source of truth")
            if self._sources[entity] != "capture":
                raise InvalidCapture(
                    name,
                    f"the source of truth of {entity} is {self._sources[entity]!r}",
                    advice='Register it with source="capture".',
                )
        self._captures[name] = capture
        return capture

    def capture_of(self, name: str) -> Capture:
        """Capture of that name; raises UnknownCapture."""
        if name not in self._captures:
            raise UnknownCapture(name, tuple(self._captures))
        return self._captures[name]

    def cleaning(self, config: Config, name: str) -> Cleaning:
        """What cleans a declared capture; the caller closes it. Raises UnknownCapture."""
        # Imported here: what reads and writes the log is of no use to one who only declares.
        from everstate.sources.cdc.asking import asker_of
        from everstate.sources.cdc.cleaning import Cleaning
        from everstate.sources.cdc.outbox_cleaning import OutboxCleaning

        capture = self.capture_of(name)
        if capture.outbox is not None:
            return OutboxCleaning(config, capture, self._entities)
        return Cleaning(config, capture, self._entities, asker=asker_of(config, capture))

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
