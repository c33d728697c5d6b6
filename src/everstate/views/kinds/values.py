"""Views with `min`, `max` or `count(DISTINCT x)`: they store how often each group has each value.

A sum whose key has the value beside the group. The table has slots: slot 0 has the group's own
counts and sums, slot i has for each value of the i-th aggregate the number of entities with it. So
when a value is removed, the next one is known; with only a stored maximum it would not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa

from everstate.errors import InvalidView
from everstate.views.grammar import Grammar
from everstate.views.kinds.images import authors_text, fingerprint, struct
from everstate.views.kinds.kind import Explained, Index, Names, TableColumn, same_group
from everstate.views.kinds.linear import LinearPlan, linear_plan
from everstate.views.outputs import Outputs, Pick
from everstate.views.windows import VARIABLE, Windows

SLOT: Final = "slot"
_OWN: Final = 0
"""Slot of the group's own counts and sums."""


@dataclass(frozen=True, slots=True)
class CountedValue:
    """A value that is counted per group, with its own column and slot."""

    slot: int
    spark_sql: str

    @property
    def name(self) -> str:
        """Name of its column."""
        return f"v{self.slot}"


@dataclass(frozen=True, slots=True)
class Picked:
    """A result over the values of a slot, by its name in the outputs."""

    name: str
    pick: Pick
    slot: int


@dataclass(frozen=True)
class ValuesPlan(LinearPlan):
    """A linear view that also stores values of its groups."""

    values: tuple[CountedValue, ...] = ()
    picked: tuple[Picked, ...] = ()
    kind: ClassVar[str] = "values"

    @property
    def key(self) -> tuple[str, ...]:
        """Slot, group, and the values."""
        return (SLOT, *self.group_names, *(value.name for value in self.values))

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        base = super().explained
        values = ", ".join(authors_text(value.spark_sql) for value in self.values)
        read = "min and max: one entry of an index for each group that is read"
        if any(picked.pick == "distinct" for picked in self.picked):
            read += "; count(DISTINCT …): the values of the groups that are read"
        return Explained(
            f"{base.kept}; and one row for each value of {values} in a group and partition",
            f"{base.change}; the rows of its values are updated too",
            f"{base.read}; {read}",
        )

    def key_layout(self, types: Mapping[str, pa.DataType]) -> list[TableColumn]:
        """Columns of the key; values of min and max must be ordered alike by all engines."""
        for value in self.values:
            kind = types[value.name]
            if pa.types.is_nested(kind) and self._is_ordered(value):
                raise InvalidView(
                    self.name,
                    f"Spark and PostgreSQL order nested values ({kind}) differently, so that min "
                    "and max would give different results.",
                    advice="Use min or max over a field inside the value.",
                )
        slot = TableColumn(SLOT, pa.int32(), required=True)
        values = (TableColumn(v.name, types[v.name], v.spark_sql) for v in self.values)
        return [slot, *super().key_layout(types), *values]

    def _is_ordered(self, value: CountedValue) -> bool:
        return any(p.slot == value.slot and p.pick != "distinct" for p in self.picked)

    def indexes(self) -> tuple[Index, ...]:
        """The values of a group in their order, one index per slot."""
        group = self.group_names or None
        return tuple(
            Index(value.name, (value.name,), f"{SLOT} = {value.slot}", group=group)
            for value in self.values
        )

    @property
    def rows(self) -> str:
        """Inputs of the group's own counts and sums, and a row for each value that is not null."""
        sums = [(a.name, a.spark_sql) for a in self.accumulators if a.spark_sql is not None]
        made = [self._row_of(None, sums)]
        for value in self.values:
            row = self._row_of(value, [(name, "NULL") for name, _ in sums])
            made.append(f"CASE WHEN ({value.spark_sql}) IS NOT NULL THEN {row} END")
        several = f"ARRAY_COMPACT(ARRAY({', '.join(made)}))"
        if self.starts is None:
            return several
        return f"FLATTEN(TRANSFORM({self.starts}, {VARIABLE} -> {several}))"

    def _row_of(self, value: CountedValue | None, sums: Sequence[tuple[str, str]]) -> str:
        slot = _OWN if value is None else value.slot
        values = [(v.name, v.spark_sql if v == value else "NULL") for v in self.values]
        groups = ((column.name, column.spark_sql) for column in self.group)
        return struct([(SLOT, str(slot)), *groups, *values, *sums])

    def read_from(self, names: Names) -> str:
        """Groups with their sums, and the results over their values."""
        table = names.table(self.name)
        query = f"({self.summed(table, self.group_names, f' WHERE {SLOT} = {_OWN}')}) AS kept"
        for place, picked in enumerate(self.picked):
            query += f" LEFT JOIN LATERAL ({self._picked(table, picked)}) AS picked{place} ON true"
        return f"(SELECT * FROM {query}) AS kept"

    def _picked(self, table: str, picked: Picked) -> str:
        """A result over the values of the group that is read, by the index of the slot."""
        column = f"v{picked.slot}"
        same = same_group(self.group_names, "one", "kept")
        there = (
            f" FROM {table} AS one WHERE one.{SLOT} = {picked.slot} AND {same} "
            f"AND one.{column} IS NOT NULL GROUP BY one.{column} HAVING sum(one.n) > 0"
        )
        if picked.pick == "distinct":
            return f"SELECT count(*) AS {picked.name} FROM (SELECT 1{there}) AS counted"
        way = "DESC" if picked.pick == "max" else "ASC"
        return f"SELECT one.{column} AS {picked.name}{there} ORDER BY one.{column} {way} LIMIT 1"


def values_plan(
    grammar: Grammar, outputs: Outputs, where_sql: str | None, windows: Windows | None
) -> ValuesPlan:
    """Plan of a SELECT that has min, max or count(DISTINCT x)."""
    base = linear_plan(grammar, outputs, where_sql, windows)
    values = tuple(CountedValue(slot, text) for slot, text in enumerate(outputs.values, 1))
    picked = tuple(Picked(name, pick, slot) for name, (pick, slot) in outputs.picked.items())
    texts = [
        *("values", base.fingerprint),
        *(f"{value.slot}: {value.spark_sql}" for value in values),
        *(f"{each.name}: {each.pick} {each.slot}" for each in picked),
    ]
    given = base.given(fingerprint(grammar.entity_type, texts))
    return ValuesPlan(**given, values=values, picked=picked)
