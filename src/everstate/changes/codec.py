"""The JSON form of a change (see docs/reference/envelope.md), and its CloudEvents headers.

States are JSON text inside the envelope. They are cut out and put back without being parsed, so
encoding costs little more than the model's own serialisation, and numbers keep their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import msgspec

from everstate.changes.change import Change, DomainEvent, Kind, Provenance, SourceTransaction
from everstate.changes.depth import TOO_DEEP, bounded, is_too_deep
from everstate.changes.entity import EntityType, holds_nul
from everstate.changes.json_numbers import decode as decode_json
from everstate.changes.json_numbers import encode as encode_json
from everstate.changes.keys import check_key
from everstate.changes.moments import check_moment, is_finer, moment_fault, with_minutes
from everstate.errors import ChangeTooLarge, InvalidChange, MissingProvenance

Headers: TypeAlias = list[tuple[str, bytes]]
"""Header names with their UTF-8 values, in the order in which they are written."""

NULL = msgspec.Raw(b"null")


class WireProvenance(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """`provenance` as written."""

    api_version: str
    service_name: str
    identifier: str
    actor: str | None = None
    reason: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    transaction: SourceTransaction | None = None


class _WireHead(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The envelope's first fields, in wire order; their encoding shows where id and times are."""

    id: UUID
    entity: str
    schema_version: int
    key: str
    version: int
    kind: Kind
    occurred_at: datetime
    recorded_at: datetime


class WireChange(_WireHead, frozen=True, kw_only=True, rename="camel", gc=False):
    """The envelope as written; both states and the event stay JSON text.

    The order of the fields is the order on the wire.
    """

    event: msgspec.Raw = NULL
    provenance: WireProvenance
    current_entity_state: msgspec.Raw = NULL
    original_entity_state: msgspec.Raw = NULL


class ReadySource(NamedTuple):
    """The provenance that a writer's changes share, encoded once.

    ``json`` ends before the field ``transaction``.
    """

    provenance: Provenance
    json: bytes
    header: tuple[str, bytes]


# Which states a change of each kind has: (current, original).
_STATES = {
    Kind.CREATED: (True, False),
    Kind.UPDATED: (True, True),
    Kind.DELETED: (False, True),
    Kind.EVENT: (True, False),
}
_ID_START = len(b'{"id":"')
_ID_END = _ID_START + 36
_NAMES_BYTES_MAX = 16_384
"""Limit for texts that headers repeat: a producer has little room besides the message's value."""
_SPEC_VERSION = ("ce_specversion", b"1.0")
_CONTENT_TYPE = ("content-type", b"application/json")

WIRE_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(WireChange))

_decode = bounded(msgspec.json.Decoder(WireChange).decode)
_decode_fields = bounded(msgspec.json.Decoder(dict[str, msgspec.Raw]).decode)


def decode_wire(value: bytes) -> WireChange:
    """Read an envelope without parsing its states.

    Raises msgspec.DecodeError (or its ValidationError) with the reason; callers that know the
    record's partition and offset translate it.
    """
    return _decode(value)


def check_provenance(entity: str, key: str | None, provenance: Provenance | None) -> Provenance:
    """Return the provenance when its required fields are not empty.

    Raises MissingProvenance naming the field otherwise.
    """
    if provenance is None:
        raise MissingProvenance(entity, key, "provenance")
    for field in ("api_version", "service_name", "identifier"):
        if not getattr(provenance, field):
            raise MissingProvenance(entity, key, f"provenance.{field}")
    return provenance


def headers_of(
    entity: str,
    change_id: str,
    key: str,
    kind: str,
    recorded_at: str,
    service_name: str,
    event_type: str | None = None,
    traceparent: str | None = None,
) -> Headers:
    """CloudEvents 1.0 headers of a change, Kafka binary mode."""
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", change_id.encode()),
        ("ce_source", service_name.encode()),
        ("ce_type", (event_type or f"{entity}.{kind}").encode()),
        ("ce_time", recorded_at.encode()),
        ("ce_subject", key.encode()),
        ("content-type", b"application/json"),
    ]
    if traceparent is not None:
        headers.append(("traceparent", traceparent.encode()))
    return headers


