"""Derived topics: what each accepted change of an entity type becomes in a topic of its own. Pure.

A form makes a record's value from the texts of one message. It needs no state between messages,
because a message has the entity before and after. A record has the key of its change, and headers
that identify that change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import msgspec

from everstate.changes.codec import Headers, headers_of
from everstate.changes.entity import NO_KEYS, EntityType
from everstate.changes.json_numbers import number_of
from everstate.changes.json_patch import JSON_PATCH, json_patch
from everstate.changes.keys import OwnKey
from everstate.changes.triggers import Trigger, field_of, trigger_of
from everstate.errors import InvalidDerivation, InvalidTrigger

_FORMAT: Final = 1
"""Increased when the same declaration makes other records; every topic is then built again."""
_BY_VALUES_FORMAT: Final = 2
"""The same for accepted changes whose records depend on values: by a trigger, or by a join."""
JSON: Final = "application/json"
VERSION, KIND, OFFSET = "everstate_version", "everstate_kind", "everstate_offset"
PROVENANCE, BARRIER = "everstate_provenance", "everstate_barrier"
"""Headers of derived records, in addition to those of CloudEvents."""
_NULL: Final = msgspec.Raw(b"null")


class Message(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The parts of an accepted change's message, as texts that are copied without being parsed."""

    id: str
    key: str
    version: int
    kind: str
    recorded_at: str
    occurred_at: str
    provenance: msgspec.Raw
    event: msgspec.Raw = _NULL
    current_entity_state: msgspec.Raw = _NULL
    original_entity_state: msgspec.Raw = _NULL


class _Service(msgspec.Struct, frozen=True, rename="camel", gc=False):
    service_name: str


class _Event(msgspec.Struct, frozen=True, gc=False):
    type: str | None = None


class Joined(NamedTuple):
    """An entity at an earlier time: version (0: it did not exist), and state as JSON text."""

    version: int
    state: bytes
    position: tuple[tuple[int, int], ...]
    """(Partition, next offset) pairs: how far its history had been read."""


_read = msgspec.json.Decoder(Message).decode
_service = msgspec.json.Decoder(_Service).decode
_event = msgspec.json.Decoder(_Event | None).decode
_state = msgspec.json.Decoder(dict[str, Any] | None, float_hook=number_of).decode
_text = msgspec.json.Encoder().encode


def read_message(value: bytes) -> Message:
    """The parts of a message; raises msgspec.DecodeError."""
    return _read(value)


@dataclass(frozen=True, slots=True)
class Patches:
    """Each change as a JSON Patch (RFC 6902) of original → current."""

    kind: ClassVar[str] = "json patch"
    """Name of this form in `views list`."""
    content_type: ClassVar[str] = JSON_PATCH
    entity: str

    @property
    def definition(self) -> dict[str, Any]:
        """The entity type."""
        return {"patch_of": self.entity}

    def value(self, message: Message, joined: Joined | None) -> bytes | None:
        """The patch; `[]` for a change that changes nothing."""
        original, current = message.original_entity_state, message.current_entity_state
        return json_patch(bytes(original), bytes(current))


@dataclass(frozen=True, slots=True)
class Notices:
    """Compaction notices: the old value that a key's next record replaces in a compacted topic."""

    kind: ClassVar[str] = "notices"
    content_type: ClassVar[str] = JSON
    entity: str

    @property
    def definition(self) -> dict[str, Any]:
        """The entity type."""
        return {"notices_of": self.entity}

    def value(self, message: Message, joined: Joined | None) -> bytes | None:
        """Key, old and new state of an updated or deleted entity; a created one has no notice."""
        old = bytes(message.original_entity_state)
        if old == b"null":
            return None
        new = bytes(message.current_entity_state)
        return b'{"key":%b,"old":%b,"new":%b}' % (_text(message.key), old, new)


