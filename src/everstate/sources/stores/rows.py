"""Rows of a write before it goes to the database: checked, encoded, each with its change id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import msgspec
from pydantic import BaseModel, TypeAdapter

from everstate.changes import (
    Change,
    DomainEvent,
    EntityType,
    Kind,
    Provenance,
    SourceTransaction,
    new_change_id,
)
from everstate.changes.codec import check_names, check_provenance, event_json
from everstate.changes.entity import holds_nul
from everstate.changes.fields import tree_of
from everstate.changes.json_numbers import number_of
from everstate.changes.keys import check_key
from everstate.changes.moments import check_moment, with_minutes
from everstate.changes.values import UNSTORABLE, all_with_minutes, may_hold_unstorable, storable
from everstate.errors import ChangeTooLarge, InvalidChange, NotFound, VersionConflict
from everstate.sources.stores.store import GivenEntity, OneOrEach, Scalar, T, Write

ENVELOPE_BYTES: Final = 704
"""Upper bound for the envelope itself: field names, id, times, numbers, transaction block."""
KEY_FACTOR: Final = 6
"""Maximum bytes of JSON for one byte of a key."""


_encode = msgspec.json.Encoder().encode


class PreparedRow(NamedTuple):
    """One prepared write; ``state`` and ``event`` are JSON text, ``occurred_at`` is RFC 3339."""

    key: str
    state: str | None
    change_id: UUID
    occurred_at: str
    provenance: str
    event: str | None


Settle: TypeAlias = Callable[[Mapping[str, str], Sequence[PreparedRow]], dict[int, str]]
"""Decides, under the rows' locks, which other states are written instead of prepared ones.

