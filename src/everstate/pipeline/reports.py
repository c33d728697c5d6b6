"""Reports of the proofs of views; can be read without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

DIFFERENCES_MAX = 100
"""Most differing rows that one bucket reports; all are counted."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that differs between batch and kept table; ``None``: that side has no such row."""

    key: str
    expected: str | None
    kept: str | None

    @property
    def what(self) -> str:
        """`missing`, `extra` or `different`, seen from the kept table."""
        if self.kept is None:
            return "missing"
        return "extra" if self.expected is None else "different"


ProofOutcome: TypeAlias = Literal["holds", "differs", "not all of the log was read", "not compared"]


@dataclass(frozen=True, slots=True)
class ViewReport:
    """The proof of one view: both sides' rows and hashes, and the rows that differ.

    Rows and hashes are those of the stored rows: groups and accumulators, keys and rows.
    ``as_read`` is about the columns that readers see.
    """

    name: str
    version: int
    entity: str
    outcome: ProofOutcome
    expected_rows: int = 0
    kept_rows: int = 0
    expected_hash: str = ""
    kept_hash: str = ""
    different_rows: int = 0
    differences: tuple[RowDifference, ...] = ()
    as_read: str = "not compared"
    """Rows that readers see against the author's SQL: `equal`, `different`, `not compared: …`."""
    position: Mapping[str, int] = field(default_factory=dict)
    """`generation/partition` → next offset: the position of both sides."""
    not_read: tuple[str, ...] = ()
    """Records of the log that no position covers, which make the proof fail; or why the log was
    not read."""
    not_compared: tuple[str, ...] = ()
    """What the proof leaves out: a view that cannot be compared, or records that the core and the
    present model read differently (V5)."""
    misfits: tuple[str, ...] = ()
    """Values of the states that were read which the present model cannot hold: NULL in both
    sides."""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether both sides are equal, and all of the log was read."""
        return self.outcome == "holds"

    def note(self) -> dict[str, Any]:
        """The report as plain values, for the registry or a request's answer."""
        return {**asdict(self), "holds": self.holds}


def failing(reports: Sequence[ViewReport]) -> list[ViewReport]:
    """The reports whose proof does not hold."""
    return [report for report in reports if report.outcome not in ("holds", "not compared")]
