"""Records of Debezium's outbox event router → changes, for outboxes in MariaDB and MySQL.

The router turns an outbox row (id, aggregatetype, aggregateid, type, payload) into a record: key =
aggregateid, headers `id` and `eventType`, value = payload. MariaDB has no `emit`, so the service
itself must write the contents of a change into the payload: the envelope's fields `version` (from
a column that it increments under its row lock), `originalEntityState`, `currentEntityState`,
`provenance`, and optionally `occurredAt` and `event.data`. Any other payload is a fact: a change
of kind `event`, with the row's id as its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from pydantic import BaseModel

from everstate.changes import (
    PROVENANCE_FIELDS,
    Change,
    DomainEvent,
    EntityType,
    Kind,
    Provenance,
    derived_change_id,
)
from everstate.changes.codec import check_provenance, check_shape
from everstate.changes.entity import holds_nul
from everstate.changes.json_numbers import decode
from everstate.changes.moments import moment_fault, moment_of
from everstate.errors import CorruptRecord, InvalidChange
from everstate.log.record import Record


@dataclass(frozen=True)
class RouterReader:
    """Reads the routed records of one aggregate type as changes of one entity type.

    ``source`` names the outbox (server and table), so that a row that is read twice gives the
    same change id; two rows with one number, from which a table counts again, give two.
    ``provenance`` is the default for payloads without one; ``None``: such payloads are refused.
    ``is_event``: the payloads are facts.
    """

    entity_type: EntityType
    source: str
    provenance: Provenance | None = None
    is_event: bool = False

    def read(self, record: Record) -> Change[BaseModel] | None:
        """The change of a record; ``None`` for a tombstone, which adds no information.

        Raises CorruptRecord naming topic, partition, offset and the reason.
        """
        if record.value is None:
            return None
        try:
            if holds_nul(record.value):
                raise InvalidChange(self.entity_type.name, None, "message", "it has a NUL")
            headers = {
                name: header_text(value) for name, value in record.headers if value is not None
            }
            row_id = headers.get("id", "")
            if not row_id:
                raise InvalidChange(self.entity_type.name, None, "headers.id", "it is missing")
            payload = _unwrapped(record.value)
            if not isinstance(payload, dict):
                raise InvalidChange(self.entity_type.name, None, "payload", "it is no JSON object")
            change = (self._fact if self.is_event else self._change)(
                record, payload, row_id, headers.get("eventType")
            )
            check_shape(change)
        except (InvalidChange, msgspec.DecodeError, ValueError) as cause:
            place = (record.topic, record.partition, record.offset)
            raise CorruptRecord(*place, str(cause)) from cause
        return change

    def _fact(
        self, record: Record, payload: dict[str, Any], row_id: str, event: str | None
    ) -> Change[BaseModel]:
        name = self.entity_type.name
        return Change(
            id=row_identity(self.source, row_id),
            entity=name,
            schema_version=self.entity_type.schema_version,
            key=row_id,
            version=1,
            kind=Kind.EVENT,
            occurred_at=_at(record.timestamp_ms),
            recorded_at=_at(record.timestamp_ms),
            provenance=check_provenance(name, row_id, self.provenance),
            current=self.entity_type.accept(payload),
            original=None,
            event=None if event is None else DomainEvent(type=event),
        )

    def _change(
        self, record: Record, payload: dict[str, Any], row_id: str, event: str | None
    ) -> Change[BaseModel]:
        name, key = self.entity_type.name, _key(record.key)
        version = payload.get("version")
        if not isinstance(version, int) or isinstance(version, bool):
            raise InvalidChange(name, key, "version", "the service must count it, from 1")
        # A state before may be of an older model, which had fields that this one does not have.
        before = self._state(key, payload, "originalEntityState", self.entity_type.validate_exactly)
        after = self._state(key, payload, "currentEntityState", self.entity_type.accept)
        recorded_at = _at(record.timestamp_ms)
        event_fields = payload.get("event")
        data = event_fields.get("data") if isinstance(event_fields, Mapping) else None
        return Change(
            id=_change_id(self.source, row_id, name, key, version),
            entity=name,
            schema_version=self.entity_type.schema_version,
            key=key,
            version=version,
            kind=Kind.between(before, after),
            occurred_at=_moment(name, key, payload.get("occurredAt")) or recorded_at,
            recorded_at=recorded_at,
            provenance=self._provenance(key, payload.get("provenance")),
            current=after,
            original=before,
            event=None if event is None else DomainEvent(type=event, data=data),
        )

    def _state(
        self,
        key: str,
        payload: dict[str, Any],
        field: str,
        read: Callable[[dict[str, Any]], BaseModel],
    ) -> BaseModel | None:
        if field not in payload:
            raise InvalidChange(
                self.entity_type.name, key, field, "it is missing; without a state it must be null"
            )
        state = payload[field]
        if state is None:
            return None
        if not isinstance(state, dict):
            raise InvalidChange(
                self.entity_type.name, key, field, "the state must be a JSON object"
            )
        model = read(state)
        found = self.entity_type.key_of(model)
        if found != key:
            raise InvalidChange(self.entity_type.name, key, field, f"it is of {found!r}")
        return model

    def _provenance(self, key: str, given: Any) -> Provenance:
        name = self.entity_type.name
        if given is None:
            return check_provenance(name, key, self.provenance)
        if not isinstance(given, Mapping):
            raise InvalidChange(name, key, "provenance", "it is no JSON object")
        texts: dict[str, Any] = {each: given.get(wire) for each, wire in PROVENANCE_FIELDS.items()}
        for field, text in texts.items():
            if not isinstance(text, str | None):
                place = f"provenance.{PROVENANCE_FIELDS[field]}"
                raise InvalidChange(name, key, place, "it is no text")
        return check_provenance(name, key, Provenance(**texts))


def _unwrapped(value: bytes) -> Any:
    """The value without the converter's wrapping: a schema envelope, or JSON in a string."""
    found = decode(value)
    if isinstance(found, dict) and found.keys() == {"schema", "payload"}:
        found = found["payload"]
    return decode(found) if isinstance(found, str) else found


