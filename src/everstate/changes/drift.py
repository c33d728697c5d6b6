"""How the drift job reads a source of truth, and how it reports differences from the log to it.

The pipeline compares them and must not depend on the sources, so the shared interface is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal, NamedTuple, Protocol

from everstate.changes.change import Provenance


class What(StrEnum):
    """How an entity's newest change in the log differs from the source of truth."""

    MISSING = "missing"
    """The log has no change of it."""
    STALE = "stale"
    """The log ends at an older version."""
    DIFFERENT = "different"
    """Same version, but another change or another state."""
    EXTRA = "extra"
    """The log has a newer version, or an entity that the source never had."""
    PENDING = "pending"
    """The source has yet to publish it: lag, not drift."""
    REFUSED = "refused"
    """The capture refused the row of a table, and no whole row has come since: no drift."""
    SAME = "same"
    """Source and log agree; sent again only when the whole entity type is."""


RESENT: Final = frozenset({What.MISSING, What.STALE, What.SAME})
"""Repaired by sending the stored changes again; the others need a new version."""

DRIFT_PROVENANCE: Final = Provenance(
    api_version="v1", service_name="everstate", identifier="drift", reason="drift"
)
"""Provenance of a version that only repairs drift."""


class Stored(NamedTuple):
    """An entity in its source of truth; ``state`` is JSON text, ``None``: deleted."""

    key: str
    version: int
    change_id: str
    state: str | None


class Heard(NamedTuple):
    """The log's newest change of an entity; version 0: it has none that can be read."""

    version: int
    change_id: str


class Drifted(NamedTuple):
    """An entity on which source of truth and log disagree; version 0: that side has none."""

    key: str
    what: What
    stored: int
    logged: int
    logged_id: str | None = None
    """Id of the entity's newest change in the log."""
    logged_state: str | None = None
    """JSON text of the entity's newest state in the log; ``None``: deleted, or not in the log."""
    refused: str | None = None
    """Why readers of the log would reject a change with the source's state."""


Action = Literal["none", "republished", "rebuilt"]


@dataclass(frozen=True, slots=True)
class DriftedKey:
    """One entity on which both sides disagree.

    A version is 0 where a side has no entity; a captured table has no versions.
    """

    key: str
    what: str
    why: str
    stored_version: int
    logged_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """What a comparison found, and what the repair did."""

    entity: str
    checked_at: datetime
    stored: int
    """Entities in the source of truth, deleted ones included."""
    logged: int
    """Entities in the log."""
    ranges: int = 0
    different_ranges: int = 0
    """Key ranges that were summed, and those that differed; a captured table is read by rows."""
    missing: int
    stale: int = 0
    different: int
    extra: int
    pending: int
    """Changes that the source has yet to publish, or a capture to read: lag, not drift."""
    pending_why: str | None = None
    """Why a capture has not come to what its tables have."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Column of a captured table whose values were not compared → why."""
    share: float
    """Drifted entities as a fraction of all entities, 0 to 1."""
    action: Action = "none"
    repaired: int = 0
    """Drifted entities that were sent again, or got a new version."""
    refused: int = 0
    """Drifted entities whose state in the source makes no change that readers would accept."""
    refused_rows: int = 0
    """Entities that differ because their capture refused a row of them: no drift."""
    sent_again: int = 0
    """Entities without drift that were sent again, because the whole entity type was."""
    keys: tuple[DriftedKey, ...]
    """The first drifted entities, by key; at most `drift.keys_max`."""
    seconds: float

    @property
    def drifted(self) -> int:
        """Entities on which both sides disagree."""
        return self.missing + self.stale + self.different + self.extra

    @property
    def holds(self) -> bool:
        """Whether no drifted entity is left to be repaired."""
        return self.drifted == self.repaired if self.action != "none" else self.drifted == 0


class Truth(Protocol):
    """The source of truth of one entity type, as the drift job sees it.

    It is pickled into Spark tasks, and opens its connections there. ``read`` of all slices gives
    every entity, deleted ones included, at least as new as it was when the call began. ``repair``
    may be called again for the same entities; it skips those that have a newer version meanwhile.
    """

    def slices(self, count: int) -> Sequence[str]:
        """About ``count`` pieces that together hold all entities."""

    def read(self, piece: str) -> Iterator[Stored]:
        """The entities of one piece."""

    def look(self, logged: Mapping[str, Heard]) -> Mapping[str, tuple[Stored, bool]]:
        """The present entities of these keys, and whether a change of each is on its way.

        ``logged``: the log's newest version of each key. Unpublished changes that the log cannot
        take, because it has other changes of these versions, are not on their way.
        """

    def repair(self, drifted: Sequence[Drifted]) -> int:
        """Publish these entities through the source's own path; returns how many were repaired.

        Missing and stale entities are sent as they are, versions in order. Different and extra
        entities get a new version, above both, in source and log, with the source's state. An
        entity whose state is ``refused`` is left out.
        """
