"""A store of rows with versions in memory: the smallest that passes its contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa

from everstate.config import Config
from everstate.errors import ViewRowsMissing
from everstate.views.tables import KeptTable, Merge, Row
from kit.view_oracle import in_order

StoredRow: TypeAlias = dict[str, Any]
"""A row by the names of its columns."""


class RowsInMemory:
    """A store of rows in memory: table → place → version and row, which is None if deleted."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append"})
    call_s_max: ClassVar[float] = 5.0

    def __init__(self, _config: Config | None = None) -> None:
        self.tables: dict[str, dict[Any, tuple[int, StoredRow | None]]] = {}
        self.names: dict[str, str] = {}
        """View → the table that its readers see."""
        self.calls: list[tuple[KeptTable, pa.Table, pa.Table]] = []
        """All writes."""

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        self.tables.setdefault(table.name, {})

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        self.calls.append((table, rows, gone))
        self.table(table.view, table.name)
        for row in rows.to_pylist():
            self.put(table, row["_key"], row["_version"], row)
        for row in gone.to_pylist():
            self.put(table, row["_key"], row["_version"], None)

    def put(self, table: KeptTable, key: str, version: int, row: StoredRow | None) -> None:
        place = key if table.merge == "row" else (key, version)
        stored = self.table(table.view, table.name)
        if place not in stored or stored[place][0] < version:
            stored[place] = (version, row)

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterable[pa.RecordBatch]:
        placed = self.table(table.view, table.name)
        stored = [row for _, row in placed.values() if row is not None]
        found = [{name: row[name] for name in schema.names} for row in stored]
        yield pa.RecordBatch.from_pylist(found, schema=schema)

    def drop(self, name: str) -> None:
        self.tables.pop(name, None)

    def publish(self, view: str, name: str) -> None:
        self.table(view, name)
        self.names[view] = name

    def unpublish(self, view: str) -> None:
        self.names.pop(view, None)

    def table(self, view: str, name: str) -> dict[Any, tuple[int, StoredRow | None]]:
        """Places of a table, with version and row; raises ViewRowsMissing."""
        if name not in self.tables:
            raise ViewRowsMissing(view, name)
        return self.tables[name]

    def read(self, view: str) -> list[Row] | None:
        """What readers see: region, amount and key."""
        if view not in self.names:
            return None
        stored = [row for _, row in self.tables[self.names[view]].values() if row is not None]
        return in_order((row["region"], row["amount"], row["_key"]) for row in stored)
