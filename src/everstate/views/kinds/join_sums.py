"""Aggregates over a join: sums of each side by the join's key, and the result by group.

Each side is a view of sums by the key and its own groups. The keys whose sums change are recorded
in the transaction that changes them; one worker recomputes those keys, in one snapshot
(:mod:`everstate.pipeline.keeping.refresh`). So the result is that of the batch at the positions
of both sides in the worker's snapshot, whichever side moved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from sqlglot import exp, parse_one

from everstate.changes import EntityType
from everstate.views.definition import ViewDefinition
from everstate.views.grammar import image_path, spark_text
from everstate.views.joining import SIDES, JoinGrammar, Side, in_definition, joined, sides
from everstate.views.kinds.join import (
    Compile,
    JoinedPlan,
    WantedColumns,
    named_by_side,
    part_of,
    shown_by_side,
)
from everstate.views.kinds.kind import Explained, Names, ViewPlan, identifiers, output_text, quoted
from everstate.views.kinds.linear import LinearPlan, OfGroups
from everstate.views.ordering import ties_of
from everstate.views.outputs import Outputs
from everstate.views.parsing import DIALECT
from everstate.views.tables import Sum, meaning_of

_FORMAT: Final = 1
_COUNTED: Final = re.compile(r"CASE WHEN \((.*)\) IS NULL THEN 0 ELSE 1 END", re.DOTALL)
_ONE_SIDE: Final = (
    "Use fields of one side only in each GROUP BY term, condition and aggregate; a sum may also "
    "be the product of a value of each side."
)


@dataclass(frozen=True, slots=True)
class SideSums:
    """The sums of one side: by its keys, then by its groups."""

    plan: LinearPlan
    keys: int
    """How many of its groups are the join's keys; they come first."""


@dataclass(frozen=True)
class JoinSumsPlan(OfGroups, JoinedPlan):
    """Sums, counts and averages over the joined rows of two entity types."""

    sides: tuple[SideSums, ...] = ()
    groups: tuple[str, ...] = ()
    """PostgreSQL's texts over the columns of both sides: the columns `g0`, …"""
    sums: tuple[tuple[str, Sum, str], ...] = ()
    """Name, kind, and PostgreSQL's text of the value that a joined row adds."""
    is_divided: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[LinearPlan, ...]:
        """The parts."""
        return tuple(side.plan for side in self.sides)

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"sums of each side by the join's key ({', '.join(self.inputs)}), what each key adds "
            "to each group, and the groups",
            "the sums of its side are updated, and its key is recorded; one worker recomputes the "
            "recorded keys from the sums of both sides",
            "the groups; they are as fresh as the last refresh",
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of the join's key."""
        return tuple(f"k{place}" for place in range(self.sides[0].keys))

    @property
    def group_names(self) -> tuple[str, ...]:
        """Columns of the group."""
        return tuple(f"g{place}" for place in range(len(self.groups)))

    @property
    def sums_kept(self) -> tuple[tuple[str, ...], tuple[tuple[str, Sum], ...]]:
        """The columns of the group, and all sums."""
        return self.group_names, tuple((name, kind) for name, kind, _ in self.sums)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Columns of the sums."""
        return tuple(name for name, _, _ in self.sums)

    def contributions(self, tables: Sequence[str], where: Sequence[str] = ()) -> str:
        """The query of the sums that each key of the join adds to each group.

        ``tables``: the tables of the parts; ``where``: a condition on the groups of each part.
        """
        conditions = where or [""] * len(SIDES)
        found = []
        for side, part, table, condition in zip(SIDES, self.sides, tables, conditions, strict=True):
            columns = ", ".join(
                output_text((quoted(name), f"{side}{name}")) for name in part.plan.defined
            )
            rows = part.plan.read_where(table, condition)
            found.append(f"(SELECT {columns} FROM ({rows}) AS part_{side}) AS side_{side}")
        columns_by = [f"l{name} AS {name}" for name in self.keys]
        columns_by += [f"{text} AS g{place}" for place, text in enumerate(self.groups)]
        sums = [
            f"sum({text}){'::bigint' if kind == 'count' else ''} AS {name}"
            for name, kind, text in self.sums
        ]
        how = " LEFT JOIN " if self.is_left else " JOIN "
        by = ", ".join(str(place + 1) for place in range(len(columns_by)))
        return (
            f"SELECT {', '.join([*columns_by, *sums])} FROM {how.join(found)} ON {self.on} "
            f"GROUP BY {by}"
        )

    def compared(self, names: Names) -> str:
        """Groups and sums; without groups there is always one row."""
        columns = identifiers((*self.group_names, *self.sum_names))
        if not self.groups:
            quoted_names = map(quoted, self.sum_names)
            columns = ", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in quoted_names)
        return f"SELECT {columns} FROM {names.table(self.name)}"


class _Sides:
    """Collects the columns that a join needs of its two parts: keys, groups, sums."""

    def __init__(self, grammar: JoinGrammar) -> None:
        self._grammar = grammar
        self._columns: dict[Side, dict[str, str]] = {"l": {}, "r": {}}
        """Name → Spark's text within the side."""
        self.grouped: dict[Side, list[str]] = {"l": [], "r": []}

    def group(self, side: Side, node: exp.Expr, name: str) -> str:
        """A column that the side is grouped by."""
        text = in_definition(node).sql(dialect=DIALECT, comments=False)
        for known, expression in self._columns[side].items():
            if known in self.grouped[side] and expression == text:
                return f"{side}{known}"
        self._columns[side][name] = text
        self.grouped[side].append(name)
        return f"{side}{name}"

    def sum(self, side: Side, function: str, node: exp.Expr | None) -> str:
        """A sum or count of the side; ``node`` ``None``: of its rows."""
        inner = "*" if node is None else in_definition(node).sql(dialect=DIALECT, comments=False)
        text = f"{function}({inner})"
        for known, expression in self._columns[side].items():
            if expression == text:
                return f"{side}{known}"
        name = f"s{len(self._columns[side])}"
        self._columns[side][name] = text
        return f"{side}{name}"

    def definition(self, side: Side, where: Sequence[exp.Expr]) -> ViewDefinition:
        """The view of sums of a side."""
        entity = self._grammar.types[side].name
        columns = ", ".join(f"{text} AS {name}" for name, text in self._columns[side].items())
        sql = f"SELECT {columns} FROM {entity}"
        conditions = [in_definition(each).sql(dialect=DIALECT, comments=False) for each in where]
        if conditions:
            sql += f" WHERE {' AND '.join(f'({each})' for each in conditions)}"
        groups = ", ".join(self._columns[side][name] for name in self.grouped[side])
        declared = self._grammar.declared
        return ViewDefinition(
            self._grammar.view, f"{sql} GROUP BY {groups}", scale=declared.scale, is_part=True
        )


