"""`history`: every accepted change of an entity type, appended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from everstate.views.images import HISTORY_JSON, RAW
from everstate.views.kinds.kind import BatchSource, Explained, Layout, TableColumn
from everstate.views.kinds.latest import StoredChangesPlan
from everstate.views.tables import HISTORY_COLUMNS, HISTORY_FINGERPRINT, KeptTable, history_of


@dataclass(frozen=True)
class HistoryPlan(StoredChangesPlan):
    """All versions of an entity type's entities."""

    kind: ClassVar[str] = "history"
    source: ClassVar[BatchSource] = "changes"
    stored: ClassVar[tuple[str, ...]] = HISTORY_COLUMNS
    json: ClassVar[tuple[str, ...]] = HISTORY_JSON
    message: ClassVar[str] = RAW
    key: ClassVar[tuple[str, ...]] = ("key", "version")

    @classmethod
    def of(cls, entity: str) -> HistoryPlan:
        """The plan of an entity type's history."""
        return cls(history_of(entity), entity, HISTORY_FINGERPRINT)

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"every version of every {self.entity}, with its state and its provenance",
            "one row is added",
            "a key at a time or at a version: one row, by index",
        )

    def table(self, version: int) -> KeptTable:
        """Changes are appended unchanged."""
        return KeptTable(self.name, version, self.fingerprint, "history")

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """The key's index finds versions by number, and by time: as-of times never decrease."""
        columns = tuple(map(TableColumn, self.stored))
        return Layout(columns, self.key, beside_key=("as_of",), is_rewritten=False)
