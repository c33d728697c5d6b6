"""What a write is made of before it meets the database: checked, encoded, with its id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

import msgspec
from pydantic import BaseModel

from everstate.changes import DomainEvent, EntityType, Provenance, new_change_id
from everstate.changes.codec import check_provenance
from everstate.changes.entity import holds_nul
from everstate.changes.keys import check_key
from everstate.changes.moments import check_moment
from everstate.changes.values import UNSTORABLE, may_hold_unstorable, storable
from everstate.errors import InvalidChange

T = TypeVar("T")
OneOrEach: TypeAlias = T | Sequence[T]
"""One value for all entities of a call, or a sequence with one for each."""
Entity: TypeAlias = BaseModel | Mapping[str, Any]

_encode = msgspec.json.Encoder().encode


class Row(NamedTuple):
    """One write to come. ``state`` and ``event`` are JSON text, ``occurred_at`` is RFC 3339."""

    key: str
    state: str | None
    change_id: UUID
    occurred_at: str
    provenance: str
    event: str | None


def prepare(
    entity_type: EntityType,
    entities: Sequence[Entity],
    *,
    provenance: OneOrEach[Provenance],
    occurred_at: OneOrEach[datetime],
    event: OneOrEach[DomainEvent | None] = None,
    ahead_hours: float | None = None,
) -> Iterator[Row]:
    """Rows of entities, in their order. Cost: about 6 µs each with small models.

    ``ahead_hours``: how far ahead of now ``occurred_at`` may be.

    Raises InvalidChange or MissingProvenance naming field and key, and ValueError when a sequence
    is not as long as the entities.
    """
    name, validate, encode = entity_type.name, entity_type.validate, entity_type.encode
    count = len(entities)
    sources = _each(provenance, count, "provenance")
    moments = _each(occurred_at, count, "occurred_at")
    intents = _each(event, count, "event")
    for entity, source, moment, intent in zip(entities, sources, moments, intents, strict=True):
        model = validate(entity)
        key = check_key(name, entity_type.key_of(model))
        yield Row(
            key,
            encode(model).decode(),
            new_change_id(),
            moment_text(name, key, moment, ahead_hours),
            provenance_text(name, key, source),
            None if intent is None else event_text(name, key, intent),
        )


def moment_text(entity: str, key: str, moment: datetime, ahead_hours: float | None = None) -> str:
    """RFC 3339 text of a time with its own offset; InvalidChange when it cannot be kept.

    ``ahead_hours``: how far ahead of now it may be; ``None``: the database says.
    """
    check_moment(entity, key, moment, ahead_hours)
    return moment.isoformat()


def provenance_text(entity: str, key: str, provenance: Provenance | None) -> str:
    """JSON of a provenance; raises MissingProvenance, or InvalidChange for what no JSON holds."""
    checked = check_provenance(entity, key, provenance)
    try:
        return _provenance_json(checked)
    except ValueError as cause:
        raise InvalidChange(entity, key, "provenance", str(cause)) from cause


@lru_cache(maxsize=4096)
def _provenance_json(provenance: Provenance) -> str:
    return _without_nul(_encode(provenance))


def event_text(entity: str, key: str, event: DomainEvent) -> str:
    """JSON of a domain event; raises InvalidChange for what no JSON holds."""
    try:
        encoded = _encode(event)
        if may_hold_unstorable(encoded) and not storable(event.data):
            raise ValueError(UNSTORABLE)
        return _without_nul(encoded)
    except (TypeError, ValueError) as cause:
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
