"""What a source of truth says of its entities, and how it is told that the log disagrees.

The pipeline compares and must not know the sources, so both meet here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from everstate.changes.change import Provenance


class What(StrEnum):
    """How an entity's newest change in the log differs from the source of truth."""

    MISSING = "missing"
    """The log has nothing of it."""
    STALE = "stale"
    """The log ends at an older version."""
    DIFFERENT = "different"
    """Same version, but another change or another state."""
    EXTRA = "extra"
    """The log has a newer version, or an entity that the source never had."""
    PENDING = "pending"
    """The source has yet to publish it: lag, not drift."""
    SAME = "same"
    """It agrees; sent again when the whole type is."""


RESENT: Final = frozenset({What.MISSING, What.STALE, What.SAME})
"""Mended by sending what there is; the others by a new version."""

DRIFT_PROVENANCE: Final = Provenance(
    api_version="v1", service_name="everstate", identifier="drift", reason="drift"
)
"""Who writes a version that only mends drift."""


class Stored(NamedTuple):
    """An entity in its source of truth; ``state`` is JSON text, ``None``: deleted."""

    key: str
    version: int
    change_id: str
    state: str | None


class Drifted(NamedTuple):
    """An entity on which source of truth and log disagree; a version is 0 where there is none."""

    key: str
    what: What
    stored: int
    logged: int
    logged_id: str | None = None
    """Id of the change that the log ends with."""
    logged_state: str | None = None
    """JSON text of the state that the log ends with; ``None``: deleted, or not there."""
    refused: str | None = None
    """Why readers of the log would refuse a change with the source's state."""


class Truth(Protocol):
    """The source of truth of one entity type, as the drift job sees it.

    It is pickled into Spark tasks, and opens its connections there. ``read`` of all slices gives
    every entity, deleted ones included, at least as new as it was when the call began. ``repair``
    may be called again for the same entities; it leaves alone those that have moved on.
    """

    def slices(self, count: int) -> Sequence[str]:
        """About so many pieces that together are all entities."""

    def read(self, piece: str) -> Iterator[Stored]:
        """The entities of one piece."""

    def look(self, keys: Sequence[str]) -> Mapping[str, tuple[Stored, bool]]:
        """The entities of these keys as they are now, and whether a change is on its way."""

    def repair(self, drifted: Sequence[Drifted]) -> int:
        """Bring them into the log in the source's own way; says how many it could.

        What is missing or stale is sent as it is, versions in order. What is different or extra
        becomes a new version, above both, in source and log, with the source's state. No change
        is made of a state that is refused: its entity is left out.
        """