def _key(key: bytes | None) -> str:
    if not key:
        raise ValueError("the record has no key")
    try:
        found = decode(key)
    except msgspec.DecodeError:
        return key.decode()
    if isinstance(found, dict) and found.keys() == {"schema", "payload"}:
        found = found["payload"]
    # A key that is a number as JSON is the same text.
    return found if isinstance(found, str) else key.decode()


def header_text(value: bytes) -> str:
    """Text of a header, with or without the quotation marks of JSON."""
    text = value.decode()
    return str(decode(text)) if text.startswith('"') else text


def is_uuid(row_id: str) -> bool:
    """Whether the id of an outbox row is a UUID, which no other row ever has."""
    try:
        UUID(row_id)
    except ValueError:
        return False
    return True


def row_identity(source: str, row_id: str) -> UUID:
    """The id of an outbox row as a UUID; a number may come again after the table was emptied."""
    return UUID(row_id) if is_uuid(row_id) else derived_change_id(source, row_id, 0)


def _change_id(source: str, row_id: str, entity: str, key: str, version: int) -> UUID:
    if is_uuid(row_id):
        return UUID(row_id)
    return derived_change_id(source, f"{row_id}\n{entity}\n{key}", version)


def _at(timestamp_ms: int) -> datetime:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


def _moment(entity: str, key: str, text: Any) -> datetime | None:
    if text is None:
        return None
    try:
        moment = moment_of(str(text))
    except ValueError as cause:
        raise InvalidChange(entity, key, "occurredAt", f"{text!r}: {cause}") from cause
    if fault := moment_fault(moment):
        raise InvalidChange(entity, key, "occurredAt", fault)
    return moment
