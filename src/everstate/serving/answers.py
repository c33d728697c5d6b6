"""The answers of readers: frozen records, with their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from everstate.serving.differences import Difference
from everstate.views.control.registry import reasons_text
from everstate.views.misfits import Misfit


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a change in the log; ``offset`` counts within generation and partition."""

    generation: int
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class ColdRead:
    """The cost of an answer from the lake, which the views do not have."""

    files_read: int
    """Files that were opened; the others were skipped by their statistics."""
    files: int
    """Files of the archive."""
    from_log: int
    """Changes that were read from the log, because the archive did not have them yet."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Entity:
    """One entity in one of its states, and the change that made it."""

    entity: str
    key: str
    version: int
    kind: str
    state: dict[str, Any]
    as_of: datetime
    """World time from which this version holds: the running maximum of ``occurred_at``."""
    occurred_at: datetime
    recorded_at: datetime
    change_id: UUID
    provenance: dict[str, Any]
    place: Place
    cold: ColdRead | None = None
    """``None``: it was read from the views."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row that a search found."""

    key: str
    version: int
    rank: float
    """Higher for a better match; comparable only within one search."""
    headline: str
    """Parts of the searched texts, with the found words between asterisks."""
    row: dict[str, Any]
    """The row by its columns."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an entity in its history."""

    entity: str
    key: str
    version: int
    kind: str
    state: dict[str, Any] | None
    """``None``: this version deleted the entity."""
    as_of: datetime
    occurred_at: datetime
    recorded_at: datetime
    change_id: UUID
    provenance: dict[str, Any]
    event: dict[str, Any] | None
    transaction: dict[str, Any] | None
    """Transaction of the source: its id, this change's 1-based index, and the count."""
    place: Place
    differences: tuple[Difference, ...]
    """Differences to the previous version; to nothing if the history does not have that one."""
    cold: ColdRead | None = None
    """``None``: it was read from the views."""


@dataclass(frozen=True, slots=True)
class ArchivedAt:
    """The place of a change in the lake."""

    file: str
    """File of the lake table that has it now."""
    commit: int
    """Version of the table whose commit added it."""
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class AppliedBy:
    """One view and whether it has applied a change."""

    view: str
    position: int
    """Next offset that the view reads of this partition."""
    applied: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The origin of one version of an entity, and where it was archived and applied."""

    version: Version
    topic: str
    archived: ArchivedAt | None
    """``None``: it is not archived yet; the archive follows the log at each trigger."""
    applied_by: tuple[AppliedBy, ...]


@dataclass(frozen=True, slots=True)
class ViewRow:
    """State, position and lag of one version of a view."""

    name: str
    version: int
    kind: str
    """Its kind of view, see :mod:`everstate.views.kinds`."""
    entity: str
    rows: int | None
    """``None``: readers do not see this version yet, or the rows were not counted."""
    position: dict[str, int]
    """``generation/partition`` → the next offset that the view reads."""
    lag_changes: int | None
    """``None``: the log does not answer, or the version has no position yet."""
    lag_seconds: float | None
    """Age of the oldest change that the view has not applied; 0 when there is none."""
    updated_at: datetime | None
    """When the view's position last moved."""
    verified_at: datetime | None
    verified: dict[str, Any] | None
    status: str
    status_reason: str | None = None
    """Why it waits or was retired."""
    error: str | None = None
    """Why its position could not be moved at the last try."""
    waits_for: str | None = None
    """Why it is built and not published yet."""
    throttled: int = 0
    """Deferred changes, see :mod:`everstate.views.policies`."""
    progress: dict[str, Any] | None = None
    """Progress while it is built or catches up: ``doing``, ``share`` from 0 to 1, ``rate`` in
    changes per second, ``left_s`` in seconds."""
    misfits: tuple[Misfit, ...] = ()
    """Of `latest`: values of its entity type that do not fit the model."""
    overflows: dict[str, int] = field(default_factory=dict)
    """Output → number of groups in which it is NULL, because its CAST cannot hold the value."""
    part_of: tuple[str, ...] | None = None
    """Of a table that nobody declared: the views that are read from it; ``None``: a view."""

    @property
    def told_kind(self) -> str:
        """Its kind, or of which views it is a part, in words."""
        if self.part_of is None:
            return self.kind
        return f"part of {', '.join(self.part_of) or 'a view that was dropped'}"

    @property
    def why(self) -> str | None:
        """Its error, what it waits for and the reason of its status; ``None``: it has none."""
        return reasons_text(self.error, self.waits_for, self.status_reason)

    @property
    def progress_text(self) -> str:
        """How far it is, in words; empty when it is neither built nor catches up."""
        return progress_text(self.progress)

    @property
    def standing(self) -> str:
        """Its state in words."""
        told = standing_text(self.status, self.why, self.progress)
        told += f"; {self.throttled:,} throttled changes wait" if self.throttled else ""
        for output, groups in self.overflows.items():
            told += f"; {output} is NULL in {groups:,} groups: its CAST cannot hold the value"
        fields = ", ".join(dict.fromkeys(each.field for each in self.misfits))
        return f"{told}; misfits in {fields}" if fields else told


def standing_text(status: str, why: str | None, progress: Mapping[str, Any] | None) -> str:
    """The state of a version of a view in words: its status, why it has it, and how far it is."""
    told = "; ".join(each for each in (why, progress_text(progress)) if each)
    return f"{status}: {told}" if told else status


def progress_text(progress: Mapping[str, Any] | None) -> str:
    """How far a version is that is built or catches up, in words; empty without a progress."""
    if progress is None:
        return ""
    rate, left = progress["rate"], progress["left_s"]
    said = f"{progress['doing']} {progress['share']:.0%}"
    said += "" if rate is None else f", {rate:,.0f} changes/s"
    return said + ("" if left is None else f", {left:.0f} s to go")
