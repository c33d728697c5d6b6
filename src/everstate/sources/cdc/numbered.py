"""The outcome of one batch of rows: what was skipped, refused, held and published."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from everstate.changes.keys import EntityKey
from everstate.sources.cdc.balance import DEAD, SKIPPED, Cut, Outcomes
from everstate.sources.cdc.composing import RawPlace, RefusedRecord


@dataclass(slots=True)
class NumberedBatch:
    """The outcome of one batch of rows."""

    refused: list[RefusedRecord] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    outcomes: Outcomes = field(default_factory=Counter)
    """What became of each row, by table; rows that wait have none yet."""
    read: Counter[str] = field(default_factory=Counter)
    """Rows that were read, by table."""
    added: Counter[str] = field(default_factory=Counter)
    """Deletes by a truncation or a repeated first snapshot, by table."""
    changes: int = 0
    overdue: int = 0
    """Held rows that were released without their parent, or without the name of a code."""
    held_changed: set[EntityKey] = field(default_factory=set)
    cut: Cut | None = None
    """Where it ended within the deletes of one record; ``None``: it did not."""
    left: int = 0
    """Number of its last rows that the next batch begins with: from that record on."""

    def skip(self, table: str, reason: str, rows: int = 1) -> None:
        """Count rows that change nothing."""
        self.skipped[reason] += rows
        self.outcomes[table, SKIPPED] += rows

    def refuse(
        self,
        table: str,
        entity: str | None,
        reason: str,
        place: RawPlace,
        raw: tuple[bytes | None, bytes | None] | None = None,
    ) -> None:
        """Record a row that becomes a dead letter."""
        self.refused.append(RefusedRecord(entity, reason, place, raw))
        self.outcomes[table, DEAD] += 1