class ChangeCodec:
    """Encodes and decodes the changes of one entity type.

    States may be models of the entity type, mappings, or JSON bytes, which are not changed.
    Decoding gives mappings, so that fields which a newer writer added are kept.

    Every way in encodes with it, so the rules that each message must keep are here: the rules of
    keys, sizes, depth and, with ``ahead_hours`` (`log.occurred_ahead_hours`), how far a change's
    time may be ahead of the time at which it was recorded.
    """

    def __init__(
        self,
        entity_type: EntityType,
        *,
        message_bytes_max: int = 1_048_576,
        ahead_hours: float | None = None,
    ) -> None:
        self.entity_type = entity_type
        self.message_bytes_max = message_bytes_max
        self._ahead_hours = ahead_hours
        self._types = {
            kind: ("ce_type", f"{entity_type.name}.{kind.value}".encode()) for kind in Kind
        }
        self._source: ReadySource | None = None

    def encode(self, change: Change[Any]) -> tuple[bytes, bytes, Headers]:
        """Key, value and headers of a change, as they go to Kafka.

        Raises InvalidChange (key, kind against states, NaN, NUL, depth, times), MissingProvenance,
        or ChangeTooLarge before anything is written. Cost: the models' own serialisation and about
        2 µs.
        """
        check_shape(change)
        recorded_at = with_minutes(change.recorded_at)
        occurred_at = with_minutes(change.occurred_at)
        if fault := moment_fault(recorded_at):
            raise InvalidChange(change.entity, change.key, "recordedAt", fault)
        check_moment(change.entity, change.key, occurred_at, self._ahead_hours, recorded_at)
        source = self._source
        if source is None or source.provenance is not change.provenance:
            source = self._source = ready_source(change.entity, change.key, change.provenance)
        entity, key = change.entity, change.key
        head = encode_json(
            _WireHead(
                change.id,
                entity,
                change.schema_version,
                key,
                change.version,
                change.kind,
                occurred_at,
                recorded_at,
            )
        )
        block = change.transaction
        return self.finish(
            head[:-1],
            key,
            change.kind,
            # The id and the time are cut out of the encoded text: cheaper than formatting again.
            head[_ID_START:_ID_END],
            head[head.rindex(b'"', 0, -2) + 1 : -2],
            source,
            None if block is None else (block.id, block.index, block.count),
            None if change.current is None else self._json(change.current, is_new=True),
            None if change.original is None else self._json(change.original, is_new=False),
            b"" if not change.extra else encode_json(dict(change.extra))[1:-1],
            change.event,
        )

    def head(
        self, change_id: str, key: str, version: int, kind: str, occurred_at: str, recorded_at: str
    ) -> bytes:
        """The first fields of an envelope, made of encoded texts, for :meth:`finish`.

        Times are texts of :func:`ready_time`.
        """
        if not key.isalnum() or not key.isascii():
            key = encode_json(key)[1:-1].decode()
        return (
            f'{{"id":"{change_id}",{self._named}"key":"{key}","version":{version},'
            f'"kind":"{kind}","occurredAt":"{occurred_at}","recordedAt":"{recorded_at}"'
        ).encode()

    @cached_property
    def _named(self) -> str:
        one = self.entity_type
        return f'"entity":{encode_json(one.name).decode()},"schemaVersion":{one.schema_version},'

    def finish(
        self,
        head: bytes,
        key: str,
        kind: Kind,
        change_id: bytes,
        recorded_at: bytes,
        source: ReadySource,
        block: tuple[str, int, int] | None,
        current: bytes | None,
        original: bytes | None,
        extra: bytes,
        event: DomainEvent | None = None,
    ) -> tuple[bytes, bytes, Headers]:
        """Key, value and headers of a change whose parts are encoded already.

        ``head`` ends before the event, ``extra`` are further fields without their braces. Raises
        ChangeTooLarge and InvalidChange; the contents of the states are not checked. Cost: about
        2 µs.
        """
        entity = self.entity_type.name
        check_key(entity, key)
        if current is None:
            current = b"null"
        if original is None:
            original = b"null"
        told = b"null" if event is None else event_json(entity, key, event)
        value = b"".join(
            (
                head,
                b',"event":%b,' % told,
                source.json,
                b"null" if block is None else encode_json(SourceTransaction(*block)),
                b'},"currentEntityState":',
                current,
                b',"originalEntityState":',
                original,
                b",%b}" % extra if extra else b"}",
            )
        )
        if holds_nul(value):
            raise InvalidChange(entity, key, "message", "NUL characters are refused")
        if len(value) > self.message_bytes_max:
            size = len(value) - min(len(current), len(original))
            if size > self.message_bytes_max:
                raise ChangeTooLarge(entity, key, size, self.message_bytes_max)
        key_bytes = key.encode()
        event_type = b"" if event is None else event.type.encode()
        check_names(entity, key, len(key_bytes) + len(source.header[1]) + len(event_type))
        headers = [
            _SPEC_VERSION,
            ("ce_id", change_id),
            source.header,
            self._types[kind] if event is None else ("ce_type", event_type),
            ("ce_time", recorded_at),
            ("ce_subject", key_bytes),
            _CONTENT_TYPE,
        ]
        return key_bytes, value, headers

    def _json(self, state: Any, *, is_new: bool) -> bytes:
        known = self.entity_type
        if state.__class__ is known.model:
            return known.encode(state)
        if isinstance(state, bytes):
            return state
        if is_new or not isinstance(state, Mapping):
            return known.encode(known.accept(state))
        # An older model may have had fields that this one does not have.
        return known.encode(known.validate_exactly(state), "stored")

    def decode(self, value: bytes) -> Change[dict[str, Any]]:
        """Read a change; unknown envelope fields are kept in ``extra``.

        Its states have today's names of their fields.

        Raises InvalidChange naming entity, key and the reason.
        """
        name = self.entity_type.name
        try:
            wire = decode_wire(value)
            fields = _decode_fields(value)
            change: Change[dict[str, Any]] = Change(
                id=wire.id,
                entity=wire.entity,
                schema_version=wire.schema_version,
                key=wire.key,
                version=wire.version,
                kind=wire.kind,
                occurred_at=wire.occurred_at,
                recorded_at=wire.recorded_at,
                provenance=msgspec.convert(wire.provenance, Provenance, from_attributes=True),
                current=self.entity_type.today(decode_json(wire.current_entity_state)),
                original=self.entity_type.today(decode_json(wire.original_entity_state)),
                event=_event(wire.event),
                transaction=wire.provenance.transaction,
                extra={k: decode_json(v) for k, v in fields.items() if k not in WIRE_FIELDS},
            )
        except (msgspec.DecodeError, ValueError) as cause:
            raise InvalidChange(name, None, "message", str(cause)) from cause
        if holds_nul(value):
            raise InvalidChange(name, change.key, "message", "NUL characters are refused")
        for field in ("occurredAt", "recordedAt"):
            if is_finer(bytes(fields[field]).decode()):
                raise InvalidChange(name, change.key, field, "it has parts of a microsecond")
        if change.entity != name:
            raise InvalidChange(name, change.key, "entity", f"it is of {change.entity!r}")
        check_shape(change)
        return change