@dataclass(frozen=True, slots=True)
class JoinedStream:
    """Each record of an entity type, joined with another entity's state at the record's time."""

    kind: ClassVar[str] = "joined"
    content_type: ClassVar[str] = JSON
    entity: str
    to: str
    on: str

    @property
    def definition(self) -> dict[str, Any]:
        """Both entity types, and the field that holds the other entity's key."""
        return {"stream": self.entity, "to": self.to, "on": self.on}

    def own_key(self, entity_types: Mapping[str, EntityType]) -> OwnKey:
        """How the other entity's key is read from a record: as it is from that entity's states."""
        own = entity_types[self.to].own_key
        (field,) = (f for f in entity_types[self.entity].columns if f.written == self.on)
        kind = str(field.tree.type) if own is None else own.type
        return OwnKey(self.on, kind, field.former)

    def wanted(self, own_key: OwnKey, message: Message) -> tuple[str, datetime] | None:
        """Key of the entity that a record is joined with, and the time; ``None``: it names none."""
        current = _state(message.current_entity_state)
        state = _state(message.original_entity_state) if current is None else current
        found = own_key.of(state or {})
        if found is None:
            return None
        return own_key.text(found), datetime.fromisoformat(message.occurred_at)

    def value(self, message: Message, joined: Joined | None) -> bytes | None:
        """The record's own state, and the entity with its version (0: it did not exist)."""
        own = bytes(message.current_entity_state)
        if joined is None:
            return b'{%b:%b,"joined":null}' % (_text(self.entity), own)
        entity, version = _text(self.to), joined.version
        position = _text({str(part): at for part, at in joined.position})
        about = b'{"entity":%b,"version":%d,"position":%b}' % (entity, version, position)
        return b'{%b:%b,%b:%b,"joined":%b}' % (
            *(_text(self.entity), own, entity, joined.state),
            about,
        )


Form: TypeAlias = Patches | Notices | JoinedStream


def patch_of(entity: str) -> Patches:
    """Each change of an entity type as the JSON Patch that turns its original into its current."""
    return Patches(entity)


def notices_of(entity: str) -> Notices:
    """Key, old and new of each entity that is updated or deleted."""
    return Notices(entity)


def joined(stream: str, *, to: str, on: str) -> JoinedStream:
    """Each record of ``stream`` with the entity ``to`` whose key is in the record's field ``on``.

    The entity has the state of the time when the record occurred: its newest version in the
    history read so far whose time is not later.
    """
    return JoinedStream(stream, to, on)


