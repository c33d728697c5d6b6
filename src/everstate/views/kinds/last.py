"""The last n, or the top n, of each category: `QUALIFY row_number() OVER (…) <= n`.

All rows are stored, with an index on category and order; n of them are read. A table with only n
rows would lack the row that moves up after a deletion or after a change of another row's category.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from sqlglot import exp

from everstate.views.grammar import Grammar
from everstate.views.kinds.images import fingerprint
from everstate.views.kinds.kind import By, Explained, Index, ViewPlan, output_text, quoted
from everstate.views.kinds.row import KEY, RowPlan, column_of, row_plan
from everstate.views.ordering import after, as_shown, terms_of, unordered
from everstate.views.parsing import DIALECT

_ADVICE: Final = (
    "Write QUALIFY row_number() OVER (PARTITION BY customer_id ORDER BY ordered_at DESC) <= 30."
)
_PLACE: Final = "place"
_NUMBER: Final = "__number"
"""Column of the row_number in the batch."""


@dataclass(frozen=True)
class LastPlan(RowPlan):
    """A view of rows of which the first ones of each category are shown."""

    category: tuple[str, ...] = ()
    """Columns of the category (PARTITION BY)."""
    first: tuple[By, ...] = ()
    """The order in a category."""
    count: int = 0
    place: tuple[int, str] | None = None
    """Index and name of the row_number in the SELECT list, if it is there."""
    kind: ClassVar[str] = "last"
    outputs_stored = ViewPlan.outputs_stored

    @property
    def defined(self) -> tuple[str, ...]:
        """Names in the SELECT list."""
        names = list(super().defined)
        if self.place is not None:
            names.insert(*self.place)
        return tuple(names)

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        base, category = super().explained, ", ".join(map(self._output, self.category))
        return Explained(
            f"{base.kept}; an index by {category} and the order",
            f"{base.change}, and an entry of that index",
            f"{self.count:,} rows of each {category} that is read, by index",
        )

    def indexes(self) -> tuple[Index, ...]:
        """Rows of a category in their order."""
        order = (*self.first, *after(self.first, self.key))
        return (Index("last", (*self.category, *order)),)

    def read_columns(self) -> list[str]:
        """The columns that readers see, by name."""
        columns = super().read_columns()
        if self.place is not None:
            index, name = self.place
            columns.insert(index, output_text((quoted(_PLACE), name)))
        return columns

    def rows_shown(self, table: str) -> str:
        """The first rows of each category, found by the index.

        Rows with a null in the category cannot be found that way; they are few, and are sorted.
        """
        order = ", ".join(by.sql for by in (*self.first, *after(self.first, self.key)))
        names = ", ".join(self.category)
        present = " AND ".join(f"{name} IS NOT NULL" for name in self.category)
        absent = " OR ".join(f"{name} IS NULL" for name in self.category)
        same = " AND ".join(f"one.{name} = category.{name}" for name in self.category)
        columns = (KEY, "version", *(c.name for c in self.columns_beside), _PLACE)
        # PostgreSQL applies a reader's `WHERE customer_id = …` to the categories only if the column
        # is selected from them.
        shown = ", ".join(
            f"{'category' if name in self.category else 'first'}.{name}" for name in columns
        )
        return (
            f"(SELECT {shown} FROM (SELECT DISTINCT {names} FROM {table} WHERE {present}) "
            "AS category CROSS JOIN LATERAL (SELECT one.*, "
            f"row_number() OVER (ORDER BY {order}) AS {_PLACE} FROM {table} AS one "
            f"WHERE {same} ORDER BY {order} LIMIT {self.count}) AS first "
            f"UNION ALL SELECT {', '.join(columns)} FROM (SELECT one.*, row_number() OVER "
            f"(PARTITION BY {names} ORDER BY {order}) AS {_PLACE} FROM {table} AS one "
            f"WHERE {absent}) AS without WHERE {_PLACE} <= {self.count})"
        )


def last_plan(
    grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]], where_sql: str | None
) -> LastPlan:
    """Plan of a SELECT with QUALIFY; raises InvalidView."""
    if grammar.of_changes:
        grammar.refuse("QUALIFY over changes is not allowed", "Write ORDER BY … LIMIT n.")
    window, count = _qualified(grammar, wanted)
    place = None
    outputs = list(wanted)
    for index, (name, expression) in enumerate(wanted):
        if isinstance(expression, exp.Window):
            if expression != window or place is not None:
                grammar.refuse("the only window function allowed is that of QUALIFY", _ADVICE)
            place = (index, name)
            del outputs[index]
    _name_outputs_in_order(grammar, wanted)
    category_of, order_of = _of_columns(grammar, window, outputs)
    base = row_plan(grammar, outputs, where_sql)
    row = list(base.row)

    def compiled(expression: exp.Expr) -> str:
        return column_of(grammar, row, expression)

    category = tuple(compiled(each) for each in category_of)
    first = terms_of(grammar, order_of, lambda expression: expression, compiled)
    texts = ["last", base.fingerprint, *category, *(by.sql for by in first), str(count)]
    texts += [f"{c.name}: {c.spark_sql}" for c in row] + [str(place)]
    given = base.given(fingerprint(grammar.entity_type, texts)) | {
        "row": tuple(row),
        **_in_total_order(grammar, wanted, category_of, order_of, count),
    }
    return LastPlan(**given, category=category, first=first, count=count, place=place)


def _qualified(grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]]) -> tuple[exp.Window, int]:
    """The window of QUALIFY and the number of rows per category; raises InvalidView."""
    condition = grammar.select.args["qualify"].this
    window, count = condition.this, condition.args.get("expression")
    if isinstance(window, exp.Column) and len(window.parts) == 1:
        name = window.name.lower()
        window = {name.lower(): expression for name, expression in wanted}.get(name)
        if window is not None and name in (column.lower() for column in grammar.columns()):
            grammar.refuse(
                f"the name {name} in QUALIFY is both a column and an alias",
                "Give the alias another name.",
            )
    number = int(count.this) if isinstance(count, exp.Literal) and count.is_int else 0
    number -= isinstance(condition, exp.LT)
    is_first = isinstance(condition, (exp.LTE, exp.LT)) or (
        isinstance(condition, exp.EQ) and number == 1
    )
    if (
        not is_first
        or number < 1
        or not isinstance(window, exp.Window)
        or not isinstance(window.this, exp.RowNumber)
        or window.args.get("spec")
        or window.args.get("order") is None
    ):
        text = condition.sql(dialect=DIALECT, comments=False)
        grammar.refuse(f"QUALIFY {text} is not allowed; only row_number() <= n is", _ADVICE)
    if not window.args.get("partition_by"):
        grammar.refuse(
            "QUALIFY has no PARTITION BY, so there are no categories", "Write ORDER BY … LIMIT n."
        )
    return window, number


def _name_outputs_in_order(grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]]) -> None:
    """Write names for the numbers in ORDER BY; refuse an order by the row_number."""
    order = grammar.select.args.get("order")
    named = {name.lower(): (name, expression) for name, expression in wanted}
    for ordered in [] if order is None else order.expressions:
        output = grammar.ordinal(ordered.this, wanted, "ORDER BY")
        if output is not None:
            name = next(name for name, expression in wanted if expression is output)
            ordered.set("this", exp.column(name, quoted=True))
        for column in ordered.this.find_all(exp.Column):
            _, expression = named.get(column.name.lower(), ("", None))
            if len(column.parts) == 1 and isinstance(expression, exp.Window):
                grammar.refuse(
                    f"ORDER BY names {column.name}, which is the row_number",
                    "Write ORDER BY with the category and the order of the window.",
                )


def _of_columns(
    grammar: Grammar, window: exp.Window, outputs: Sequence[tuple[str, exp.Expr]]
) -> tuple[list[exp.Expr], list[exp.Expr]]:
    """The category and the order of a window, over columns of the entity only.

    In a window a number is a constant in SQL, and a name that is a column is no alias.
    """

    def meant(expression: exp.Expr) -> exp.Expr:
        return grammar.without_aliases(expression, outputs, "QUALIFY")

    order = [each.copy() for each in window.args["order"].expressions]
    for ordered in order:
        if isinstance(ordered.this, exp.Literal):
            grammar.refuse(
                f"ORDER BY {ordered.this.sql(dialect=DIALECT)} in a window is a constant, so it "
                "orders nothing",
                "Write the column's name.",
            )
        ordered.set("this", meant(ordered.this))
    return [meant(each) for each in window.args["partition_by"]], order


def _in_total_order(
    grammar: Grammar,
    wanted: Sequence[tuple[str, exp.Expr]],
    category: Sequence[exp.Expr],
    order: Sequence[exp.Expr],
    count: int,
) -> dict[str, str]:
    """The definition with the key as tie-breaker, in the order that readers see.

    The rows are numbered in a subquery that has all columns, because beside the outputs an alias
    may have the name of a column.
    """
    last = order[-1]
    way = {name: last.args.get(name) for name in ("desc", "nulls_first")}
    ties = [*order, exp.Ordered(this=exp.column("__key"), **way)]
    number = exp.Window(
        this=exp.RowNumber(),
        partition_by=[each.copy() for each in category],
        order=exp.Order(expressions=[each.copy() for each in ties]),
    )
    known, name = {column.lower() for column in grammar.columns()}, _NUMBER
    while name in known:
        name += "_"
    select = grammar.select.copy()
    table = select.args["from_"].this
    numbered = exp.select("*", exp.alias_(number, name)).from_(table.copy())
    numbered.set("where", select.args.get("where"))
    table.replace(numbered.subquery(exp.to_identifier(table.alias_or_name, quoted=True)))
    select.set("where", None)
    select.set("qualify", None)
    first = exp.LTE(this=exp.column(name), expression=exp.Literal.number(count))
    select.where(first, copy=False)
    outputs = [
        (output, exp.column(name) if isinstance(each, exp.Window) else each)
        for output, each in wanted
    ]
    shown = as_shown(select, outputs, [exp.column("__key")])
    return {"batch_as_read": unordered(select, outputs), "batch_as_shown": shown}