def check_shape(change: Change[Any]) -> None:
    """Raise InvalidChange when kind, version and states do not fit together."""
    kind = change.kind
    if (change.current is not None, change.original is not None) != _STATES[kind]:
        field, wanted = "current", _STATES[kind][0]
        if (change.current is not None) == wanted:
            field, wanted = "original", _STATES[kind][1]
        word = "required" if wanted else "empty"
        raise InvalidChange(change.entity, change.key, field, f"must be {word} when {kind}")
    if change.version < 1:
        raise InvalidChange(change.entity, change.key, "version", "versions start at 1")
    if not change.key:
        raise InvalidChange(change.entity, None, "key", "the key is empty")


def check_names(entity: str, key: str, size: int) -> None:
    """Raise InvalidChange when key, service and event type are too long for a message's headers.

    ``size``: their bytes.
    """
    if size > _NAMES_BYTES_MAX:
        reason = f"key, service and event type have {size:,} bytes, at most {_NAMES_BYTES_MAX:,}"
        raise InvalidChange(entity, key[:40], "headers", reason)


def ready_source(entity: str, key: str | None, source: Provenance) -> ReadySource:
    """A provenance, encoded for the changes that share it; raises MissingProvenance."""
    check_provenance(entity, key, source)
    json = b'"provenance":' + encode_json(wire_provenance(source)).removesuffix(b"null}")
    return ReadySource(source, json, ("ce_source", source.service_name.encode()))


def wire_provenance(source: Provenance) -> WireProvenance:
    """A provenance as it is written, without a transaction."""
    return WireProvenance(
        source.api_version,
        source.service_name,
        source.identifier,
        source.actor,
        source.reason,
        source.correlation_id,
        source.causation_id,
    )


def ready_time(moment: datetime) -> str:
    """A time in the envelope's text form; raises ValueError for one that no column can hold."""
    if fault := moment_fault(moment):
        raise ValueError(fault)
    return encode_json(with_minutes(moment))[1:-1].decode()


def event_json(entity: str, key: str, event: DomainEvent) -> bytes:
    """JSON of a domain event; raises InvalidChange if no message can hold it."""
    try:
        if not isinstance(event.type, str):
            raise TypeError("its type is no text")
        encoded = encode_json({"type": event.type, "data": event.data})
        if is_too_deep(encoded):
            raise ValueError(TOO_DEEP)
    except RecursionError as cause:
        raise InvalidChange(entity, key, "event", TOO_DEEP) from cause
    except (TypeError, ValueError) as cause:
        raise InvalidChange(entity, key, "event", str(cause)) from cause
    return encoded


def _event(raw: msgspec.Raw) -> DomainEvent | None:
    decoded = decode_json(raw)
    if decoded is None:
        return None
    if not isinstance(decoded, dict) or not isinstance(decoded.get("type"), str):
        raise ValueError("event: it has no type")
    return DomainEvent(type=decoded["type"], data=decoded.get("data"))