def join_sums_of(plan: ViewPlan) -> JoinSumsPlan | None:
    """The plan, if it is of this kind, whose table a refresh fills."""
    return plan if isinstance(plan, JoinSumsPlan) else None


def join_sums_plan(
    grammar: JoinGrammar,
    entity_types: Mapping[str, EntityType],
    wanted: WantedColumns,
    outputs: Outputs,
    compile_view: Compile,
) -> JoinSumsPlan:
    """Plan of a SELECT over two entity types with aggregates; raises InvalidView."""
    if outputs.values:
        grammar.refuse(
            "min, max and count(DISTINCT) over a join are not allowed",
            "Declare a view of one side that has them, or a join without GROUP BY, and compute "
            "them in the query that reads it.",
        )
    met, found = joined(grammar), _Sides(grammar)
    if any(sides(spark_text(each)) == {"r"} for each in met.after):
        grammar.refuse(
            "WHERE has a condition on the right side of a LEFT JOIN",
            "Write JOIN if the right row must exist; otherwise move the condition to ON.",
        )
    if met.after or any(sides(spark_text(each)) != {"l"} for each in met.on):
        grammar.refuse("a condition uses fields of both sides of the join", _ONE_SIDE)
    _check_keys(grammar, met.keys)
    on = []
    for place, pair in enumerate(met.keys):
        left, right = (found.group(s, e, f"k{place}") for s, e in zip(SIDES, pair, strict=True))
        on.append(f"{left} = {right}")
    on += [found.group("l", each, f"x{place}") for place, each in enumerate(met.on)]
    groups = tuple(
        _group(grammar, found, text, place) for place, text in enumerate(outputs.group_texts)
    )
    counts = [found.sum(side, "count", None) for side in SIDES]
    rows = (f"{counts[0]}::numeric", f"coalesce({counts[1]}, {int(grammar.is_left)})")
    sums: list[tuple[str, Sum, str]] = [("n", "count", f"{rows[0]} * {rows[1]}")]
    for name, (kind, text) in outputs.accumulators.items():
        sums.append((name, kind, _sum(grammar, found, kind, text, rows)))
    parts = tuple(
        _part(entity_types, grammar, found, side, met.where[side], len(met.keys), compile_view)
        for side in SIDES
    )
    texts = [
        *(f"join sums/{_FORMAT}", *(part.plan.fingerprint for part in parts)),
        *(str(grammar.is_left), *on, *groups, *(f"{name} {text}" for name, _, text in sums)),
        *(f"{text} AS {name}" for name, text in outputs.columns),
        *outputs.shown.texts,
    ]
    return JoinSumsPlan(
        grammar.view,
        grammar.entity_type.name,
        meaning_of(texts),
        grammar.declared,
        sides=parts,
        is_left=grammar.is_left,
        on=" AND ".join(on),
        groups=groups,
        sums=tuple(sums),
        outputs=tuple(outputs.columns),
        shown=outputs.shown,
        batch_rows=_batch_inputs(grammar, outputs),
        batch_as_read=named_by_side(grammar, grammar.select, wanted),
        batch_as_shown=shown_by_side(grammar, wanted, ties_of(grammar, wanted)),
    )


