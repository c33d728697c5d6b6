"""The SELECT list of a linear view: its accumulators, and what readers see made of them.

An output is PostgreSQL's arithmetic over group columns (`g0`, …) and summed accumulators (`n`,
`a0`, …), see :mod:`everstate.views.reading`; what stands inside an aggregate is Spark's and is
evaluated per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import pyarrow as pa
from sqlglot import exp

from everstate.errors import InvalidView
from everstate.views.grammar import (
    SUPPORTED_AGGREGATES,
    Grammar,
    image_path,
    spark_text,
)
from everstate.views.reading import Kind, NotReadable, kind_of_type, postgres_text

_FLOATS: Final = frozenset({"DOUBLE", "FLOAT"})

_WRITTEN: Final = "written"
"""Key of a made expression's notes: what the author wrote there."""

FLOAT_ADVICE: Final = (
    "Sums of floats do not come back to 0 when they are taken away again. "
    "Write CAST({} AS DECIMAL(18, 4)), with the places you need."
)


class Outputs:
    """Compiles the SELECT list and GROUP BY of one definition."""

    def __init__(
        self,
        grammar: Grammar,
        wanted: Sequence[tuple[str, exp.Expr]],
        group: exp.Group | None,
    ) -> None:
        self._grammar = grammar
        self.aggregates = any(_aggregates(expression) for _, expression in wanted)
        self.group_texts: list[str] = []
        self._kinds: dict[str, Kind | None] = {"n": "number"}
        self.accumulators: dict[str, tuple[Literal["count", "sum"], str]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self.columns: list[tuple[str, str]] = []
        if group is None and not self.aggregates:
            return
        if group is not None:
            self.group_texts = self._group(group, wanted)
        for name, expression in wanted:
            resolved = grammar.resolved(expression, aggregates=True)
            self.columns.append((name, self._output(name, resolved)))

    def _group(self, group: exp.Group, wanted: Sequence[tuple[str, exp.Expr]]) -> list[str]:
        grammar = self._grammar
        if any(value for name, value in group.args.items() if name not in ("expressions", "all")):
            grammar.refuse("ROLLUP, CUBE and GROUPING SETS are not kept", "Keep a view of each.")
        expressions = list(group.expressions)
        if group.args.get("all"):
            expressions = [e for _, e in wanted if not _aggregates(e)]
        by_name = {name.lower(): e for name, e in wanted}
        texts: list[str] = []
        for expression in expressions:
            if isinstance(expression, (exp.Rollup, exp.Cube, exp.GroupingSets)):
                grammar.refuse(
                    "ROLLUP, CUBE and GROUPING SETS are not kept", "Keep a view of each."
                )
            expression = self._grouped(expression, wanted, by_name)
            if _aggregates(expression):
                grammar.refuse(
                    "an aggregate stands inside GROUP BY", "Group by fields of the entity."
                )
            resolved = grammar.resolved(expression, aggregates=False)
            text = spark_text(resolved)
            if text not in texts:
                path = image_path(resolved)
                kind = grammar.type_of(path) if path is not None else None
                self._kinds[f"g{len(texts)}"] = kind_of_type(kind)
                texts.append(text)
        return texts

    def _grouped(
        self,
        expression: exp.Expr,
        wanted: Sequence[tuple[str, exp.Expr]],
        by_name: dict[str, exp.Expr],
    ) -> exp.Expr:
        """What GROUP BY 1 or an alias stands for; a column of the entity wins over an alias."""
        if isinstance(expression, exp.Literal) and not expression.is_string:
            index = int(expression.this) - 1 if expression.this.isdigit() else -1
            if not 0 <= index < len(wanted):
                self._grammar.refuse(f"GROUP BY {expression.this} names no column")
            return wanted[index][1]
        if isinstance(expression, exp.Column) and len(expression.parts) == 1:
            name = expression.name.lower()
            known = {column.lower() for column in self._grammar.columns()}
            if name not in known and name in by_name:
                return by_name[name]
        return expression

    def _output(self, name: str, resolved: exp.Expr) -> str:
        """PostgreSQL's text of one output."""

        def replace(node: exp.Expr) -> exp.Expr:
            text = spark_text(node)
            made = node
            if text in self.group_texts and not isinstance(node, exp.Literal):
                made = exp.column(f"g{self.group_texts.index(text)}")
            elif isinstance(node, exp.Filter):
                made = self._aggregate(node.this, node.expression.this)
            elif _is_aggregate(node):
                made = self._aggregate(node, None)
            if made is not node:
                made.meta[_WRITTEN] = node
            return made

        replaced = resolved.transform(replace)
        self._check_grouped(replaced)
        try:
            return postgres_text(replaced, self._kinds)
        except NotReadable as refused:
            part = refused.node.transform(lambda part: part.meta.get(_WRITTEN, part))
            self._grammar.refuse(
                f"{name}: {_plain(part)} {refused.reason}",
                "Group by the whole expression, use round or CAST … AS DECIMAL(p, s), "
                "or compute it when reading.",
            )

    def _check_grouped(self, output: exp.Expr) -> None:
        for node in output.walk():
            if image_path(node) is not None:
                column = ".".join(image_path(node) or ())
                self._grammar.refuse(
                    f"column {column!r} is neither grouped nor inside an aggregate",
                    f"Add it to GROUP BY, or wrap it: sum({column}).",
                )

    def _aggregate(self, node: exp.Expr, condition: exp.Expr | None) -> exp.Expr:
        """What stands for an aggregate in the output, registering its accumulators."""
        grammar = self._grammar
        named = isinstance(node, exp.Anonymous)
        arguments = [] if named or node.this is None else [node.this]
        arguments += node.expressions
        if len(arguments) != 1:
            grammar.refuse(
                f"{spark_text(node)} needs one argument", "Count or sum one expression at a time."
            )
        argument = arguments[0]
        if any(_is_aggregate(inner) for inner in argument.walk()):
            grammar.refuse("an aggregate stands inside another aggregate", "Use one.")
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
        self._check_sum(value)
        total = self._accumulator("sum", spark_text(value))
        present = self._count(value)
        if isinstance(node, exp.Sum):
            there = exp.NEQ(this=present, expression=exp.Literal.number(0))
            return exp.case().when(there, total)
        return exp.Paren(this=exp.Div(this=total, expression=present))

    def _check_sum(self, value: exp.Expr) -> None:
        if _number_kind(self._grammar, value) == "float":
            raise InvalidView(
                self._grammar.view,
                f"sum and avg over the float {_plain(value)} cannot be kept exactly.",
                advice=FLOAT_ADVICE.format(_plain(value)),
            )
        path = image_path(value)
        kind = self._grammar.type_of(path) if path else None
        if kind is not None:
            refuse_sum_type(self._grammar.view, _plain(value), kind)

    def _count(self, value: exp.Expr) -> exp.Expr:
        return self._accumulator(
            "count", f"CASE WHEN ({spark_text(value)}) IS NULL THEN 0 ELSE 1 END"
        )

    def _accumulator(self, kind: Literal["count", "sum"], text: str) -> exp.Expr:
        name = self._names.setdefault((kind, text), f"a{len(self._names)}")
        self.accumulators[name] = (kind, text)
        self._kinds[name] = "number"
        return exp.column(name)


def refuse_sum_type(view: str, shown: str, kind: pa.DataType) -> None:
    """Raise InvalidView unless a sum over this type is exact."""
    if pa.types.is_floating(kind):
        raise InvalidView(
            view,
            f"sum and avg over the float {shown} cannot be kept exactly.",
            advice=FLOAT_ADVICE.format(shown),
        )
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        raise InvalidView(
            view,
            f"{shown} is {kind}, which cannot be summed.",
            advice="Sum a number, or count it.",
        )


def _is_aggregate(node: exp.Expr) -> bool:
    named_mean = isinstance(node, exp.Anonymous) and node.name.lower() == "mean"
    return isinstance(node, SUPPORTED_AGGREGATES) or named_mean


def _aggregates(expression: exp.Expr) -> bool:
    return any(_is_aggregate(node) or isinstance(node, exp.AggFunc) for node in expression.walk())


def _when(condition: exp.Expr | None, value: exp.Expr) -> exp.Expr:
    return value if condition is None else exp.case().when(condition, value)


def _plain(expression: exp.Expr) -> str:
    return spark_text(expression).replace("`__image__`.", "").replace("`", "")


def _number_kind(grammar: Grammar, node: exp.Expr) -> Literal["float", "exact", "unknown"]:
    """What is known of a number without asking Spark, which has the last word at install."""
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
    parts: list[exp.Expr] = []
    if isinstance(node, (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Nullif)):
        parts = [node.left, node.right] if isinstance(node, exp.Binary) else [node.this]
    elif isinstance(node, (exp.Neg, exp.Paren, exp.Abs, exp.Round)):
        parts = [node.this]
    elif isinstance(node, exp.Coalesce):
        parts = [node.this, *node.expressions]
    elif isinstance(node, exp.Case):
        parts = [branch.args["true"] for branch in node.args["ifs"]]
        parts += [node.args["default"]] if node.args.get("default") is not None else []
    elif isinstance(node, exp.If):
        parts = [p for p in (node.args.get("true"), node.args.get("false")) if p is not None]
    kinds = {_number_kind(grammar, part) for part in parts}
    return "float" if "float" in kinds else "unknown"
