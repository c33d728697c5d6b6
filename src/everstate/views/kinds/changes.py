"""Views of changes: `SELECT … FROM flight_changes`; one row per change, never updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pyarrow as pa

from everstate.views.grammar import Grammar
from everstate.views.kinds.images import fingerprint, of_live
from everstate.views.kinds.kind import BatchSource, Explained, Layout
from everstate.views.kinds.row import RowPlan
from everstate.views.tables import KeptTable


@dataclass(frozen=True)
class ChangesPlan(RowPlan):
    """A view with one row per change for which its WHERE holds."""

    kind: ClassVar[str] = "changes"
    source: ClassVar[BatchSource] = "changes"
    key: ClassVar[tuple[str, ...]] = ("key", "version")

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        every = " for which WHERE is true" if self.where_sql is not None else ""
        return Explained(
            f"one row for each change of {self.entity}{every}, for ever",
            "one row is added",
            super().explained.read,
        )

    def table(self, version: int) -> KeptTable:
        """Rows are appended, and never removed."""
        return replace(super().table(version), merge="append", images=("change",))

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Key, version, and the columns as Spark types them."""
        found = super().layout(types)
        return Layout(found.columns, found.key, found.indexes, is_rewritten=False)

    def batch(self, tables: Sequence[str]) -> str:
        """Key, version, and the row of each change."""
        return of_live(tables, self._fields, self.where_sql, *self.key)


def changes_plan(grammar: Grammar, base: RowPlan) -> ChangesPlan:
    """The plan of a view of changes, from that of a view of rows."""
    meaning = fingerprint(grammar.entity_type, ["changes", base.fingerprint])
    return ChangesPlan(**base.given(meaning))