@dataclass(frozen=True)
class Derivation:
    """A declared derived topic: its name, its form, and which changes it takes."""

    name: str
    form: Any
    """A :data:`Form`."""
    is_raw: bool = False
    """Made from all changes in the log, instead of from those that the core accepts."""
    trigger: Trigger | None = None
    fields: tuple[str, ...] = field(default=(), init=False)
    """Same attribute as a view's fields named in SQL; empty, because messages are not parsed."""
    inputs: tuple[str, ...] = field(default=(), init=False)
    """Same attribute as a view's; empty, because a topic reads no views."""

    @property
    def entity(self) -> str:
        """Entity type whose changes it takes."""
        return str(self.form.entity)

    @property
    def kind(self) -> str:
        """Name of this kind of topic in `views list`."""
        return f"{self.form.kind}, raw" if self.is_raw else str(self.form.kind)

    @property
    def definition(self) -> Mapping[str, Any]:
        """The declaration as the registry stores it."""
        told: dict[str, Any] = {"derives": self.form.definition, "raw": self.is_raw}
        if self.trigger is not None:
            told["when"] = self.trigger.definition
        return told

    @property
    def fingerprint(self) -> str:
        """Equal for declarations that make the same records."""
        is_by_values = self.trigger is not None or isinstance(self.form, JoinedStream)
        form = _BY_VALUES_FORMAT if is_by_values and not self.is_raw else _FORMAT
        told = json.dumps([form, self.definition], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def check(self, entity_types: Mapping[str, EntityType]) -> None:
        """Raise InvalidDerivation for an unknown entity type or field, and for what is no form."""
        if not isinstance(self.form, (Patches, Notices, JoinedStream)):
            raise InvalidDerivation(
                self.name,
                f"{self.form!r} is no form of a derived topic.",
                advice="Write patch_of(…), notices_of(…) or joined(…).",
            )
        for entity in (self.form.entity, getattr(self.form, "to", self.entity)):
            if not isinstance(entity, str) or entity not in entity_types:
                known = ", ".join(entity_types) or "none"
                raise InvalidDerivation(
                    self.name, f"unknown entity type {entity!r} (registered: {known})."
                )
        if self.trigger is not None and not isinstance(self.trigger, Trigger):
            raise InvalidDerivation(
                self.name,
                "when has no condition on a change.",
                advice='Write when=when("field").changes().',
            )
        try:
            if self.trigger is not None:
                self.trigger.check(entity_types[self.entity])
            if isinstance(self.form, JoinedStream):
                field_of(entity_types[self.entity], (str(self.form.on),))
        except InvalidTrigger as cause:
            raise InvalidDerivation(self.name, cause.message, advice=cause.advice) from cause
        if isinstance(self.form, JoinedStream):
            self._check_join(self.form, entity_types)

    def _check_join(self, form: JoinedStream, entity_types: Mapping[str, EntityType]) -> None:
        if form.to == form.entity:
            raise InvalidDerivation(
                self.name,
                f"a record would have the name {form.to} twice: for itself and for the other one.",
                advice="Join with another entity type.",
            )
        if "joined" in (form.entity, form.to):
            raise InvalidDerivation(
                self.name,
                "a record has everstate's own member 'joined', so no entity type of a joined "
                "stream can have this name.",
                advice="Register the entity type under another name.",
            )
        kind = entity_types[form.entity].shape["fields"][form.on]["type"]
        if kind in NO_KEYS:
            raise InvalidDerivation(
                self.name,
                f"the field {form.on} is a {kind}, and no entity has such a key.",
                advice=f"Name the field that has the key of {form.to}.",
            )
        if self.is_raw:
            raise InvalidDerivation(
                self.name,
                "a joined stream reads the other entity's history, which is of accepted changes.",
                advice="Leave raw=True out.",
            )

    def takes(self, entity_type: EntityType, message: Message) -> bool:
        """Whether a change fires the trigger; always true without a trigger."""
        if self.trigger is None:
            return True
        states = (message.original_entity_state, message.current_entity_state)
        return self.trigger.fires(entity_type, *map(_state, states))

    def headers(self, message: Message, offset: int) -> Headers:
        """Headers that identify the change of a record.

        CloudEvents headers, and version, kind, offset and provenance of the change.
        """
        told = _event(message.event)
        event = None if told is None else told.type
        service = _service(message.provenance).service_name
        about = (self.entity, message.id, message.key, message.kind, message.recorded_at)
        found = headers_of(*about, service, event)[:-1]
        found += [
            ("content-type", self.form.content_type.encode()),
            (VERSION, str(message.version).encode()),
            (KIND, message.kind.encode()),
            (OFFSET, str(offset).encode()),
            (PROVENANCE, bytes(message.provenance)),
        ]
        return found


def derivation_of(name: str, definition: Mapping[str, Any]) -> Derivation:
    """The derivation that has this definition; raises InvalidDerivation when its form is unknown.

    A process that gets this error for a version of another release or app leaves it unchanged.
    """
    derives = definition.get("derives", {})
    form: Any
    if "patch_of" in derives:
        form = Patches(derives["patch_of"])
    elif "notices_of" in derives:
        form = Notices(derives["notices_of"])
    elif "stream" in derives:
        form = JoinedStream(**{name: derives[told] for name, told in _JOINED.items()})
    else:
        raise InvalidDerivation(
            name, f"{dict(definition)} is not known to this version of everstate."
        )
    told = definition.get("when")
    trigger = None if told is None else trigger_of(told)
    return Derivation(name, form, bool(definition.get("raw")), trigger)


_JOINED: Final = {"entity": "stream", "to": "to", "on": "on"}
