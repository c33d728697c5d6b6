"""What the ways out answer: frozen records, each saying where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from everstate.serving.differences import Difference


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the log a change lies; ``offset`` counts within generation and partition."""

    generation: int
    partition: int
    offset: int


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
    """Against the version before; for the first of a history that was cut off, against nothing."""


@dataclass(frozen=True, slots=True)
class ArchivedAt:
    """Where the lake holds a change."""

    file: str
    """File of the lake table that holds it now."""
    commit: int
    """Version of the table that brought it."""
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
    """Where one version of an entity comes from and where it went."""

    version: Version
    topic: str
    archived: ArchivedAt | None
    """``None``: the archive has not come so far yet; it trails the log by its trigger."""
    applied_by: tuple[AppliedBy, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a view is: what its answers may lack."""

    view: str
    status: str
    reason: str | None
    lag_changes: int | None
    """``None``: the log does not answer."""
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class ViewRow:
    """How one version of a view stands."""

    name: str
    version: int
    kind: str
    """latest, history, row or linear."""
    entity: str
    rows: int | None
    """``None``: readers do not see this version yet."""
    position: dict[str, int]
    """``generation/partition`` to the next offset that the view reads."""
    lag_changes: int | None
    """``None``: the log does not answer."""
    lag_seconds: float | None
    """Age of the oldest change that the view has not applied; 0 when there is none."""
    updated_at: datetime | None
    """When the view's position last moved."""
    verified_at: datetime | None
    verified: dict[str, Any] | None
    status: str
    reason: str | None
