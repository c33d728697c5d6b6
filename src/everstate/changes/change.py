"""A change: one immutable message about one step of one entity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import msgspec

E = TypeVar("E")


class Kind(StrEnum):
    """What a change did to its entity."""

    CREATED = "created"
    UPDATED = "updated"
    DELETED = "deleted"
    EVENT = "event"

    # Enum's own hash is slower Python code, and differs from the hash of the equal string.
    __hash__ = str.__hash__

    @classmethod
    def between(cls, before: object, after: object) -> Kind:
        """The kind of a change from one state to another one; ``None``: there is no entity."""
        if after is None:
            return cls.DELETED
        return cls.CREATED if before is None else cls.UPDATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who wrote a change; the first three are required, the rest ``None`` when unknown."""

    api_version: str
    service_name: str
    identifier: str
    actor: str | None = None
    reason: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None


PROVENANCE_FIELDS: Final = {
    each.name: re.sub("_(.)", lambda word: word[1].upper(), each.name)
    for each in fields(Provenance)
}
"""Fields of a provenance, with their names in messages."""


class SourceTransaction(msgspec.Struct, frozen=True, gc=False):
    """A transaction of the source: its id, this change's 1-based index, and its change count."""

    id: str
    index: int
    count: int


class DomainEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The intent behind a change: its domain name and its data."""

    type: str
    data: Any = None


class Change(msgspec.Struct, Generic[E], frozen=True, kw_only=True):
    """One committed step of one entity; dense and ordered per key by ``version``.

    ``current`` is the whole entity after (``None``: it was deleted), ``original`` the whole entity
    before (``None``: it did not exist). ``extra`` holds envelope fields this release does not
    know; they are kept on read and written again.
    """

    id: UUID
    entity: str
    schema_version: int
    key: str
    version: int
    kind: Kind
    occurred_at: datetime
    recorded_at: datetime
    provenance: Provenance
    current: E | None
    original: E | None
    event: DomainEvent | None = None
    transaction: SourceTransaction | None = None
    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
