"""The SELECT list of a view of groups: the stored columns, and the outputs that readers see.

PostgreSQL computes an output from group columns (`g0`, …), summed accumulators (`n`, `a0`, …) and
results over the values of a group (`m0`, …), see :mod:`everstate.views.reading`; Spark computes the
expression inside an aggregate, per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import pyarrow as pa
from sqlglot import exp

from everstate.errors import InvalidView
from everstate.views.functions import SUPPORTED_AGGREGATES
from everstate.views.grammar import Grammar, image_path, spark_text
from everstate.views.kinds.shown import ALL, Shown
from everstate.views.ordering import shown
from everstate.views.parsing import DIALECT
from everstate.views.reading import NotReadable, ValueKind, kind_of_type, postgres_text
from everstate.views.tables import Sum
from everstate.views.windows import ENDS_AFTER, end_sql

_FLOATS: Final = frozenset({"DOUBLE", "FLOAT"})

_WRITTEN: Final = "written"
"""Key in a replaced node's `meta`: the expression that the author wrote there."""

FLOAT_ADVICE: Final = (
    "Floats are rounded, so that subtracting what was added does not always give 0. Give the "
    "number of decimal places: app.view(…, scale=4), or CAST({} AS DECIMAL(18, 4)) for this sum "
    "only."
)

_GROUPING_SETS: Final = (
    "ROLLUP, CUBE and GROUPING SETS are not allowed",
    "Declare a view for each set of groups.",
)

SCALE_MAX: Final = 18

Pick: TypeAlias = Literal["min", "max", "distinct"]
"""What is computed from the values of a group when it is read."""


