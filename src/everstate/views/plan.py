"""From a view's SQL to its plan: what one image of a change is worth to the view.

Pure: no Spark, no store. A plan gives Spark SQL texts; the pipeline evaluates them per change for
`original` (weight -1) and `current` (weight +1), and a store applies the sums.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from sqlglot import exp

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.views.definition import ViewDefinition
from everstate.views.grammar import COLUMN_BYTES_MAX, IMAGE, Grammar, spark_text
from everstate.views.outputs import Outputs

ROWS: Final = "n"
"""Accumulator that counts a group's entities; a group is there while it is not 0."""

_FORMAT: Final = 2
"""Changes when the same SQL is kept in another way: every view is then built again."""
_SPARK: Final = 4
"""Spark's major version: another one may compute other values of the same SQL."""
_FIELD: Final = re.compile(r"`" + IMAGE + r"`\.`((?:[^`]|``)+)`")
_ENTITY: Final = "live_entity"


@dataclass(frozen=True, slots=True)
class Column:
    """A physical column: its name, the reader's name for it, its Spark SQL over one image.

    ``output`` is ``None`` for a group column, whose reader names stand in the outputs.
    """

    name: str
    spark_sql: str
    output: str | None = None


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A sum that is kept per group.

    ``spark_sql`` gives what one image adds: for `count` 0 or 1 (``None``: always 1), for `sum` a
    number or null, which adds nothing.
    """

    name: str
    kind: Literal["count", "sum"]
    spark_sql: str | None


@dataclass(frozen=True, slots=True)
class Output:
    """A column that readers see: its name and its PostgreSQL text over groups and accumulators."""

    name: str
    postgres_sql: str


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """A view of counts, sums and averages per group; kept by adding and subtracting images."""

    name: str
    sql: str
    entity: str
    group: tuple[Column, ...]
    accumulators: tuple[Accumulator, ...]
    where_sql: str | None
    outputs: tuple[Output, ...]
    fingerprint: str
    kind: Literal["linear"] = "linear"

    @property
    def types_needed(self) -> tuple[str, ...]:
        """Fields of :meth:`columns` whose analysed types `install` wants to be told."""
        return (*(c.name for c in self.group), *(a.name for a in self._inputs))

    @property
    def _inputs(self) -> tuple[Accumulator, ...]:
        return tuple(a for a in self.accumulators if a.spark_sql is not None)

    def columns(self, prefix: str) -> str:
        """Spark SQL of what one image is worth: a struct, or null when the view has no part in it.

        ``prefix`` is the struct column that holds the image: `original` or `current`.
        """
        fields = [(c.name, c.spark_sql) for c in self.group]
        fields += [(a.name, a.spark_sql) for a in self._inputs if a.spark_sql is not None]
        return _row_delta(prefix, fields or [("one", "1")], self.where_sql)

    def batch_sql(self, table: str) -> str:
        """Groups and inputs of the sums in Spark SQL, of each of a table's live entities.

        What the oracle of what is kept sums up (`pipeline.verify`). It proves the keeping; the
        outputs are proved by the definition's own SQL.
        """
        wanted = [f"{_over(column.spark_sql, _ENTITY)} AS {column.name}" for column in self.group]
        for accumulator in self._inputs:
            text = _over(accumulator.spark_sql or "1", _ENTITY)
            wanted.append(f"{text} AS {accumulator.name}")
        return f"SELECT {', '.join(wanted) or '1 AS one'} {_from(table, self.where_sql)}"


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A view with one row per live entity that its WHERE holds for."""

    name: str
    sql: str
    entity: str
    row: tuple[Column, ...]
    where_sql: str | None
    fingerprint: str
    kind: Literal["row"] = "row"

    @property
    def types_needed(self) -> tuple[str, ...]:
        """Fields of :meth:`columns` whose analysed types `install` wants to be told."""
        return tuple(column.name for column in self.row)

    def columns(self, prefix: str) -> str:
        """Spark SQL of the row of one image: a struct, or null when it is not in the view."""
        return _row_delta(prefix, [(c.name, c.spark_sql) for c in self.row], self.where_sql)

    def batch_sql(self, table: str, key: str = "key") -> str:
        """The definition in Spark SQL over a table of live entities: the key, then the row."""
        wanted = [key, *(f"{_over(c.spark_sql, _ENTITY)} AS {c.name}" for c in self.row)]
        return f"SELECT {', '.join(wanted)} {_from(table, self.where_sql)}"


ViewPlan: TypeAlias = LinearPlan | RowPlan


