"""App: declares a project's entity types and views; the main class of the public API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_network
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.changes.derived import Derivation, Form
from everstate.changes.keys import NAME
from everstate.changes.tokens import written_token
from everstate.changes.triggers import Trigger
from everstate.config import Config, load
from everstate.declarations.captures import Capture, DatabaseKind, Table, check_declaration
from everstate.declarations.commands import CommandGroup, Decide, Evolve
from everstate.declarations.handlers import Function, Handler, Prepared
from everstate.declarations.processes import ProcessManager, ProcessStart, React
from everstate.declarations.source import Source
from everstate.errors import (
    InvalidCapture,
    InvalidDerivation,
    InvalidEntityType,
    InvalidHandler,
    UnknownCapture,
    UnknownEntity,
    WrongSource,
)
from everstate.views.declaring import Declares
from everstate.views.names import names_of_entity, refused_name

if TYPE_CHECKING:
    from everstate.log.derived import DerivedReader
    from everstate.serving import Reader
    from everstate.serving.changes import Changes
    from everstate.serving.merged import MergedChanges
    from everstate.serving.snapshots import Snapshot
    from everstate.serving.table import EntityTable

M = TypeVar("M", bound=type[BaseModel])
F = TypeVar("F", bound=Callable[[Any], Any])
G = TypeVar("G", bound=Function | Prepared)


class App(Declares):
    """A project's entity types and the views that are kept of them.

    Declaring is pure: nothing is started, read or written until a command or a library call
    uses the app with a :class:`~everstate.config.Config`. Every entity type has the views `latest`
    and `history`; :meth:`view` adds views in SQL.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._entities: dict[str, EntityType] = {}
        self._without_history: set[str] = set()
        self._sources: dict[str, Source] = {}
        self._command_groups: dict[str, CommandGroup] = {}
        self._processes: dict[str, ProcessManager] = {}
        self._handlers: dict[str, Handler] = {}
        self._captures: dict[str, Capture] = {}
        self._debezium_forms: list[str] = []
        self._derivations: dict[str, Derivation] = {}

    @property
    def entities(self) -> Mapping[str, EntityType]:
        """Entity types by name, in the order in which they were registered."""
        return MappingProxyType(self._entities)

    def keeps_history(self, entity: str) -> bool:
        """Whether every version of an entity type's entities is kept in the store."""
        return entity not in self._without_history

    def entity(
        self,
        name: str,
        *,
        key: str,
        schema_version: int = 1,
        removed: Sequence[str] = (),
        history: bool = True,
        source: Source = "store",
    ) -> Callable[[M], M]:
        """Register a pydantic model as the entity type ``name``; used as a decorator.

        ``key`` names the field or property that identifies an entity. ``removed`` names fields
        that the model had once, and whose values a write drops from the state that it replaces;
        other fields that the model does not have are kept there. ``history=False`` keeps
        only the newest version of each in the store, which costs a third as much; older ones are
        in the archive, and duplicates of them cannot be distinguished from conflicts (C6).
        ``source`` is its source of truth, which assigns versions: there is exactly one. With
        ``"log"`` its entities are events: immutable facts, each with the key that its writer gave
        it.

        Raises InvalidEntityType when the name is taken (an entity type has one source of truth),
        the source is unknown, or a field has no column type.
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
            entity_type = EntityType(name, model, key, schema_version, tuple(removed))
            self._check_entity_name(name)
            self._entities[name] = entity_type
            self._sources[name] = source
            if not history:
                self._without_history.add(name)
            return model

        return register

    def _taken(self) -> set[str]:
        """Names that exist already in the views' schema."""
        entities = {n for entity in self._entities for n in names_of_entity(entity)}
        return entities | set(self._views) | set(self._derivations)

    def _check_entity_name(self, name: str) -> None:
        """Raise InvalidEntityType when the table names of an entity type are in use."""
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

    def source_of(self, name: str) -> Source:
        """Source of truth of an entity type; raises UnknownEntity."""
        return self._sources[self.entity_type(name).name]

    def entities_from(self, source: Source) -> tuple[EntityType, ...]:
        """Entity types that have this source of truth."""
        return tuple(e for name, e in self._entities.items() if self._sources[name] == source)

    def check_source(self, name: str, source: Source) -> EntityType:
        """The entity type, if ``source`` is its source of truth; call it before a write.

        Raises WrongSource if it has another one, and UnknownEntity.
        """
        declared = self.source_of(name)
        if declared != source:
            raise WrongSource(name, declared, source)
        return self._entities[name]

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

        ``decide(state, command)`` returns the facts that follow (one, several, or ``None``), or
        raises Rejected; ``evolve(state, fact)`` returns the state after a fact, ``None`` when the
        fact deletes the entity. Both are pure: time and ids come with the command. ``commands``
        are the models of its commands; facts are pydantic models or dataclasses.

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
        self, name: str, *, on: Sequence[str], react: React, start: ProcessStart = "beginning"
    ) -> ProcessManager:
        """Declare a process manager: ``react(change)`` returns the commands that follow a change.

        ``on`` names the entity types whose changes it reads; ``start`` is the position at which a
        new one starts. Raises UnknownEntity, and InvalidEntityType when the name is taken or not
        valid.
        """
        for entity in on:
            self.entity_type(entity)
        if name in self._processes:
            raise InvalidEntityType(f"process manager {name!r} is declared already")
        self._processes[name] = ProcessManager(name, tuple(on), react, start)
        return self._processes[name]

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers by group and name, such as ``billing.welcome``."""
        return MappingProxyType(self._handlers)

    def handler(
        self, entity: str, *, group: str, name: str | None = None, **options: Any
    ) -> Callable[[G], G]:
        """Call ``function(change, context)`` for each accepted change; used as a decorator.

        ``options`` are the other fields of :class:`~everstate.declarations.handlers.Handler`;
        ``name`` default: that of the function. Raises UnknownEntity, InvalidTrigger, and
        InvalidHandler with the reason, such as a name that the group has already.
        """
        entity_type = self.entity_type(entity)

        def register(function: G) -> G:
            given = options | {"name": name or getattr(function, "__name__", None)}
            handler = Handler(entity_type=entity_type, group=group, function=function, **given)
            if handler.title in self._handlers:
                raise InvalidHandler(handler.title, "it is declared already; give another name=.")
            self._handlers[handler.title] = handler
            return function

        return register

    def webhook(
        self,
        entity: str,
        *,
        url: str,
        secret: str,
        group: str = "webhooks",
        name: str | None = None,
        allow: Sequence[str] = (),
        unmasked: bool = False,
        timeout_s: float = 15.0,
        **options: Any,
    ) -> None:
        """Post each accepted change to ``url``, signed as Standard Webhooks says, by a handler.

        ``secret``: one or several of the form ``whsec_…``, with spaces in between; variables of the
        environment (``$NAME``) are replaced in both. ``name`` default: that of the entity type.
        ``allow``: networks, such as ``10.1.0.0/16``, of the receiver's address if it is not public.
        ``unmasked``: the receiver sees the fields of ``api.masks``, too. ``timeout_s``: limit of a
        request. ``options`` and errors as in :meth:`handler`.
        """
        from everstate.handling.webhooks import RETRIES, Webhook

        title = name or entity
        try:
            webhook = Webhook(url, secret, tuple(map(ip_network, allow)), unmasked, timeout_s)
        except ValueError as error:
            raise InvalidHandler(f"{group}.{title}", f"allow: {error}.") from error
        given = RETRIES | {"timeout_s": 2 * timeout_s} | options
        self.handler(entity, group=group, name=title, **given)(webhook)

    @property
    def captures(self) -> Mapping[str, Capture]:
        """Declared captures by name."""
        return MappingProxyType(self._captures)

    def capture(
        self,
        name: str,
        *,
        kind: DatabaseKind,
        tables: Mapping[str, Table] | None = None,
        **options: Any,
    ) -> Capture:
        """Declare that tables of another system's database are captured as entity types.

        ``options`` are the other fields of :class:`~everstate.declarations.captures.Capture`;
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

    @property
    def derivations(self) -> Mapping[str, Derivation]:
        """Declared derived topics by name."""
        return MappingProxyType(self._derivations)

    def derive(
        self, name: str, form: Form, *, raw: bool = False, when: Trigger | None = None
    ) -> Derivation:
        """Declare a derived topic: what each change of an entity type becomes in another topic.

        ``form`` is `patch_of("flight")`, `notices_of("flight")` or `joined("scan", to="flight",
        on="flight_id")` of :mod:`everstate.changes.derived`. Records are made from accepted
        changes, exactly once. With ``raw`` they are made directly from the log, milliseconds after
        a change and whatever the core says of it: readers must skip versions that they have. With
        ``when`` only changes that fire the trigger make records.

        Raises InvalidDerivation with the reason, such as a name that is taken, or a field that the
        entity type does not have.
        """
        derivation = Derivation(name, form, raw, when)
        try:
            self._check_derivation(derivation)
        except InvalidDerivation as refusal:
            self._refuse(refusal)
        else:
            self._derivations[name] = derivation
        return derivation

    def _check_derivation(self, derivation: Derivation) -> None:
        name = derivation.name
        reason = None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            reason = f"the name must match {NAME.pattern}"
        elif name in self._taken():
            reason = "the name is taken."
        if reason := reason or refused_name(name):
            raise InvalidDerivation(name, reason, advice="Choose another name.")
        derivation.check(self._entities)
        to = getattr(derivation.form, "to", None)
        if to is not None and not self.keeps_history(to):
            raise InvalidDerivation(
                name,
                f"a join with {to} needs its history, which is not kept (history=False).",
                advice="Register it with its history.",
            )

    def read(
        self,
        config: Config,
        name: str,
        *,
        start: Literal["beginning", "now"] = "beginning",
        token: str | None = None,
    ) -> DerivedReader:
        """A reader of a derived topic by its public name, whatever version is published.

        It starts at the topic's beginning, now, or after the record that a ``token`` came with; the
        caller closes it. Raises InvalidDerivation for a name that is not declared, NotFound while
        it is not published, InvalidToken.
        """
        if name not in self._derivations:
            known = ", ".join(self._derivations) or "none"
            raise InvalidDerivation(name, f"it is not declared (declared: {known}).")
        # Imported here: it loads the client of Kafka.
        from everstate.log.derived import DerivedReader

        is_raw = self._derivations[name].is_raw
        return DerivedReader(config, name, start=start, token=token, is_raw=is_raw)

    @property
    def debezium_forms(self) -> tuple[str, ...]:
        """Entity types that are also published in Debezium's format."""
        return tuple(self._debezium_forms)

    def publish_debezium(self, entity: str) -> None:
        """Publish an entity type also in Debezium's format, on ``<prefix>.<entity>.debezium.g1``.

        Raises UnknownEntity.
        """
        self.entity_type(entity)
        if entity not in self._debezium_forms:
            self._debezium_forms.append(entity)

    def reader(self, config: Config | None = None) -> Reader:
        """A reader of the views, which threads may share; close it.

        ``config`` ``None``: that of the working folder, with the addresses of running servers.
        """
        # Imported here, as below: an app that only declares does not need it.
        from everstate.serving import Reader

        return Reader(config or _config_here("postgres"), self)

    def snapshot(
        self,
        view: str,
        *,
        wait_for: str | None = None,
        wait_s: float = 10.0,
        config: Config | None = None,
    ) -> Snapshot:
        """All rows of a view, and the token from which its entity's :meth:`changes` continue.

        See :func:`everstate.serving.snapshots.read_snapshot`; ``config`` as for :meth:`reader`.
        """
        from everstate.serving.snapshots import read_snapshot

        given = config or _config_here("postgres")
        return read_snapshot(given, self, view, wait_for=wait_for, wait_s=wait_s)

    def changes(
        self,
        entity: str | Sequence[str],
        *,
        since: str,
        until: str | None = None,
        raw: bool = False,
        config: Config | None = None,
    ) -> Changes | MergedChanges:
        """Accepted changes after a token or a time, from the ``"beginning"`` or ``"now"`` on.

        Of one entity type (:class:`everstate.serving.changes.Changes`), or of several as one stream
        with one token (:class:`everstate.serving.merged.MergedChanges`). ``config`` as for
        :meth:`reader`.
        """
        from everstate.serving.changes import Changes
        from everstate.serving.merged import MergedChanges

        given = config or _config_here("kafka", "postgres")
        if isinstance(entity, str):
            return Changes(given, self, entity, since=since, until=until, raw=raw)
        return MergedChanges(given, self, entity, since=since, until=until, raw=raw)

    def table(self, entity: str, config: Config | None = None) -> EntityTable:
        """The present entities of a type in memory, kept up to date from the log; close it.

        See :class:`everstate.serving.table.EntityTable`; ``config`` as for :meth:`reader`. Raises
        UnknownEntity.
        """
        from everstate.serving.table import EntityTable

        given = config or _config_here("kafka")
        return EntityTable(given, self.name, self.entity_type(entity))

    def token(self, entity: str, key: str, version: int) -> str:
        """A token for a version that was written, for ``wait_for``; raises UnknownEntity.

        A write returns its version before its change is in the log and in the views.
        """
        self.entity_type(entity)
        return str(written_token(self.name, entity, key, version))


def _config_here(*needs: str) -> Config:
    """The settings of the working folder, with the addresses of running servers."""
    from everstate.local import resolve

    return resolve(load(), needs=needs)
