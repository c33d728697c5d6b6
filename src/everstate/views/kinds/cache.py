"""Caches: rows of the entities that were active within a time to live.

An entity is active when it changes. Time is that of the changes, not of a clock: the newest time
of any change so far is the present, which is the same whoever computes it and whenever (law 6). A
row that the view does not show any more is kept as a deleted row until it expires, so that an older
change that arrives late does not count as its activity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import pyarrow as pa

from everstate.views.definition import ViewDefinition
from everstate.views.durations import microseconds
from everstate.views.grammar import Grammar
from everstate.views.kinds.images import fingerprint
from everstate.views.kinds.kind import (
    BatchSource,
    Explained,
    Index,
    Layout,
    Names,
    TableColumn,
    identifiers,
)
from everstate.views.kinds.row import KEY, RowPlan, refuse_outputs
from everstate.views.tables import KeptTable

_OWN: Final = (KEY, "version", "shard", "activity", "present")
_ACTIVE, _EXPIRES = "_active_at", "_expires_at"
ACTIVITY: Final = "LEAST(occurred_at, recorded_at)"
"""When an entity was active: a change cannot occur after it was recorded."""


@dataclass(frozen=True)
class CachePlan(RowPlan):
    """A view of rows that expire so many microseconds after the last change of their entity."""

    lifetime_us: int = 0
    kind: ClassVar[str] = "cache"
    source: ClassVar[BatchSource] = "changes"
    is_plain_sql: ClassVar[bool] = False

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        assert isinstance(self.declared, ViewDefinition)
        return Explained(
            f"one row for each {self.entity} that changed within {self.declared.ttl}, by the times "
            "of changes; entities for which WHERE is false are stored too, until they expire",
            "one row is written for the changes of a key in a batch; expired rows are deleted",
            "by key: one row, by index; all: the rows that have not expired",
        )

    def table(self, version: int) -> KeptTable:
        """The newest version of each key, and when it was last active."""
        return replace(super().table(version), merge="cache", lifetime_us=self.lifetime_us)

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """The columns of a view of rows, the shard, and the columns that decide about expiry."""
        columns = (TableColumn(c.name, types[c.name], c.output) for c in self.columns_beside)
        own = (TableColumn(name) for name in _OWN)
        expiry = (Index("activity", ("activity",)), Index("expired", ("shard", "activity")))
        return Layout((*own, *columns), self.key, (*self.indexes(), *expiry))

    def batch(self, tables: Sequence[str]) -> str:
        """The row of each key that is not expired, deleted rows included."""
        (table,) = tables
        names = ", ".join(f"row.{column.name} AS {column.name}" for column in self.columns_beside)
        newest = (
            f"SELECT key, MAX(version) AS version, MAX_BY(partition, version) AS shard, "
            f"MAX({ACTIVITY}) AS activity, MAX_BY({self.columns('current')}, version) AS row "
            f"FROM {table} GROUP BY key"
        )
        present = f"SELECT UNIX_MICROS(MAX({ACTIVITY})) - {self.lifetime_us} FROM {table}"
        return (
            f"SELECT key, version, shard, activity, row IS NOT NULL AS present, {names} "
            f"FROM ({newest}) WHERE UNIX_MICROS(activity) > ({present})"
        )

    @property
    def is_shown(self) -> str:
        """Whether the row is shown and not deleted."""
        return "present"

    @property
    def read_of_batch(self) -> tuple[tuple[str, str], ...]:
        """The SELECT list."""
        return tuple((c.name, c.output) for c in self.row if c.output is not None)

    def compared(self, names: Names) -> str:
        """The same columns of the rows that are not expired."""
        columns, table = (*_OWN, *(c.name for c in self.columns_beside)), names.table(self.name)
        return f"SELECT {identifiers(columns)} FROM {table} WHERE {self._alive(table)}"

    def rows_shown(self, table: str) -> str:
        """The rows that are neither deleted nor expired."""
        return f"(SELECT * FROM {table} WHERE present AND {self._alive(table)})"

    def _alive(self, table: str) -> str:
        return f"activity > (SELECT max(activity) FROM {table}) - {self._lifetime}"

    def read_columns(self) -> list[str]:
        """The columns that readers see, and when a row was active and expires."""
        more = (f"activity AS {_ACTIVE}", f"activity + {self._lifetime} AS {_EXPIRES}")
        return [*super().read_columns(), *more]

    @property
    def _lifetime(self) -> str:
        return f"INTERVAL '{self.lifetime_us} microseconds'"


def cache_plan(grammar: Grammar, base: RowPlan) -> CachePlan:
    """The plan of a cache, from that of a view of rows; raises InvalidView."""
    lifetime = microseconds(grammar.declared.ttl or "")
    if lifetime is None or lifetime <= 0:
        grammar.refuse(
            f"{grammar.declared.ttl!r} is not a duration for ttl",
            "Write '24 hours' or '15 minutes'.",
        )
    refuse_outputs(grammar, base, (_ACTIVE, _EXPIRES))
    meaning = fingerprint(grammar.entity_type, ["cache", base.fingerprint, str(lifetime)])
    return CachePlan(**base.given(meaning), lifetime_us=lifetime)
