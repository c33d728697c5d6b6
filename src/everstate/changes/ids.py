"""Change ids: time-ordered at a writer, derived where a source can be read twice."""

from __future__ import annotations

from uuid import NAMESPACE_URL, UUID

import uuid_utils
from uuid_utils import compat

_DERIVED = uuid_utils.UUID(bytes=compat.uuid5(NAMESPACE_URL, "urn:everstate:change").bytes)


def new_change_id() -> UUID:
    """Fresh UUIDv7: ids of one writer sort by time. Source: RFC 9562."""
    return compat.uuid7()


def derived_id_text(source: str, position: str, index: int) -> str:
    """The text of :func:`derived_change_id`."""
    return str(uuid_utils.uuid5(_DERIVED, f"{source}\n{position}\n{index}"))


def derived_change_id(source: str, position: str, index: int) -> UUID:
    """UUIDv5 of a source row's place, so that reading it again gives the same id."""
    # Half the cost of compat.uuid5, which makes the namespace again in each call.
    return UUID(int=uuid_utils.uuid5(_DERIVED, f"{source}\n{position}\n{index}").int)
