"""Views of rows: one row per live entity for which WHERE holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import pyarrow as pa
from sqlglot import exp

from everstate.errors import InvalidView
from everstate.views.grammar import Grammar, image_path, spark_text, suggestion
from everstate.views.kinds.images import (
    authors_text,
    fields_used,
    fingerprint,
    of_live,
    row_delta,
    struct,
)
from everstate.views.kinds.kind import (
    BatchSource,
    By,
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
from everstate.views.kinds.linear import check_order
from everstate.views.kinds.shown import ALL, Shown
from everstate.views.ordering import after, shown
from everstate.views.tables import Image, KeptTable

KEY: Final = "key"


@dataclass(frozen=True, slots=True)
class Column:
    """A physical column: its name, the reader's name for it, its Spark SQL over one image.

    ``output`` is ``None`` for a column that is used only for ordering. An output that is the
    entity's key itself has no column of its own: it is the table's key.
    """

    name: str
    output: str | None
    spark_sql: str


@dataclass(frozen=True)
class RowPlan(ViewPlan):
    """A view with one row per live entity for which its WHERE holds."""

    row: tuple[Column, ...] = ()
    where_sql: str | None = None
    shown: Shown = ALL
    looked_up_by: tuple[tuple[str, ...], ...] = ()
    """Columns of the declared indexes."""
    kind: ClassVar[str] = "row"
    source: ClassVar[BatchSource] = "live"
    key: ClassVar[tuple[str, ...]] = (KEY,)

    @property
    def defined(self) -> tuple[str, ...]:
        """Names in the SELECT list."""
        return tuple(column.output for column in self.row if column.output is not None)

    @property
    def outputs_stored(self) -> tuple[tuple[str, str], ...]:
        """The SELECT list; raises InvalidView for clauses that are applied when it is read."""
        if self.shown != ALL or self.looked_up_by:
            raise InvalidView(
                self.name,
                f"ORDER BY, LIMIT, OFFSET and indexes are not kept in the store {self.store}.",
                advice="Leave them out, and sort where the rows are read.",
            )
        return tuple((c.output, c.name) for c in self.row if c.output is not None)

    @property
    def columns_beside(self) -> tuple[Column, ...]:
        """Columns besides the key and the version."""
        return tuple(column for column in self.row if column.name != KEY)

    def table(self, version: int) -> KeptTable:
        """The newest version of each key wins."""
        names = tuple(column.name for column in self.columns_beside)
        return KeptTable(self.name, version, self.fingerprint, "row", names, ("current",))

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Key, version, and the columns as Spark types them."""
        known = {KEY: pa.string(), **types}
        check_order(self.name, self.shown, {by.text: known[by.text] for by in self.shown.order})
        own = (TableColumn(KEY), TableColumn("version"))
        columns = (TableColumn(c.name, types[c.name], c.output) for c in self.columns_beside)
        return Layout((*own, *columns), self.key, self.indexes())

    def indexes(self) -> tuple[Index, ...]:
        """Declared indexes, and with LIMIT one in the order, so that only n rows are read."""
        found = tuple(
            Index(f"i{place}", columns) for place, columns in enumerate(self.looked_up_by)
        )
        if self.shown.limit is None:
            return found
        return (*found, Index("order", (*self.shown.order, *self.ties)))

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        every = "for which WHERE is true" if self.where_sql is not None else "that exists"
        found = [f"one row by {', '.join(self.key)}, by index"]
        found += [f"by {', '.join(map(self._output, c))}: by index" for c in self.looked_up_by]
        if self.shown.limit is not None:
            found = [f"{self.shown.limit:,} rows, by an index in their order"]
        return Explained(
            f"one row for each {self.entity} {every}",
            "one row is written for the changes of a key in a batch",
            f"{'; '.join(found)}; all: one pass",
        )

    def _output(self, name: str) -> str:
        """The readers' name of a physical column; its expression, if they do not see it."""
        column = next(column for column in self.row if column.name == name)
        return column.output or authors_text(column.spark_sql)

    @property
    def ties(self) -> tuple[By, ...]:
        """Tie-breakers of the order."""
        return after(self.shown.order, self.key)

    @property
    def shown_key(self) -> tuple[str, ...]:
        """The entity's key; for a view of changes with its version."""
        return tuple(f"_{name}" for name in self.key)

    def columns(self, image: Image) -> str:
        """The row delta of one image."""
        return row_delta(image, struct(self._fields), self.where_sql)

    def batch(self, tables: Sequence[str]) -> str:
        """Key, version, and the row of each live entity."""
        own = ("__key AS key", "__version AS version")
        return of_live(tables, self._fields, self.where_sql, *own)

    def compared(self, names: Names) -> str:
        """The same columns."""
        columns = (KEY, "version", *(column.name for column in self.columns_beside))
        return f"SELECT {identifiers(columns)} FROM {names.table(self.name)}"

    def read(self, names: Names, *, limited: bool = True) -> str:
        """The SELECT list, and key and version of the entity."""
        columns, kept = ", ".join(self.read_columns()), self.rows_shown(names.table(self.name))
        return self.shown.select(columns, f"{kept} AS kept", self.ties, limited=limited)

    def rows_shown(self, table: str) -> str:
        """The relation with the rows of the table that are shown."""
        return table

    def read_columns(self) -> list[str]:
        """The columns that readers see, by name."""
        columns = [(quoted(c.name), c.output) for c in self.row if c.output is not None]
        return [*map(output_text, columns), "key AS _key", "version AS _version"]

    @property
    def _fields(self) -> list[tuple[str, str]]:
        return [(column.name, column.spark_sql) for column in self.columns_beside]


