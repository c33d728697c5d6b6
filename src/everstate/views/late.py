"""Late changes of a view `FROM …_changes`: counted, or moved to a view of their own (aside).

A change is late when it was recorded more than `lateness` after it occurred. This depends only on
the change, so it does not matter when or in which batch the change is read (law 6).
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp, parse_one
from sqlglot.errors import SqlglotError

from everstate.views.definition import ViewDefinition
from everstate.views.durations import microseconds
from everstate.views.functions import SUPPORTED_AGGREGATES
from everstate.views.grammar import Grammar
from everstate.views.parsing import DIALECT, parsed

COUNT: Final = "count"
ASIDE: Final = "aside"
_COLUMN: Final = "late"
_ADVICE: Final = 'Write lateness="1 hour", late="count" (or "aside").'


def aside(definition: ViewDefinition) -> ViewDefinition | None:
    """The view of a definition's late changes; ``None``: it has none."""
    if definition.late != ASIDE:
        return None
    size = microseconds(definition.lateness or "")
    try:
        (select,) = parsed(definition.sql)
    except (SqlglotError, ValueError):
        return None  # compiling the view itself raises the refusal with its reason
    source = None if select is None else select.args.get("from_")
    if size is None or select is None or source is None:
        return None
    made = exp.select("*").from_(source.this.copy())
    where = select.args.get("where")
    if where is not None:
        made = made.where(where.this.copy())
    made = made.where(exp.Not(this=exp.paren(_on_time(size))))
    name = f"{definition.name}_late"
    return ViewDefinition(
        name, made.sql(dialect=DIALECT), rules=definition.rules, store=definition.store
    )


def without_late(grammar: Grammar) -> None:
    """Exclude or count late changes in a definition with `lateness`; raises InvalidView."""
    declared = grammar.declared
    if declared.lateness is None and declared.late is None:
        return
    size = microseconds(declared.lateness or "")
    if size is None or size < 0 or declared.late not in (COUNT, ASIDE):
        grammar.refuse(
            "lateness must be a duration, and late must be count or aside; a view has both or "
            "neither",
            _ADVICE,
        )
    if not grammar.of_changes:
        grammar.refuse(
            "only a view of changes has late changes; a late change simply corrects a view of "
            "states",
            f"Leave lateness out, or write FROM {grammar.entity_type.name}_changes.",
        )
    if declared.late == ASIDE:
        grammar.select.where(_on_time(size), copy=False)
        return
    # One inside another is refused later.
    aggregates = grammar.select.find_all(*SUPPORTED_AGGREGATES)
    counted = [each for each in aggregates if each.find_ancestor(*SUPPORTED_AGGREGATES) is None]
    if not counted:
        grammar.refuse(
            'late="count" needs groups, in which late changes are counted',
            'Add GROUP BY, or write late="aside".',
        )
    for node in counted:
        _only_on_time(node, _on_time(size))
    late = exp.CountIf(this=exp.Not(this=exp.paren(_on_time(size))))
    grammar.select.append("expressions", exp.alias_(late, _COLUMN))


def _only_on_time(node: exp.Expr, on_time: exp.Expr) -> None:
    """Restrict an aggregate to the changes that are on time."""
    parent = node.parent
    if isinstance(parent, exp.Filter):
        condition = parent.expression.this
        condition.replace(exp.and_(condition.copy(), on_time))
    else:
        made = exp.Filter(this=node.copy(), expression=exp.Where(this=on_time))
        node.replace(made)


def _on_time(size: int) -> exp.Expr:
    text = f"UNIX_MICROS(recorded_at) - UNIX_MICROS(occurred_at) <= {size}"
    return parse_one(text, read=DIALECT)
