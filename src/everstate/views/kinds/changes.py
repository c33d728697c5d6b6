"""Views of changes: `SELECT … FROM flight_changes`; one row per change, never updated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from everstate.views.grammar import Grammar
from everstate.views.kinds.images import fingerprint, of_live
from everstate.views.kinds.kind import BatchSource, Explained, Layout
from everstate.views.kinds.row import RowPlan
from everstate.views.tables import AppendTable


@dataclass(frozen=True)
class ChangesPlan(RowPlan):
    """A view with one row per change for which its WHERE holds."""

    kind: ClassVar[str] = "changes"
    source: ClassVar[BatchSource] = "changes"

    @property
    def own(self) -> tuple[str, ...]:
        """Key and version."""
        return ("key", "version")

    @property
    def key_columns(self) -> int:
        """Key and version."""
        return 2

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        every = " for which WHERE is true" if self.where_sql is not None else ""
        return Explained(
            f"one row for each change of {self.entity}{every}, for ever",
            "one row is added",
            super().explained.read,
        )

    def table(self, version: int) -> AppendTable:
        """Rows are appended, and never removed."""
        names = tuple(column.name for column in self.columns_beside)
        return AppendTable(self.name, version, self.fingerprint, names)

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Key, version, and the columns as Spark types them."""
        found = super().layout(types)
        return Layout(found.columns, found.key, found.indexes, is_rewritten=False)

    def batch_sql(self, table: str) -> str:
        """Key, version, and the row of each change."""
        return of_live(table, self._fields, self.where_sql, *self.own)


def changes_plan(grammar: Grammar, base: RowPlan) -> ChangesPlan:
    """The plan of a view of changes, from that of a view of rows."""
    meaning = fingerprint(grammar.entity_type, ["changes", base.fingerprint])
    return ChangesPlan(**base.given(meaning))
