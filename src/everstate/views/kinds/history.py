"""`history`: every accepted change of an entity type, appended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa
from psycopg.sql import SQL, Composable, Composed

from everstate.views.images import HISTORY_JSON, RAW
from everstate.views.kinds.kind import (
    BatchSource,
    Explained,
    Layout,
    TableColumn,
    ViewPlan,
    change_reader,
)
from everstate.views.kinds.latest import change_columns, kept_columns
from everstate.views.tables import (
    HISTORY_COLUMNS,
    HISTORY_FINGERPRINT,
    HistoryTable,
    Image,
    history_of,
)

_PROVED: Final = tuple(name for name in HISTORY_COLUMNS if name not in HISTORY_JSON)


@dataclass(frozen=True)
class HistoryPlan(ViewPlan):
    """All versions of an entity type's entities; it has no definition."""

    kind: ClassVar[str] = "history"
    source: ClassVar[BatchSource] = "changes"

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

    @property
    def key_columns(self) -> int:
        """Key and version."""
        return 2

    @property
    def shown_key(self) -> tuple[str, ...]:
        """Key and version."""
        return ("key", "version")

    def table(self, version: int) -> HistoryTable:
        """Changes are appended unchanged."""
        return HistoryTable(self.name, version, self.fingerprint)

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """The key's index finds versions by number, and by time: as-of times never decrease."""
        columns = tuple(map(TableColumn, HISTORY_COLUMNS))
        return Layout(columns, ("key", "version"), beside_key=("as_of",), is_rewritten=False)

    def columns(self, image: Image) -> str:
        """Not available: no image is planned for it."""
        raise AssertionError("a history stores changes as they are")

    def batch_sql(self, table: str) -> str:
        """Every change; JSON texts are extracted from the message."""
        return f"SELECT {change_columns(_PROVED, RAW)} FROM {table}"

    def kept(self, table: Composable) -> Composed:
        """The same columns."""
        return SQL("SELECT {} FROM {}").format(kept_columns(_PROVED, HISTORY_JSON), table)

    def reader(self, table: Composable) -> Composed:
        """All rows and columns."""
        return change_reader(HISTORY_COLUMNS, table)
