"""Joins of two entity types: two views of rows, indexed by the key, joined when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeAlias

from sqlglot import exp

from everstate.changes import EntityType
from everstate.views.definition import ViewDefinition
from everstate.views.grammar import spark_text
from everstate.views.joining import (
    SIDES,
    JoinColumns,
    JoinConditions,
    JoinGrammar,
    Side,
    in_definition,
    joined,
)
from everstate.views.kinds.kind import (
    BatchSource,
    Explained,
    Names,
    ViewPlan,
    output_text,
    quoted,
)
from everstate.views.kinds.shown import ALL, Shown
from everstate.views.ordering import after, as_shown, shown, unordered
from everstate.views.parsing import DIALECT
from everstate.views.tables import meaning_of

Compile: TypeAlias = Callable[[ViewDefinition, Mapping[str, EntityType]], ViewPlan]
WantedColumns: TypeAlias = Sequence[tuple[str, exp.Expr]]

_FORMAT: Final = 1
_HASH: Final = 12
_KEYS: Final = ("lk", "rk")
"""Keys of the entities joined in a row; the right one is null where LEFT JOIN found none."""


@dataclass(frozen=True)
class JoinedPlan(ViewPlan):
    """A view over the joined rows of two entity types."""

    on: str = ""
    """PostgreSQL's condition of the join."""
    is_left: bool = False
    outputs: tuple[tuple[str, str], ...] = ()
    """Names, and PostgreSQL's texts over the columns of both sides."""
    shown: Shown = ALL
    batch_rows: str = ""
    """Spark SQL of the batch, over tables that are named by their sides."""
    kind: ClassVar[str] = "join"
    source: ClassVar[BatchSource] = "live"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(part.name for part in self.parts)

    @property
    def defined(self) -> tuple[str, ...]:
        """Names in the SELECT list."""
        return tuple(name for name, _ in self.outputs)

    def batch(self, tables: Sequence[str]) -> str:
        """The batch by the author's own FROM, ON and WHERE."""
        return self.over(self.batch_rows, tables)

    def over(self, sql: str, tables: Sequence[str]) -> str:
        """A definition with the placeholders of its sides replaced by their tables."""
        for side, table in zip(SIDES, tables, strict=True):
            sql = sql.replace(_marker(side), table)
        return sql


@dataclass(frozen=True)
class JoinPlan(JoinedPlan):
    """Joined rows of two entity types."""

    sides: tuple[ViewPlan, ...] = ()
    """The part of each side."""
    counts: tuple[int, ...] = ()
    """How many columns each part has."""
    where: str | None = None
    key: ClassVar[tuple[str, ...]] = _KEYS

    @property
    def parts(self) -> tuple[ViewPlan, ...]:
        """The parts."""
        return self.sides

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        left, right = (part.entity for part in self.sides)
        return Explained(
            f"one row for each {left} and each {right} that the join reads, with an index by the "
            f"key: {', '.join(self.inputs)}",
            "one row of its side is written for the changes of a key in a batch",
            "the joined rows, by index from the side with the condition; all: both sides once",
        )

    @property
    def shown_key(self) -> tuple[str, ...]:
        """The keys of both sides."""
        return ("_key", "_joined_key")

    def read(self, names: Names, *, limited: bool = True) -> str:
        """The SELECT list, and the keys of the joined entities."""
        outputs = [output_text((text, name)) for name, text in self.outputs]
        columns = ", ".join([*outputs, "lk AS _key", "rk AS _joined_key"])
        kept = f"(SELECT * FROM {self._met(names)}) AS kept"
        return self.shown.select(columns, kept, after(self.shown.order, _KEYS), limited=limited)

    def compared(self, names: Names) -> str:
        """The columns of both sides of the joined rows."""
        columns = [
            *_KEYS,
            *(f"{s}{n}" for s, c in zip(SIDES, self.counts, strict=True) for n in range(c)),
        ]
        return f"SELECT {', '.join(columns)} FROM {self._met(names)}"

    def _met(self, names: Names) -> str:
        """Both sides joined, with the conditions on the joined rows."""
        found = []
        for side, count, part in zip(SIDES, self.counts, self.sides, strict=True):
            columns = ", ".join([f"_key AS {side}k", *(f"c{n} AS {side}{n}" for n in range(count))])
            relation = f"(SELECT {columns} FROM {names.view(part.name)})"
            found.append(f"{relation} AS {quoted(f'side_{side}')}")
        how = " LEFT JOIN " if self.is_left else " JOIN "
        query = f"{how.join(found)} ON {self.on}"
        return query if self.where is None else f"{query} WHERE {self.where}"


