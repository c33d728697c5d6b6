"""`latest`: the newest change of each key, deleted entities included. The core writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from everstate.views.images import LATEST_JSON, NEWEST, RAW
from everstate.views.kinds.kind import (
    OWN_COLUMNS,
    BatchSource,
    Explained,
    Layout,
    Names,
    TableColumn,
    ViewPlan,
    identifiers,
    quoted,
)
from everstate.views.tables import CORE_FINGERPRINT, LATEST_COLUMNS, KeptTable, latest_of


@dataclass(frozen=True)
class StoredChangesPlan(ViewPlan):
    """Changes of an entity type, stored as they are; it has no definition."""

    stored: ClassVar[tuple[str, ...]]
    """Columns of the table."""
    json: ClassVar[tuple[str, ...]]
    """Those of them with JSON texts, which are extracted from the message."""
    message: ClassVar[str]
    """Name of the messages in the batch; a proof compares the JSON texts that they give."""
    key: ClassVar[tuple[str, ...]]
    """Columns of the table's key."""

    @property
    def columns_needed(self) -> tuple[str, ...]:
        """No typed state."""
        return OWN_COLUMNS

    @property
    def shown_key(self) -> tuple[str, ...]:
        """The key of the table."""
        return self.key

    @property
    def _proved(self) -> list[str]:
        return [name for name in self.stored if name not in self.json]

    def batch(self, tables: Sequence[str]) -> str:
        """Every column of a change, and its message."""
        (table,) = tables
        named = ["id AS change_id" if n == "change_id" else n for n in self._proved]
        return f"SELECT {', '.join(named)}, {RAW} AS {self.message} FROM {table}"

    def compared(self, names: Names) -> str:
        """The same columns, and a JSON array of the texts that the message has to give."""
        texts = ", ',', ".join(f"coalesce({quoted(name)}::text, 'null')" for name in self.json)
        columns = f"{identifiers(self._proved)}, concat('[', {texts}, ']')"
        return f"SELECT {columns} FROM {names.table(self.name)}"

    def read(self, names: Names, *, limited: bool = True) -> str:
        """All rows and columns; provenance, which is stored as text, as jsonb."""
        columns = identifiers(self.stored).replace(
            '"provenance"', '"provenance"::jsonb AS "provenance"'
        )
        return f"SELECT {columns} FROM {names.table(self.name)}"


@dataclass(frozen=True)
class LatestPlan(StoredChangesPlan):
    """The version gate."""

    kind: ClassVar[str] = "latest"
    source: ClassVar[BatchSource] = "newest"
    stored: ClassVar[tuple[str, ...]] = LATEST_COLUMNS
    json: ClassVar[tuple[str, ...]] = LATEST_JSON
    message: ClassVar[str] = NEWEST
    key: ClassVar[tuple[str, ...]] = ("key",)

    @classmethod
    def of(cls, entity: str) -> LatestPlan:
        """The plan of an entity type's `latest`."""
        return cls(latest_of(entity), entity, CORE_FINGERPRINT)

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"the newest version of every {self.entity}, deleted ones too",
            "one row is written for the changes of a key in a batch",
            "a key: one row, by index; all: one pass",
        )

    def table(self, version: int) -> KeptTable:
        """The newest version of each key wins; it is written from the change, not from an image."""
        return KeptTable(self.name, version, self.fingerprint, "row")

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Its columns are the same in every entity type."""
        return Layout(tuple(map(TableColumn, self.stored)), self.key)
