"""Linear views: counts, sums and averages per group, kept by adding and subtracting images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import pyarrow as pa

from everstate.errors import InvalidView
from everstate.views.grammar import Grammar
from everstate.views.kinds.images import (
    SHARD,
    SHARD_OF_CHANGE,
    authors_text,
    fields_used,
    fingerprint,
    of_live,
    row_delta,
    rows_of_live,
    struct,
)
from everstate.views.kinds.kind import (
    EXACT,
    BatchSource,
    Explained,
    Index,
    Layout,
    Names,
    TableColumn,
    ViewPlan,
    identifiers,
    output_text,
    quoted,
)
from everstate.views.kinds.shown import ALL, Shown
from everstate.views.ordering import after
from everstate.views.outputs import Outputs, refuse_sum_type
from everstate.views.tables import Image, KeptTable, Sum
from everstate.views.windows import VARIABLE, Windows

ROWS: Final = "n"
"""Accumulator that counts a group's entities; a group exists while it is not 0."""


@dataclass(frozen=True, slots=True)
class Group:
    """A column of the group key: its name, and its Spark SQL over one image."""

    name: str
    spark_sql: str


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A sum that is stored per group.

    ``spark_sql``: the value that one image adds: for `count` 0 or 1 (``None``: always 1), for `sum`
    a number or null, which adds nothing; for `max` and `min` a value of any type.
    """

    name: str
    kind: Sum
    spark_sql: str | None


class OfGroups(ViewPlan):
    """What readers see of a view of groups: outputs over their columns and sums."""

    outputs: tuple[tuple[str, str], ...]
    shown: Shown

    @property
    @abstractmethod
    def group_names(self) -> tuple[str, ...]:
        """Columns of the author's groups."""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the group."""
        return self.group_names

    @property
    def defined(self) -> tuple[str, ...]:
        """Names in the SELECT list."""
        return tuple(name for name, _ in self.outputs)

    @property
    def shown_key(self) -> tuple[str, ...] | None:
        """Names under which readers see the columns of the group; ``None``: one is not shown."""
        shown = {text: name for name, text in self.outputs}
        names = [shown.get(group) for group in self.group_names]
        return None if None in names else tuple(name for name in names if name is not None)

    def read(self, names: Names, *, limited: bool = True) -> str:
        """The SELECT list, computed from groups and sums."""
        kept, ties = self.read_from(names), after(self.shown.order, self.group_names)
        return self.shown.select(self.shown_columns, kept, ties, limited=limited)

    def read_from(self, names: Names) -> str:
        """The relation with the columns that outputs are computed from."""
        return f"({self.compared(names)}) AS kept"

    def computed(self, names: Names) -> tuple[str, Sequence[tuple[str, str]]]:
        """The sums, and the outputs over them."""
        return self.read_from(names), self.outputs

    @property
    def shown_columns(self) -> str:
        """The SELECT list over groups and sums."""
        return ", ".join(output_text((text, name)) for name, text in self.outputs)


