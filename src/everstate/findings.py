"""What a doctor found: `everstate doctor`, `everstate cdc doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingOutcome = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    outcome: FindingOutcome
    found: str
    sql: tuple[str, ...] = ()
    """SQL statements that repair it, for a user with the rights; empty: SQL cannot repair it, or
    nothing is wrong."""
    advice: str | None = None
    """Another step that corrects it, such as a restart of the server; None when there is none."""