def compile_view(definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> ViewPlan:
    """Plan of a definition. Raises InvalidView with the reason and the nearest form that works."""
    try:
        return _compiled(definition, entity_types)
    except RecursionError as cause:
        raise InvalidView(
            definition.name,
            "the SQL is nested too deep.",
            advice="Compute a part of it in the entity, as a field.",
        ) from cause


def _compiled(definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> ViewPlan:
    grammar = Grammar(definition, entity_types)
    select = grammar.select
    where = select.args.get("where")
    where_sql = None
    if where is not None:
        where_sql = spark_text(grammar.resolved(where.this, aggregates=False))
    wanted = _output_expressions(grammar, select.expressions)
    group = select.args.get("group")
    outputs = Outputs(grammar, wanted, group)
    if group is None and not outputs.aggregates:
        return _row_plan(definition, grammar, wanted, where_sql)
    return _linear_plan(definition, grammar, outputs, where_sql)


def _output_expressions(
    grammar: Grammar, expressions: Sequence[exp.Expr]
) -> list[tuple[str, exp.Expr]]:
    """Output names with their expressions; `*` is all columns of the entity."""
    found: list[tuple[str, exp.Expr]] = []
    for expression in expressions:
        starred = isinstance(expression, exp.Column) and isinstance(expression.this, exp.Star)
        if isinstance(expression, exp.Star) or starred:
            extras = any(expression.args.values()) and not starred
            if extras:
                grammar.refuse("* EXCEPT and REPLACE are not kept", "Name the columns.")
            found += [(name, exp.column(name, quoted=True)) for name in grammar.columns()]
            continue
        name = expression.output_name
        if not name:
            grammar.refuse(
                f"{spark_text(expression)} has no name", f"Write {spark_text(expression)} AS name."
            )
        found.append((name, expression.unalias()))
    seen: set[str] = set()
    for name, _ in found:
        if name.lower() in seen:
            grammar.refuse(f"column {name!r} is there twice", "Give each column its own name.")
        if len(name.encode()) > COLUMN_BYTES_MAX:
            grammar.refuse(f"column {name!r} is longer than {COLUMN_BYTES_MAX} bytes")
        seen.add(name.lower())
    return found


def _row_plan(
    definition: ViewDefinition,
    grammar: Grammar,
    wanted: Sequence[tuple[str, exp.Expr]],
    where_sql: str | None,
) -> RowPlan:
    for name, _ in wanted:
        if name.lower() in ("_key", "_version"):
            grammar.refuse(f"column {name!r} is there already", "Leave it out, or rename it.")
    row = tuple(
        Column(f"c{i}", spark_text(grammar.resolved(expression, aggregates=False)), name)
        for i, (name, expression) in enumerate(wanted)
    )
    texts = ["row", *(f"{c.spark_sql} AS {c.output}" for c in row), where_sql or ""]
    return RowPlan(
        definition.name,
        definition.sql,
        grammar.entity_type.name,
        row,
        where_sql,
        _fingerprint(grammar.entity_type, texts),
    )


def _linear_plan(
    definition: ViewDefinition, grammar: Grammar, outputs: Outputs, where_sql: str | None
) -> LinearPlan:
    group = tuple(Column(f"g{i}", text) for i, text in enumerate(outputs.group_texts))
    accumulators = [Accumulator(ROWS, "count", None)]
    for name, (kind, text) in outputs.accumulators.items():
        accumulators.append(Accumulator(name, kind, text))
    shown = tuple(Output(name, text) for name, text in outputs.columns)
    texts = [
        "linear",
        *(column.spark_sql for column in group),
        *(f"{a.kind}({a.spark_sql})" for a in accumulators),
        *(f"{output.postgres_sql} AS {output.name}" for output in shown),
        where_sql or "",
    ]
    return LinearPlan(
        definition.name,
        definition.sql,
        grammar.entity_type.name,
        group,
        tuple(accumulators),
        where_sql,
        shown,
        _fingerprint(grammar.entity_type, texts),
    )


def _row_delta(prefix: str, fields: Sequence[tuple[str, str]], where_sql: str | None) -> str:
    image = f"`{prefix}`"
    pairs = ", ".join(f"'{name}', {_over(text, prefix)}" for name, text in fields)
    condition = f"{image} IS NOT NULL"
    if where_sql is not None:
        condition += f" AND ({_over(where_sql, prefix)})"
    return f"CASE WHEN {condition} THEN named_struct({pairs}) END"


def _from(table: str, where_sql: str | None) -> str:
    source = f"FROM {table} AS {_ENTITY}"
    return source if where_sql is None else f"{source} WHERE {_over(where_sql, _ENTITY)}"


def _over(text: str, image: str) -> str:
    """Canonical text with the image's place holder filled in."""
    return text.replace(f"`{IMAGE}`.", f"`{image}`.")


def _fingerprint(entity_type: EntityType, texts: Sequence[str]) -> str:
    """Equal for definitions that mean the same, whatever their layout (V10).

    The types of the fields that the SQL uses belong to its meaning; the entity type's schema
    version does not, so that a new optional field builds nothing again.
    """
    used = sorted({name for text in texts for name in _FIELD.findall(text)})
    types = [f"{name} {_type_of(entity_type, name)}" for name in used]
    parts = [str(_FORMAT), str(_SPARK), entity_type.name, *types, *texts]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _type_of(entity_type: EntityType, name: str) -> str:
    place = entity_type.arrow_schema.get_field_index(name.replace("``", "`"))
    return str(entity_type.arrow_schema.field(place).type) if place >= 0 else "?"