class Outputs:
    """Compiles the SELECT list and GROUP BY of one definition."""

    def __init__(
        self,
        grammar: Grammar,
        wanted: Sequence[tuple[str, exp.Expr]],
        group: exp.Group | None,
    ) -> None:
        self._grammar, self.wanted = grammar, wanted
        self.aggregates = any(_aggregates(expression) for _, expression in wanted)
        self.group_texts: list[str] = []
        self._kinds: dict[str, ValueKind | None] = {"n": "number"}
        self.accumulators: dict[str, tuple[Sum, str]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self.values: list[str] = []
        """Spark's texts of the values that are counted per group; the first one has slot 1."""
        self.picked: dict[str, tuple[Pick, int]] = {}
        """What is computed from the values of which slot, by its name in the outputs."""
        self.columns: list[tuple[str, str]] = []
        self.shown = ALL
        if group is None and not self.aggregates:
            return
        if group is not None:
            self.group_texts = self._group(group, wanted)
        for name, expression in wanted:
            resolved = grammar.resolved(expression, aggregates=True)
            self.columns.append((name, self._output(name, resolved)))
        self.shown = self._shown(wanted)

    def _group(self, group: exp.Group, wanted: Sequence[tuple[str, exp.Expr]]) -> list[str]:
        grammar = self._grammar
        if any(value for name, value in group.args.items() if name not in ("expressions", "all")):
            grammar.refuse(*_GROUPING_SETS)
        expressions = list(group.expressions)
        if group.args.get("all"):
            expressions = [e.unnest() for _, e in wanted if not _aggregates(e)]
        by_name = {name.lower(): e for name, e in wanted}
        texts: list[str] = []
        for expression in expressions:
            if isinstance(expression, (exp.Rollup, exp.Cube, exp.GroupingSets)):
                grammar.refuse(*_GROUPING_SETS)
            expression = self._grouped(expression, wanted, by_name)
            if _aggregates(expression):
                grammar.refuse(
                    "an aggregate is used inside GROUP BY", "Group by fields of the entity."
                )
            resolved = grammar.resolved(expression, aggregates=False)
            text = spark_text(resolved)
            if text not in texts:
                path = image_path(resolved)
                kind = grammar.type_of(path) if path is not None else None
                self._kinds[f"g{len(texts)}"] = kind_of_type(kind)
                texts.append(text)
        return texts

    def _shown(self, wanted: Sequence[tuple[str, exp.Expr]]) -> Shown:
        """HAVING, ORDER BY and LIMIT."""
        grammar = self._grammar

        def compiled(clause: str, expression: exp.Expr, kind: ValueKind | None = None) -> str:
            resolved = grammar.resolved(expression, aggregates=True)
            return self._output(clause, resolved, kind)

        def ordered(expression: exp.Expr) -> str:
            # The end of a window orders as its start does, which is never null.
            is_end = ENDS_AFTER in expression.meta
            return compiled("ORDER BY", expression.unnest() if is_end else expression)

        found = shown(grammar, wanted, ordered)
        having = grammar.select.args.get("having")
        if having is None:
            return found
        meant = grammar.without_aliases(having.this, wanted, "HAVING")
        return replace(found, having=compiled("HAVING", meant, "boolean"))

    def _grouped(
        self,
        expression: exp.Expr,
        wanted: Sequence[tuple[str, exp.Expr]],
        by_name: dict[str, exp.Expr],
    ) -> exp.Expr:
        """The expression of GROUP BY 1 or of an alias; a column has precedence over an alias."""
        output = self._grammar.ordinal(expression, wanted, "GROUP BY")
        if output is not None:
            return output
        if isinstance(expression, exp.Column) and len(expression.parts) == 1:
            name = expression.name.lower()
            known = {column.lower() for column in self._grammar.columns()}
            if name not in known and name in by_name:
                return by_name[name]
        return expression

    def _output(self, name: str, resolved: exp.Expr, kind: ValueKind | None = None) -> str:
        """PostgreSQL's text of one output; ``kind``: the kind that it must have."""

        def replace(node: exp.Expr) -> exp.Expr:
            text = spark_text(node)
            made = node
            is_word = isinstance(node, exp.Null) and isinstance(node.parent, exp.Is)
            if text in self.group_texts and not isinstance(node, exp.Literal) and not is_word:
                made = exp.column(f"g{self.group_texts.index(text)}")
            elif isinstance(node, exp.Filter):
                made = self._aggregate(node.this, node.expression.this)
            elif isinstance(node, SUPPORTED_AGGREGATES):
                made = self._aggregate(node, None)
            if made is not node:
                made.meta[_WRITTEN] = node
            return made

        replaced = resolved.transform(replace)
        self._check_grouped(name, replaced)
        later, replaced = replaced.meta.get(ENDS_AFTER), replaced.unnest()
        if later is not None:
            return end_sql(replaced.name, later)
        try:
            extremes = (name for name, (how, _) in self.accumulators.items() if how in _EXTREMES)
            return postgres_text(replaced, self._kinds, kind, {*self.picked, *extremes})
        except NotReadable as refused:
            part = refused.node.transform(lambda part: part.meta.get(_WRITTEN, part))
            self._grammar.refuse(
                f"{name}: {self._grammar.shown(part)} {refused.reason}", self._readable(part)
            )

    def _readable(self, part: exp.Expr) -> str:
        """What to write in place of a part of an output that only Spark computes."""
        picked = part.this if isinstance(part, exp.Filter) else part
        elsewhere = "compute it in the query that reads the view."
        if not isinstance(picked, (exp.Max, exp.Min)):
            forms = "Group by the whole expression, use round or CAST … AS DECIMAL(p, s)"
            return f"{forms}, or {elsewhere}"
        kind = _number_kind(self._grammar, picked.this)
        if kind == "exact":
            return elsewhere.capitalize()
        text = f"{picked.key}(CAST({self._grammar.shown(picked.this)} AS DECIMAL(18, 4)))"
        return f"Write {text}{'' if kind == 'float' else ' if it is a number'}, or {elsewhere}"

    def _check_grouped(self, name: str, output: exp.Expr) -> None:
        for node in output.walk():
            if node is not output and ENDS_AFTER in node.meta:
                self._grammar.refuse("window.end is used inside an expression", "Use window.start.")
            if image_path(node) is not None:
                groups = ", ".join(map(self._grammar.shown, self.group_texts)) or "there is none"
                self._grammar.refuse(
                    f"{name}: the column {self._grammar.shown(node)!r} is neither in GROUP BY "
                    f"({groups}) nor inside an aggregate",
                    "A group has one value of each term of GROUP BY, and of each aggregate.",
                )

    def _aggregate(self, node: exp.Expr, condition: exp.Expr | None) -> exp.Expr:
        """The expression that replaces an aggregate in an output; registers its accumulators."""
        grammar = self._grammar
        arguments = [] if node.this is None else [node.this]
        arguments += node.expressions
        if len(arguments) != 1:
            grammar.refuse(
                f"{spark_text(node)} must have exactly one argument",
                "Count or sum one expression at a time.",
            )
        argument = arguments[0]
        if isinstance(argument, exp.Distinct):
            return self._distinct(argument, condition)
        if _aggregates(argument):
            grammar.refuse("an aggregate is used inside another aggregate", "Use only one.")
        if isinstance(node, exp.CountIf):
            both = argument if condition is None else exp.and_(condition, argument)
            return self._count(exp.case().when(both, exp.Literal.number(1)))
        if isinstance(node, exp.Count):
            if isinstance(argument, exp.Star):
                if condition is None:
                    return exp.column("n")
                return self._count(exp.case().when(condition, exp.Literal.number(1)))
            return self._count(_when(condition, argument))
        value = _when(condition, argument)
        if isinstance(node, (exp.Max, exp.Min)):
            pick: Literal["min", "max"] = "max" if isinstance(node, exp.Max) else "min"
            return self._extreme(pick, value, image_path(argument))
        self._check_sum(value)
        total = self._accumulator("sum", spark_text(value))
        present = self._count(value)
        if isinstance(node, exp.Sum):
            there = exp.NEQ(this=present, expression=exp.Literal.number(0))
            return exp.case().when(there, total)
        return exp.Paren(this=exp.Div(this=total, expression=present))

    def _distinct(self, argument: exp.Distinct, condition: exp.Expr | None) -> exp.Expr:
        """count(DISTINCT x)."""
        if len(argument.expressions) != 1:
            self._grammar.refuse(
                "count(DISTINCT a, b) with two expressions is not allowed",
                # Without the length, 'x/y' beside 'z' would be the same as 'x' beside 'y/z'.
                "Write count(DISTINCT concat(length(a), '/', a, b)).",
            )
        value = argument.expressions[0]
        if _aggregates(value):
            self._grammar.refuse("an aggregate is used inside another aggregate", "Use only one.")
        return self._pick("distinct", _when(condition, value))

    def _extreme(
        self, pick: Literal["min", "max"], value: exp.Expr, path: tuple[str, ...] | None
    ) -> exp.Expr:
        """The expression that replaces a min or max.

        Changes are never subtracted, so for them the min or max itself is stored; else the values
        are counted. ``path``: the field that is aggregated, if the argument is a field.
        """
        kind = None if path is None else self._grammar.type_of(path)
        if not self._grammar.of_changes or kind is None or not _is_ordered_alike(kind):
            return self._pick(pick, value)
        column = self._accumulator(pick, spark_text(value))
        self._kinds[column.name] = kind_of_type(kind)
        return column

    def _pick(self, pick: Pick, value: exp.Expr) -> exp.Expr:
        """The expression that replaces a min, max or count of distinct values of a slot."""
        text = spark_text(value)
        if text not in self.values:
            self.values.append(text)
        slot = self.values.index(text) + 1
        name = self._names.setdefault((pick, text), f"m{len(self.picked)}")
        self.picked[name] = (pick, slot)
        path = image_path(value)
        kind = kind_of_type(None if path is None else self._grammar.type_of(path))
        is_number = pick == "distinct" or _is_exact(self._grammar, value)
        self._kinds[name] = "number" if is_number else kind
        return exp.column(name)

    def _check_sum(self, value: exp.Expr) -> None:
        shown = self._grammar.shown(value)
        if _number_kind(self._grammar, value) == "float":
            raise InvalidView(
                self._grammar.view,
                f"sum and avg over the float {shown} cannot be updated exactly.",
                advice=FLOAT_ADVICE.format(shown),
            )
        path = image_path(value)
        kind = self._grammar.type_of(path) if path else None
        if kind is not None:
            refuse_sum_type(self._grammar.view, shown, kind)

    def _count(self, value: exp.Expr) -> exp.Expr:
        return self._accumulator(
            "count", f"CASE WHEN ({spark_text(value)}) IS NULL THEN 0 ELSE 1 END"
        )

    def _accumulator(self, kind: Sum, text: str) -> exp.Expr:
        name = self._names.setdefault((kind, text), f"a{len(self.accumulators)}")
        self.accumulators[name] = (kind, text)
        self._kinds[name] = "number"
        return exp.column(name)


def in_declared_scale(grammar: Grammar) -> None:
    """Add a CAST to each sum and avg of a definition that has a scale, unless it is exact."""
    scale = grammar.declared.scale
    if scale is None:
        return
    if not 0 <= scale <= SCALE_MAX:
        grammar.refuse(
            f"scale is {scale}", f"Give a number of decimal places from 0 to {SCALE_MAX}."
        )
    for node in list(grammar.select.find_all(exp.Sum, exp.Avg)):
        value = node.this
        if value is None or isinstance(value, exp.Distinct) or _aggregates(value):
            continue  # refused later, with a reason
        if _number_kind(grammar, grammar.resolved(value, aggregates=False)) != "exact":
            value.replace(exp.cast(value.copy(), f"DECIMAL(38, {scale})", dialect=DIALECT))


def refuse_sum_type(view: str, shown: str, kind: pa.DataType) -> None:
    """Raise InvalidView unless a sum over this type is exact."""
    if pa.types.is_floating(kind):
        raise InvalidView(
            view,
            f"sum and avg over the float {shown} cannot be updated exactly.",
            advice=FLOAT_ADVICE.format(shown),
        )
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        raise InvalidView(
            view,
            f"{shown} is {kind}, which cannot be summed.",
            advice="Sum a number, or count it.",
        )


def _is_ordered_alike(kind: pa.DataType) -> bool:
    """Whether Arrow, Spark and PostgreSQL order values alike.

    Arrow ignores the NaN of floats, and PostgreSQL has no max of booleans.
    """
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind) or pa.types.is_boolean(kind))