def join_plan(
    grammar: JoinGrammar,
    entity_types: Mapping[str, EntityType],
    wanted: WantedColumns,
    compile_view: Compile,
) -> JoinPlan:
    """Plan of a SELECT over two entity types without aggregates; raises InvalidView."""
    met, columns = joined(grammar), JoinColumns(grammar)
    keys = [(columns.name("l", left), columns.name("r", right)) for left, right in met.keys]

    def text(expression: exp.Expr) -> str:
        return columns.text(grammar.resolved(expression, aggregates=False), "SELECT")

    outputs = tuple((name, text(expression)) for name, expression in wanted)
    order = shown(grammar, wanted, text)
    on = [f"{left} = {right}" for left, right in keys]
    on += [columns.text(each, "ON", "boolean") for each in met.on]
    where = [columns.text(each, "WHERE", "boolean") for each in met.after]
    found = columns.found
    sides = tuple(
        _part(grammar, entity_types, side, met, found[side], [k[n] for k in keys], compile_view)
        for n, side in enumerate(SIDES)
    )
    condition = " AND ".join(f"({each})" for each in where) or None
    texts = [
        *(f"join/{_FORMAT}", *(part.fingerprint for part in sides), str(grammar.is_left)),
        *(*on, condition or "", *(f"{text} AS {name}" for name, text in outputs), *order.texts),
    ]
    return JoinPlan(
        grammar.view,
        grammar.entity_type.name,
        meaning_of(texts),
        grammar.declared,
        sides=sides,
        counts=tuple(len(found[side]) for side in SIDES),
        on=" AND ".join(f"({each})" for each in on),
        is_left=grammar.is_left,
        where=condition,
        outputs=outputs,
        shown=order,
        batch_rows=_batch_rows(grammar, found),
        batch_as_read=named_by_side(grammar, grammar.select, wanted),
        batch_as_shown=shown_by_side(
            grammar, wanted, [exp.column("__key", table=grammar.aliases[side]) for side in SIDES]
        ),
    )


def _part(
    grammar: JoinGrammar,
    entity_types: Mapping[str, EntityType],
    side: Side,
    met: JoinConditions,
    columns: Sequence[exp.Expr],
    keys: Sequence[str],
    compile_view: Compile,
) -> ViewPlan:
    """The view of rows of one side, with an index on its part of the join's keys."""
    entity_type = grammar.types[side]
    select = exp.select(*(exp.alias_(in_definition(e), f"c{n}") for n, e in enumerate(columns)))
    select = select.from_(exp.to_identifier(entity_type.name))
    for condition in met.where[side]:
        select = select.where(in_definition(condition))
    index = tuple(f"c{key.removeprefix(side)}" for key in keys)
    sql = select.sql(dialect=DIALECT, comments=False)
    definition = ViewDefinition(grammar.view, sql, indexes=(index,), is_part=True)
    hint = "by_" + "_".join(_last_name(columns[int(c.removeprefix("c"))]) for c in index)
    return part_of(compile_view(definition, entity_types), entity_type, hint)


def part_of(plan: ViewPlan, entity_type: EntityType, hint: str) -> ViewPlan:
    """A plan as a part: an undeclared input, with a name made of its fingerprint."""
    name = f"{entity_type.name[:20]}__{hint[:12]}_{plan.fingerprint[:_HASH]}"
    assert isinstance(plan.declared, ViewDefinition)
    return replace(plan, name=name, declared=replace(plan.declared, name=name, is_part=True))


def _last_name(node: exp.Expr) -> str:
    words = [w for w in spark_text(node).replace("`", "").split(".") if w.isidentifier()]
    return words[-1].lower() if words else "key"


def _batch_rows(grammar: JoinGrammar, found: Mapping[Side, Sequence[exp.Expr]]) -> str:
    """The columns of both sides by the author's FROM, ON and WHERE."""
    wanted: list[tuple[str, exp.Expr]] = []
    for side in SIDES:
        wanted.append((f"{side}k", exp.column("__key", table=grammar.aliases[side])))
    for side in SIDES:
        alias = grammar.aliases[side]
        wanted += [(f"{side}{n}", in_definition(e, alias)) for n, e in enumerate(found[side])]
    return named_by_side(grammar, grammar.select, wanted)


def named_by_side(grammar: JoinGrammar, select: exp.Select, wanted: WantedColumns) -> str:
    """A definition with other outputs, over tables that are named by their sides."""
    return unordered(_over_sides(grammar, select), wanted)


def shown_by_side(grammar: JoinGrammar, wanted: WantedColumns, ties: Sequence[exp.Expr]) -> str:
    """The definition with order and limit, over tables that are named by their sides."""
    return as_shown(_over_sides(grammar, grammar.select), wanted, ties)


def _over_sides(grammar: JoinGrammar, select: exp.Select) -> exp.Select:
    copied = select.copy()
    tables = copied.args["from_"].this, copied.args["joins"][0].this
    for side, table in zip(SIDES, tables, strict=True):
        named = exp.to_table(_marker(side))
        table.replace(exp.alias_(named, grammar.aliases[side], table=True))
    return copied


def _marker(side: str) -> str:
    return f"side__{side}"