def row_plan(
    grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]], where_sql: str | None
) -> RowPlan:
    """Plan of a SELECT without aggregates; raises InvalidView."""
    if grammar.select.args.get("having") is not None:
        grammar.refuse("HAVING needs GROUP BY", "Write WHERE, or add GROUP BY.")
    row = columns_of(grammar, wanted)
    order = shown(grammar, wanted, lambda expression: column_of(grammar, row, expression))
    if all(column.name == KEY for column in row):
        row = [replace(column, name=f"c{place}") for place, column in enumerate(row)]
    indexes = indexes_of(grammar, row)
    texts = ["row", *(f"{c.spark_sql} AS {c.output}" for c in row), where_sql or "", *order.texts]
    texts += [str(columns) for columns in indexes]
    if grammar.entity_type.key_column != grammar.entity_type.key:
        texts.append("key")  # earlier releases kept the key in the column of another field
    meaning = fingerprint(grammar.entity_type, texts)
    declared, entity = grammar.declared, grammar.entity_type.name
    return RowPlan(
        *(declared.name, entity, meaning, declared, fields_used(texts)),
        row=tuple(row),
        where_sql=where_sql,
        shown=order,
        looked_up_by=indexes,
    )


def columns_of(grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]]) -> list[Column]:
    """A physical column for each output; raises InvalidView."""
    row: list[Column] = []
    for place, (output, expression) in enumerate(wanted):
        resolved = grammar.resolved(expression, aggregates=False)
        name = KEY if image_path(resolved) == grammar.key_path else f"c{place}"
        row.append(Column(name, output, spark_text(resolved)))
    return row


def column_of(grammar: Grammar, row: list[Column], expression: exp.Expr) -> str:
    """The column of an expression; one is added if no output has the expression."""
    resolved = grammar.resolved(expression, aggregates=False)
    text = spark_text(resolved)
    for column in row:
        if column.spark_sql == text:
            return column.name
    row.append(Column(f"c{len(row)}", None, text))
    return row[-1].name


def indexes_of(grammar: Grammar, row: Sequence[Column]) -> tuple[tuple[str, ...], ...]:
    """Physical columns of the declared indexes; raises InvalidView."""
    return tuple(
        tuple(named_column(grammar, row, name, "index") for name in names)
        for names in grammar.declared.indexes
    )


def named_column(grammar: Grammar, row: Sequence[Column], name: str, option: str) -> str:
    """The physical column of an output that an option names; raises InvalidView."""
    found = {column.output: column.name for column in row if column.output is not None}
    if name not in found:
        known = f"The SELECT list has {', '.join(found)}."
        grammar.refuse(
            f"{option} names the column {name!r}, which the SELECT list does not have",
            suggestion(name, found) or known,
        )
    return found[name]


def refuse_outputs(grammar: Grammar, base: RowPlan, added: Sequence[str]) -> None:
    """Raise InvalidView when the SELECT list has a column that the kind adds itself."""
    for column in base.row:
        if column.output is not None and column.output.lower() in added:
            grammar.refuse(
                f"the name of the column {column.output!r} is of a column that everstate adds "
                "itself",
                "Give it another name.",
            )
