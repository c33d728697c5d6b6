"""Change ids: time-ordered at a writer, derived where a source can be read twice."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID, SafeUUID, uuid5

import uuid_utils

_DERIVED = uuid_utils.UUID(bytes=uuid5(NAMESPACE_URL, "urn:everstate:change").bytes)
_new, _set, _unknown = object.__new__, object.__setattr__, SafeUUID.unknown


def new_change_id() -> UUID:
    """Fresh UUIDv7: ids of one writer sort by time. Source: RFC 9562."""
    return _plain(uuid_utils.uuid7())


def derived_change_id(source: str, position: str, index: int) -> UUID:
    """UUIDv5 of a source row's place, so that reading it again gives the same id."""
    return _plain(uuid_utils.uuid5(_DERIVED, f"{source}\n{position}\n{index}"))


def _plain(found: uuid_utils.UUID) -> UUID:
    """The standard library's object, without its constructor's checks (a third of the cost)."""
    made: UUID = _new(UUID)
    _set(made, "int", found.int)
    _set(made, "is_safe", _unknown)
    return made