def _check_keys(grammar: JoinGrammar, keys: Sequence[tuple[exp.Expr, exp.Expr]]) -> None:
    """Refuse a join in which an expression is compared with two of the other side."""
    for nodes in zip(*keys, strict=True):
        texts = [grammar.shown(node) for node in nodes]
        for place, text in enumerate(texts):
            if text in texts[:place]:
                grammar.refuse(
                    f"ON compares {text} with two values of the other side",
                    f"Compare one of them with {text}, and the two with each other: "
                    "ON a.x = b.y AND b.y = b.z.",
                )


def _group(grammar: JoinGrammar, found: _Sides, text: str, place: int) -> str:
    node = _parsed(text)
    needed = sides(text)
    if len(needed) > 1:
        grammar.refuse(
            f"GROUP BY {grammar.shown(node)} uses fields of both sides of the join", _ONE_SIDE
        )
    side: Side = "r" if needed == {"r"} else "l"
    _check_nulls(grammar, side, node)
    return found.group(side, node, f"g{place}")


def _sum(grammar: JoinGrammar, found: _Sides, kind: Sum, text: str, rows: tuple[str, str]) -> str:
    """The value that a joined row adds: a product of values of both sides."""
    counted = _COUNTED.fullmatch(text) if kind == "count" else None
    node = _parsed(text if counted is None else counted[1])
    factors = _factors(grammar, node)
    function = "count" if kind == "count" else "sum"
    parts = []
    for side, count in zip(SIDES, rows, strict=True):
        if side in factors:
            _check_nulls(grammar, side, factors[side])
            parts.append(f"coalesce({found.sum(side, function, factors[side])}, 0)::numeric")
        else:
            parts.append(count)
    return " * ".join(parts)


def _factors(grammar: JoinGrammar, node: exp.Expr) -> dict[Side, exp.Expr]:
    """The factors of a product by their sides."""
    found: dict[Side, exp.Expr] = {}
    for factor in _product(node):
        needed = sides(spark_text(factor))
        if len(needed) > 1:
            grammar.refuse(
                f"an aggregate over {grammar.shown(node)} uses fields of both sides of the join",
                _ONE_SIDE,
            )
        side: Side = "r" if needed == {"r"} else "l"
        found[side] = factor if side not in found else exp.Mul(this=found[side], expression=factor)
    return found


def _product(node: exp.Expr) -> list[exp.Expr]:
    if len(sides(spark_text(node))) < 2:
        return [node]
    if isinstance(node, exp.Paren):
        return _product(node.this)
    if isinstance(node, exp.Mul):
        return [*_product(node.left), *_product(node.right)]
    return [node]


def _check_nulls(grammar: JoinGrammar, side: Side, node: exp.Expr) -> None:
    """Refuse an expression that may not be null when a LEFT JOIN finds no row."""
    if side == "r" and grammar.is_left and image_path(node) is None:
        grammar.refuse(
            f"{grammar.shown(node)} may have a value even where the LEFT JOIN finds no right row",
            "Use a field without an expression, or write JOIN.",
        )


def _part(
    entity_types: Mapping[str, EntityType],
    grammar: JoinGrammar,
    found: _Sides,
    side: Side,
    where: Sequence[exp.Expr],
    keys: int,
    compile_view: Compile,
) -> SideSums:
    plan = compile_view(found.definition(side, where), entity_types)
    if type(plan) is not LinearPlan:
        grammar.refuse("an aggregate over a join can only be sum, count or avg", _ONE_SIDE)
    part = part_of(plan, grammar.types[side], "sums_by_key")
    assert isinstance(part, LinearPlan)
    return SideSums(part, keys)


def _batch_inputs(grammar: JoinGrammar, outputs: Outputs) -> str:
    wanted: list[tuple[str, exp.Expr]] = [
        (f"g{place}", _with_aliases(grammar, text))
        for place, text in enumerate(outputs.group_texts)
    ]
    wanted += [
        (name, _with_aliases(grammar, text)) for name, (_, text) in outputs.accumulators.items()
    ]
    wanted += [] if wanted else [("one", exp.Literal.number(1))]
    select = grammar.select.copy()
    for clause in ("group", "having"):
        select.set(clause, None)
    return named_by_side(grammar, select, wanted)


def _with_aliases(grammar: JoinGrammar, text: str) -> exp.Expr:
    """A canonical text with the aliases of the definition."""

    def renamed(part: exp.Expr) -> exp.Expr:
        path = image_path(part)
        if path is None:
            return part
        side: Side = "l" if path[0] == "l" else "r"
        return in_definition(part, grammar.aliases[side])

    return _parsed(text).transform(renamed)


def _parsed(text: str) -> exp.Expr:
    select = parse_one(f"SELECT {text} AS x", read=DIALECT)
    found: exp.Expr = select.expressions[0].this
    return found
