"""`latest`: the newest change of each key, deleted entities included. The core writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa
from psycopg.sql import SQL, Composable, Composed, Identifier

from everstate.views.images import LATEST_JSON, NEWEST, RAW
from everstate.views.kinds.kind import (
    BatchSource,
    Explained,
    Layout,
    TableColumn,
    ViewPlan,
    change_reader,
    identifiers,
)
from everstate.views.tables import CORE_FINGERPRINT, LATEST_COLUMNS, Image, RowTable, latest_of

_PROVED: Final = tuple(name for name in LATEST_COLUMNS if name not in LATEST_JSON)


def change_columns(names: Sequence[str], message: str) -> str:
    """Spark's names of a change's own columns; then its message, in the column ``message``."""
    named = ["id AS change_id" if name == "change_id" else name for name in names]
    return ", ".join([*named, f"{RAW} AS {message}"])


def kept_columns(names: Sequence[str], json: Sequence[str]) -> Composed:
    """PostgreSQL's names of the same columns; then the JSON array that the message has to give."""
    texts = [SQL("coalesce({}::text, 'null')").format(Identifier(name)) for name in json]
    return SQL("{}, concat('[', {}, ']')").format(identifiers(names), SQL(", ',', ").join(texts))


@dataclass(frozen=True)
class LatestPlan(ViewPlan):
    """The version gate; it has no definition."""

    kind: ClassVar[str] = "latest"
    source: ClassVar[BatchSource] = "newest"

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

    @property
    def key_columns(self) -> int:
        """The key."""
        return 1

    @property
    def shown_key(self) -> tuple[str, ...]:
        """The key."""
        return ("key",)

    def table(self, version: int) -> RowTable:
        """The newest version of each key wins; it is written from the change, not from an image."""
        return RowTable(self.name, version, self.fingerprint, (), images=())

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Its columns are the same in every entity type."""
        return Layout(tuple(map(TableColumn, LATEST_COLUMNS)), ("key",))

    def columns(self, image: Image) -> str:
        """Not available: no image is planned for it."""
        raise AssertionError("`latest` stores changes as they are")

    def batch_sql(self, table: str) -> str:
        """Every column; the message gives provenance and state."""
        return f"SELECT {change_columns(_PROVED, NEWEST)} FROM {table}"

    def kept(self, table: Composable) -> Composed:
        """The same columns."""
        return SQL("SELECT {} FROM {}").format(kept_columns(_PROVED, LATEST_JSON), table)

    def reader(self, table: Composable) -> Composed:
        """All rows and columns; live entities in typed columns have another name."""
        return change_reader(LATEST_COLUMNS, table)