It gets the JSON of the entities that exist, by key, and the rows, and gives states by the place of
their row. It may be called again with the same rows."""


def prepare(
    entity_type: EntityType,
    entities: Sequence[GivenEntity],
    *,
    provenance: OneOrEach[Provenance],
    occurred_at: OneOrEach[datetime],
    event: OneOrEach[DomainEvent | None] = None,
    ahead_hours: float | None = None,
) -> Iterator[PreparedRow]:
    """Rows of entities, in their order. Cost: about 6 µs each with small models.

    ``ahead_hours``: how far ahead of now ``occurred_at`` may be.

    Raises InvalidChange or MissingProvenance naming field and key, and ValueError when a sequence
    is not as long as the entities.
    """
    count = len(entities)
    sources = _each(provenance, count, "provenance")
    moments = _each(occurred_at, count, "occurred_at")
    intents = _each(event, count, "event")
    for entity, source, moment, intent in zip(entities, sources, moments, intents, strict=True):
        model = entity_type.accept(entity)
        key = entity_type.key_of(model)
        yield _row(entity_type, key, model, source, moment, intent, ahead_hours)


def row_of(entity_type: EntityType, write: Write, now: datetime, ahead_hours: float) -> PreparedRow:
    """The row of one write; raises as :func:`prepare` does."""
    model = None if write.entity is None else entity_type.accept(write.entity)
    key = (write.key or "") if model is None else entity_type.key_of(model)
    moment = write.occurred_at or now
    return _row(entity_type, key, model, write.provenance, moment, write.event, ahead_hours)


def _row(
    entity_type: EntityType,
    key: str,
    model: BaseModel | None,
    provenance: Provenance,
    moment: datetime,
    event: DomainEvent | None,
    ahead_hours: float | None,
) -> PreparedRow:
    name = entity_type.name
    return PreparedRow(
        check_key(name, key),
        None if model is None else entity_type.encode(model).decode(),
        new_change_id(),
        moment_text(name, key, moment, ahead_hours),
        provenance_text(name, key, provenance),
        None if event is None else event_text(name, key, event, provenance.service_name),
    )


def check_expected(
    entity: str, row: PreparedRow, before: str | None, version: int, expected: int | None
) -> None:
    """Raise VersionConflict, or NotFound for the deletion of an entity that does not exist."""
    free = expected == 0 and before is None
    if expected is not None and expected != version and not free:
        raise VersionConflict(entity, row.key, expected, version)
    if before is None and row.state is None:
        raise NotFound(f"{entity} {row.key!r} does not exist; there is nothing to delete.")


def carried(entity_type: EntityType, row: PreparedRow, before: str | None) -> PreparedRow:
    """The row with the fields of the state before that its model does not have.

    Raises InvalidChange as :meth:`EntityType.carry` does.
    """
    if before is None or row.state is None or before == row.state:
        return row
    state = entity_type.carry(row.key, before, row.state.encode()).decode()
    return row if state == row.state else row._replace(state=state)


def kind_of(
    entity_type: EntityType, row: PreparedRow, before: str | None, *, force: bool, limit: int
) -> Kind | None:
    """Kind of the change that a :func:`carried` row makes; ``None``: none, the state is equal.

    Raises ChangeTooLarge for a change that is too large for a message of ``limit`` bytes.
    """
    if not force and entity_type.is_equal(before, row.state):
        return None
    size = max(bytes_of(before), bytes_of(row.state)) + bytes_of(row.provenance)
    size += bytes_of(row.event) + ENVELOPE_BYTES + KEY_FACTOR * bytes_of(row.key)
    if size > limit:
        raise ChangeTooLarge(entity_type.name, row.key, size, limit)
    return Kind.between(before, row.state)


def bytes_of(text: str | None) -> int:
    """Size of a text in UTF-8; 0 for ``None``."""
    return 0 if text is None else len(text.encode())


def moment_text(entity: str, key: str, moment: datetime, ahead_hours: float | None = None) -> str:
    """RFC 3339 text of a time; raises InvalidChange when it cannot be stored.

    It has the time's own offset, or that of UTC for one with seconds. ``ahead_hours``: how far
    ahead of now the time may be; ``None``: not checked here.
    """
    check_moment(entity, key, moment, ahead_hours)
    return with_minutes(moment).isoformat()


def provenance_text(entity: str, key: str, provenance: Provenance | None) -> str:
    """JSON of a provenance; raises MissingProvenance, or InvalidChange if JSON cannot hold it."""
    checked = check_provenance(entity, key, provenance)
    try:
        return _provenance_json(checked)
    except ValueError as cause:
        raise InvalidChange(entity, key, "provenance", str(cause)) from cause


@lru_cache(maxsize=4096)
def _provenance_json(provenance: Provenance) -> str:
    return _without_nul(_encode(provenance))


def stored_change(
    entity: str,
    key: str,
    row: Any,
    before: str | None,
    recorded_at: datetime,
    transaction: SourceTransaction | None = None,
) -> Change[bytes]:
    """The change that a stored row has; ``before``: JSON of the state before it.

    Raises ValueError and KeyError for a row that has none. Cost: 1 µs.
    """
    return Change(
        id=row.change_id,
        entity=entity,
        schema_version=row.schema_version,
        key=key,
        version=row.version,
        kind=_KINDS[row.kind],
        occurred_at=datetime.fromisoformat(row.occurred_at),
        recorded_at=recorded_at,
        provenance=_stored_provenance(row.provenance),
        current=None if row.after is None else row.after.encode(),
        original=None if before is None else before.encode(),
        event=None if row.event is None else _stored_event(row.event),
        transaction=transaction,
    )


_KINDS: Final = {kind.value: kind for kind in Kind}
_stored_provenance: Final = lru_cache(maxsize=4096)(msgspec.json.Decoder(Provenance).decode)
_stored_event: Final = lru_cache(maxsize=4096)(
    msgspec.json.Decoder(DomainEvent, float_hook=number_of).decode
)


def event_text(entity: str, key: str, event: DomainEvent, service: str) -> str:
    """JSON of a domain event of this service; raises InvalidChange if no message can hold it."""
    encoded = event_json(entity, key, event)
    exact = all_with_minutes(event.data)
    if exact is not event.data:
        encoded = event_json(entity, key, DomainEvent(type=event.type, data=exact))
    check_names(entity, key, sum(map(bytes_of, (key, service, event.type))))
    try:
        if may_hold_unstorable(encoded) and not storable(event.data):
            raise ValueError(UNSTORABLE)
        return _without_nul(encoded)
    except ValueError as cause:
        raise InvalidChange(entity, key, "event", str(cause)) from cause


def _without_nul(encoded: bytes) -> str:
    if holds_nul(encoded):
        raise ValueError("NUL characters are refused")
    return encoded.decode()


def _each(value: OneOrEach[T], count: int, field: str) -> Sequence[T]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{count} entities, but {len(value)} values of {field}")
    return value


def shown_for_missing(model: type[BaseModel], equal: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The defaults of these attributes, which readers see in states of older models.

    What a function makes is left out: no two readers need see the same.
    """
    found: dict[str, Scalar] = {}
    for each in tree_of(model).fields:
        info = each.info
        if each.written not in equal or info is None or info.is_required() or info.default_factory:
            continue
        shown = TypeAdapter(each.declared).dump_python(info.default, mode="json", warnings=False)
        found[each.written] = shown
    return found
