"""Views of all states: `SELECT … FROM flight_history`; a row has from when to when it was valid.

Only a store that can end a row when the next change of its key comes keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from everstate.views.grammar import Grammar
from everstate.views.kinds.images import fingerprint, row_delta, struct
from everstate.views.kinds.kind import BatchSource, Explained
from everstate.views.kinds.row import Column, RowPlan, refuse_outputs
from everstate.views.tables import HOME, KeptTable

_TIMES: Final = ("valid_from", "valid_to")


@dataclass(frozen=True)
class PeriodsPlan(RowPlan):
    """A view with one row per state for which its WHERE holds."""

    kind: ClassVar[str] = "periods"
    source: ClassVar[BatchSource] = "changes"
    key: ClassVar[tuple[str, ...]] = ("key", "version")
    has_times: ClassVar[bool] = True
    is_plain_sql: ClassVar[bool] = False

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"one row for each state of a {self.entity} that the view shows, for ever",
            "one row is added, and the one before it gets an end",
            "all: one pass",
        )

    def table(self, version: int) -> KeptTable:
        """The next change of a key ends a row, also where it gives none."""
        return replace(super().table(version), merge="periods")

    def batch(self, tables: Sequence[str]) -> str:
        """Key, version, times and the row of each change; `present`: whether it has a row."""
        (table,) = tables
        fields = [each for each in self._fields if each[0] not in _TIMES]
        row = row_delta("current", struct(fields), self.where_sql)
        shown = ", ".join(["key", "version", *_TIMES, *(f"row.{name}" for name, _ in fields)])
        times = "as_of AS valid_from, lead(as_of) OVER (PARTITION BY key ORDER BY version)"
        given = f"SELECT key, version, {times} AS valid_to, {row} AS row FROM {table}"
        return f"SELECT {shown}, row IS NOT NULL AS present FROM ({given})"

    @property
    def read_of_batch(self) -> tuple[tuple[str, str], ...]:
        """The columns that readers see."""
        return tuple((each.name, each.output) for each in self.row if each.output is not None)


def periods_plan(grammar: Grammar, base: RowPlan) -> PeriodsPlan:
    """Plan of a view of all states, from that of a view of rows; raises InvalidView."""
    refuse_outputs(grammar, base, _TIMES)
    if grammar.declared.rules:
        grammar.refuse(
            "a view of all states cannot have a trigger or policies, because each change ends the "
            "state before it",
            f"Write FROM {grammar.entity_type.name}_changes for some of the changes.",
        )
    if grammar.declared.store == HOME:
        grammar.refuse(
            "PostgreSQL keeps no view of all states",
            'Keep it in the lake (store="lake"), or read the history with app.timeline(…).',
        )
    ends = tuple(Column(name, name, "CAST(NULL AS TIMESTAMP)") for name in _TIMES)
    meaning = fingerprint(grammar.entity_type, ["periods", base.fingerprint])
    return PeriodsPlan(**{**base.given(meaning), "row": (*base.row, *ends)})
