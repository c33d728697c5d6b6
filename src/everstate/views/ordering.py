"""ORDER BY, LIMIT and OFFSET of a definition: which rows readers see, and in which order.

Spark and PostgreSQL order nulls differently, so each term has NULLS FIRST or LAST, as Spark does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import sqlglot
from sqlglot import exp

from everstate.views.grammar import Grammar
from everstate.views.kinds.kind import By
from everstate.views.kinds.shown import Shown
from everstate.views.parsing import DIALECT

Compiled = Callable[[exp.Expr], str]
"""Returns PostgreSQL's text of an expression of the definition."""

_SHOWN: Final = ("order", "limit", "offset")


def shown(grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]], compiled: Compiled) -> Shown:
    """ORDER BY, LIMIT and OFFSET of a definition; raises InvalidView."""
    select = grammar.select
    order = select.args.get("order")

    def meant(expression: exp.Expr) -> exp.Expr:
        output = grammar.ordinal(expression, wanted, "ORDER BY")
        return output or grammar.without_aliases(expression, wanted, "ORDER BY")

    terms = () if order is None else terms_of(grammar, order.expressions, meant, compiled)
    limit, offset = (_number(grammar, select, name) for name in ("limit", "offset"))
    if not terms and (limit is not None or offset is not None):
        grammar.refuse(
            "LIMIT without ORDER BY would show arbitrary rows",
            "Add ORDER BY with the columns that decide which rows come first.",
        )
    return Shown(order=terms, limit=limit, offset=offset or 0)


def terms_of(
    grammar: Grammar,
    expressions: Sequence[exp.Expr],
    meant: Callable[[exp.Expr], exp.Expr],
    compiled: Compiled,
) -> tuple[By, ...]:
    """Terms of an order; ``meant``: returns a term in which no name and no number is an output."""
    found = []
    for ordered in expressions:
        if not isinstance(ordered, exp.Ordered) or ordered.args.get("with_fill"):
            grammar.refuse(
                f"ORDER BY {ordered.sql(dialect=DIALECT)} is not allowed",
                "Write ORDER BY with columns or expressions.",
            )
        descending = bool(ordered.args.get("desc"))
        first = bool(ordered.args.get("nulls_first"))
        found.append(By(_bytewise(compiled(meant(ordered.this))), descending, first))
    return tuple(found)


def _bytewise(text: str) -> str:
    """PostgreSQL's text of a term; texts are ordered as in Spark, whatever the database's locale.

    Columns have the collation C, and values that are written in a CASE have that of the database.
    """
    term = sqlglot.parse_one(text, dialect="postgres")
    results = [
        result.unnest()
        for case in term.find_all(exp.Case)
        for result in (*(each.args["true"] for each in case.args["ifs"]), case.args.get("default"))
        if result is not None
    ]
    written = [each for each in results if isinstance(each, exp.Literal) and each.is_string]
    for each in written:
        exact = exp.Collate(this=each.copy(), expression=exp.to_identifier("C", quoted=True))
        each.replace(exact)
    return term.sql(dialect="postgres") if written else text


def after(terms: Sequence[By], columns: Sequence[str]) -> tuple[By, ...]:
    """Tie-breakers of an order: the columns, with the direction of the last term.

    With the same direction one index serves the whole order.
    """
    last, known = (terms[-1] if terms else By("")), {term.text for term in terms}
    return tuple(replace(last, text=column) for column in columns if column not in known)


def unordered(select: exp.Select, wanted: Sequence[tuple[str, exp.Expr]]) -> str:
    """A definition without ORDER BY, LIMIT and OFFSET, in Spark's dialect, with named outputs.

    Proofs use it, because engines may round the last digits of the values ordered by differently.
    """
    copied, outputs = _as_readers_get(select, wanted)
    for name in _SHOWN:
        copied.set(name, None)
    copied.set("expressions", outputs)
    return copied.sql(dialect=DIALECT, comments=False)


def as_shown(
    select: exp.Select, wanted: Sequence[tuple[str, exp.Expr]], ties: Sequence[exp.Expr]
) -> str:
    """A definition with its order and limit, for Spark; ``ties``: tie-breakers as in `after`."""
    copied, outputs = _as_readers_get(select, wanted)
    copied.set("expressions", outputs)
    order = copied.args.get("order")
    if order is not None:
        last = order.expressions[-1]
        way = {name: last.args.get(name) for name in ("desc", "nulls_first")}
        for tie in ties:
            order.append("expressions", exp.Ordered(this=tie.copy(), **way))
    return copied.sql(dialect=DIALECT, comments=False)


def ties_of(grammar: Grammar, wanted: Sequence[tuple[str, exp.Expr]]) -> list[exp.Expr]:
    """Tie-breakers of a definition over one entity type, as columns of its batch."""
    group = grammar.select.args.get("group")
    if group is not None:
        plain = [each for _, each in wanted if each.find(exp.AggFunc) is None]
        groups = plain if group.args.get("all") else group.expressions
        return [_window_start(each) for each in groups]
    if any(each.find(exp.AggFunc) is not None for _, each in wanted):
        return []
    names = ("key", "version") if grammar.of_changes else ("__key",)
    return [exp.column(name) for name in names]


def _window_start(group: exp.Expr) -> exp.Expr:
    """A group as it is named beside GROUP BY, where Spark does not take the call itself."""
    call = group.this if isinstance(group, exp.Dot) else group
    is_window = isinstance(call, exp.Func) and call.name.lower() == "window"
    return exp.column("start", table="window") if is_window else group


def _number(grammar: Grammar, select: exp.Select, name: str) -> int | None:
    clause = select.args.get(name)
    if clause is None:
        return None
    value = clause.expression
    if not isinstance(value, exp.Literal) or value.is_string or not str(value.this).isdigit():
        grammar.refuse(f"{name.upper()} is not a whole number", f"Write {name.upper()} 10.")
    return int(value.this)


def _as_readers_get(
    select: exp.Select, wanted: Sequence[tuple[str, exp.Expr]]
) -> tuple[exp.Select, list[exp.Expr]]:
    """Copies of a definition and its named outputs, null where readers get null and Spark stops.

    Around aggregates: for a division by zero, and for a number that its CAST cannot hold.
    """
    copied = select.copy()
    outputs: list[exp.Expr] = [exp.alias_(each.copy(), n, quoted=True) for n, each in wanted]
    group = copied.args.get("group")
    if group is None and not any(each.find(exp.AggFunc) for each in outputs):
        return copied, outputs
    groups = set() if group is None else {each.copy() for each in group.expressions}

    def is_of_spark(node: exp.Expr) -> bool:
        return isinstance(node, (exp.AggFunc, exp.Filter)) or node in groups

    for part in (*outputs, copied.args.get("having"), copied.args.get("order")):
        nodes = [] if part is None else list(part.walk(prune=is_of_spark))
        for node in [each for each in nodes if not is_of_spark(each)]:
            if isinstance(node, (exp.Div, exp.Mod)):
                zero = exp.Literal.number(0)
                node.set("expression", exp.Nullif(this=node.expression, expression=zero))
            elif isinstance(node, exp.Cast) and node.to.expressions:
                node.set("safe", True)
    return copied, outputs
