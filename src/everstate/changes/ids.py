"""Change ids: time-ordered at a writer, derived where a source can be read twice."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID, uuid5

import uuid_utils

_DERIVED = uuid_utils.UUID(bytes=uuid5(NAMESPACE_URL, "urn:everstate:change").bytes)


def new_change_id() -> UUID:
    """Fresh UUIDv7: ids of one writer sort by time. Source: RFC 9562."""
    return UUID(bytes=uuid_utils.uuid7().bytes)


def derived_change_id(source: str, position: str, index: int) -> UUID:
    """UUIDv5 of a source row's place, so that reading it again gives the same id."""
    return UUID(bytes=uuid_utils.uuid5(_DERIVED, f"{source}\n{position}\n{index}").bytes)