def _aggregates(expression: exp.Expr) -> bool:
    return expression.find(exp.AggFunc) is not None


def _when(condition: exp.Expr | None, value: exp.Expr) -> exp.Expr:
    return value if condition is None else exp.case().when(condition, value)


_EXTREMES: Final = frozenset({"max", "min"})
_EXACT_IN_ALL_PARTS: Final = (
    *(exp.Add, exp.Sub, exp.Mul, exp.Mod, exp.Neg, exp.Paren, exp.Abs, exp.Round),
    *(exp.Coalesce, exp.Nullif, exp.Case, exp.If),
)


def _number_kind(grammar: Grammar, node: exp.Expr) -> Literal["float", "exact", "unknown"]:
    """Whether a number is exact, as far as known without Spark, which decides at install."""
    path = image_path(node)
    if path is not None:
        kind = grammar.type_of(path)
        if kind is None:
            return "unknown"
        return "float" if pa.types.is_floating(kind) else "exact"
    if isinstance(node, exp.Cast):
        return "float" if node.to.this.value in _FLOATS else "exact"
    if isinstance(node, exp.Literal):
        return "float" if "e" in str(node.this).lower() else "exact"
    kinds = {_number_kind(grammar, part) for part in _parts_of_number(node)}
    if "float" in kinds:
        return "float"
    is_exact = kinds == {"exact"} and isinstance(node, _EXACT_IN_ALL_PARTS)
    return "exact" if is_exact else "unknown"


