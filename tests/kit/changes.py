"""Changes that tests make by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from everstate.changes import Change, Kind, Provenance, new_change_id


def change_of(
    entity: str,
    key: str,
    version: int,
    current: Any,
    original: Any = None,
    *,
    who: Provenance,
    at: datetime | None = None,
    **fields: Any,
) -> Change[Any]:
    """A change with these states, of the kind that they say; ``at``: when it was, or else now."""
    at = datetime.now(UTC) if at is None else at
    kind = Kind.CREATED if original is None else Kind.UPDATED
    given: dict[str, Any] = {
        "id": new_change_id(),
        "schema_version": 1,
        "kind": Kind.DELETED if current is None else kind,
        "occurred_at": at,
        "recorded_at": at,
        "provenance": who,
    }
    states = {"current": current, "original": original}
    return Change(entity=entity, key=key, version=version, **states, **{**given, **fields})


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def state_text(message: bytes) -> bytes:
    """JSON text of the current state in a readable message."""
    return bytes(_members(message).get("currentEntityState", b"null"))