@dataclass(frozen=True)
class LinearPlan(OfGroups):
    """A view of counts, sums and averages per group."""

    group: tuple[Group, ...] = ()
    accumulators: tuple[Accumulator, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    """Names, and PostgreSQL's texts over groups and accumulators."""
    where_sql: str | None = None
    shown: Shown = ALL
    source: BatchSource = "live"
    """`live`, or `changes` for a view of changes."""
    starts: str | None = None
    """Canonical text of an array of window starts: an image gives a row for each of them."""
    kind: ClassVar[str] = "linear"
    # Both engines may write the text of a group differently.
    is_divided: ClassVar[bool] = False

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        shown = {text: name for name, text in self.outputs}
        group = ", ".join(shown.get(c.name) or authors_text(c.spark_sql) for c in self.group)
        each = f"for each {group} and partition" if group else "for each partition"
        rows = (
            "the groups that the entity leaves and enters" if self.source == "live" else "its group"
        )
        several = " of each window that it belongs to" if self.starts is not None else ""
        return Explained(
            f"one row {each}, with counts and sums",
            f"counts and sums of {rows}{several} are updated; the changes of a batch are summed "
            "first",
            f"a group by {group}: its rows, by index; all: one pass over the groups"
            if group
            else "the one row of each partition",
        )

    @property
    def group_names(self) -> tuple[str, ...]:
        """Columns of the author's groups."""
        return tuple(column.name for column in self.group)

    def table(self, version: int) -> KeptTable:
        """Sums, in a shard per partition (decision 4)."""
        images: tuple[Image, ...] = ("original", "current")
        if self.source == "changes":
            images = ("change",)
        groups, sums = self.sums_kept
        made = KeptTable(self.name, version, self.fingerprint, "sum", images=images)
        return replace(made, groups=groups, sums=sums)

    @property
    def sums_kept(self) -> tuple[tuple[str, ...], tuple[tuple[str, Sum], ...]]:
        """The key columns, and all accumulators."""
        return self.key, tuple((each.name, each.kind) for each in self.accumulators)

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Groups as Spark types them, and exact sums; a sum of floats is refused (C16)."""
        for each in self.accumulators:
            if each.kind == "sum":
                refuse_sum_type(self.name, authors_text(each.spark_sql or ""), types[each.name])
        check_order(self.name, self.shown, {c.name: types[c.name] for c in self.group})
        sums = [_column(each, types) for each in self.accumulators]
        empty = Index("empty", ("shard",), f"{ROWS} = 0")
        columns = (*self.key_layout(types), TableColumn("shard"), *sums)
        return Layout(columns, (*self.key, "shard"), (empty, *self.indexes()))

    def key_layout(self, types: Mapping[str, pa.DataType]) -> list[TableColumn]:
        """Columns of :attr:`keys`."""
        return [TableColumn(c.name, types[c.name], c.spark_sql) for c in self.group]

    def indexes(self) -> tuple[Index, ...]:
        """Indexes besides that of the key, which begins with the group."""
        return ()

    def columns(self, image: Image) -> str:
        """Group and inputs of the sums."""
        return row_delta(image, self.rows or self.row, self.where_sql)

    @property
    def row(self) -> str:
        """Canonical text of the row that an image gives."""
        return struct(self._fields or [("one", "1")])

    @property
    def rows(self) -> str | None:
        """Canonical text of an array of rows, where an image may give several."""
        return (
            None if self.starts is None else f"TRANSFORM({self.starts}, {VARIABLE} -> {self.row})"
        )

    def batch(self, tables: Sequence[str]) -> str:
        """Group and inputs of the sums, of each live entity or change.

        A proof sums them and compares them with the stored sums. The outputs are proved with the
        definition's own SQL.
        """
        own = SHARD_OF_CHANGE if self.source == "changes" else SHARD
        if self.rows is not None:
            return rows_of_live(tables, self.rows, self.where_sql, own)
        return of_live(tables, self._fields, self.where_sql, own)

    def compared(self, names: Names) -> str:
        """Groups and accumulators, summed over shards; without groups there is always one row."""
        return self.summed(names.table(self.name), self.key)

    def summed(self, table: str, keys: Sequence[str], where: str = "") -> str:
        """Sums over shards, by keys; groups without entities are left out."""
        sums = [_OVER_SHARDS[each.kind].format(quoted(each.name)) for each in self.accumulators]
        query = f"SELECT {', '.join([*map(quoted, keys), *sums])} FROM {table}{where}"
        return query + (f" GROUP BY {identifiers(keys)} HAVING sum(n) <> 0" if keys else "")

    def read_where(self, table: str, where: str) -> str:
        """Outputs of the groups for which a condition on the table's columns holds."""
        return f"SELECT {self.shown_columns} FROM ({self.summed(table, self.key, where)}) AS kept"

    @property
    def _fields(self) -> list[tuple[str, str]]:
        inputs = [(a.name, a.spark_sql) for a in self.accumulators if a.spark_sql is not None]
        return [*((column.name, column.spark_sql) for column in self.group), *inputs]


_OVER_SHARDS: Final[Mapping[Sum, str]] = {
    "count": "coalesce(sum({0}), 0)::bigint AS {0}",
    "sum": "coalesce(sum({0}), 0)::numeric AS {0}",
    "max": "max({0}) AS {0}",
    "min": "min({0}) AS {0}",
}


def _column(each: Accumulator, types: Mapping[str, pa.DataType]) -> TableColumn:
    if each.kind == "count":
        return TableColumn(each.name, pa.int64(), required=True)
    if each.kind == "sum":
        return TableColumn(each.name, EXACT, required=True)
    return TableColumn(each.name, types[each.name], each.spark_sql)


def check_order(view: str, shown: Shown, columns: Mapping[str, pa.DataType]) -> None:
    """Raise InvalidView for an order with a column that engines order differently.

    With LIMIT all ``columns`` are in the order, because they are its tie-breakers.
    """
    ordered = {by.text for by in shown.order}
    for name, kind in columns.items():
        if pa.types.is_nested(kind) and (name in ordered or shown.limit is not None):
            raise InvalidView(
                view,
                f"Spark and PostgreSQL order nested values ({kind}) differently, so that ORDER BY "
                "and LIMIT would give different rows.",
                advice="Order by a field inside the value, and group by that field.",
            )


def linear_plan(
    grammar: Grammar, outputs: Outputs, where_sql: str | None, windows: Windows | None
) -> LinearPlan:
    """Plan of a SELECT with counts, sums and averages, or with only GROUP BY."""
    group = tuple(Group(f"g{place}", part) for place, part in enumerate(outputs.group_texts))
    accumulators = [Accumulator(ROWS, "count", None)]
    for each, (kind, part) in outputs.accumulators.items():
        accumulators.append(Accumulator(each, kind, part))
    source: BatchSource = "changes" if grammar.of_changes else "live"
    starts = None if windows is None else windows.starts(grammar)
    texts = [
        "linear",
        *(column.spark_sql for column in group),
        *(f"{a.kind}({a.spark_sql})" for a in accumulators),
        *(f"{text} AS {name}" for name, text in outputs.columns),
        where_sql or "",
        *outputs.shown.texts,
        *([source] if source != "live" else []),
        *([starts] if starts is not None else []),
    ]
    declared, entity = grammar.declared, grammar.entity_type
    return LinearPlan(
        *(declared.name, entity.name, fingerprint(entity, texts), declared, fields_used(texts)),
        group=group,
        accumulators=tuple(accumulators),
        outputs=tuple(outputs.columns),
        where_sql=where_sql,
        shown=outputs.shown,
        source=source,
        starts=starts,
    )