def _is_exact(grammar: Grammar, node: exp.Expr) -> bool:
    """Whether a value is known to be a whole number or a decimal."""
    path = image_path(node)
    if path is not None:
        return kind_of_type(grammar.type_of(path)) == "number"
    if isinstance(node, exp.Cast):
        return node.to.this in (exp.DType.DECIMAL, *exp.DataType.INTEGER_TYPES)
    if isinstance(node, exp.Literal):
        return not node.is_string and _number_kind(grammar, node) == "exact"
    parts = _parts_of_number(node)
    is_made_of = bool(parts) and isinstance(node, _EXACT_IN_ALL_PARTS)
    return is_made_of and all(_is_exact(grammar, part) for part in parts)


def _parts_of_number(node: exp.Expr) -> list[exp.Expr]:
    """Parts of a number that determine its type."""
    parts: list[exp.Expr | None] = []
    if isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)):
        parts = [node.left, node.right]
    elif isinstance(node, (exp.Neg, exp.Paren, exp.Abs, exp.Round, exp.Nullif)):
        parts = [node.this]
    elif isinstance(node, exp.Coalesce):
        parts = [node.this, *node.expressions]
    elif isinstance(node, exp.Case):
        parts = [branch.args["true"] for branch in node.args["ifs"]] + [node.args.get("default")]
    elif isinstance(node, exp.If):
        parts = [node.args.get("true"), node.args.get("false")]
    return [part for part in parts if part is not None and not isinstance(part, exp.Null)]
