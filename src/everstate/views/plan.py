"""Compiles a view's definition to its plan: decides the kind of view, and calls its compiler.

Pure: no Spark, no store. A plan has Spark SQL texts; the pipeline evaluates them per change for
`original` (weight -1) and `current` (weight +1), and a store merges the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from sqlglot import exp

from everstate.changes import EntityType
from everstate.changes.former import FormerNames
from everstate.changes.keys import column_fault
from everstate.errors import InvalidTrigger, InvalidView
from everstate.views.control import ViewVersion
from everstate.views.definition import (
    Definition,
    PythonDefinition,
    TimelineDefinition,
    ViewDefinition,
)
from everstate.views.grammar import Grammar, spark_text
from everstate.views.joining import JoinGrammar, has_join
from everstate.views.kinds import HistoryPlan, LatestPlan, ViewPlan
from everstate.views.kinds.cache import cache_plan
from everstate.views.kinds.changes import changes_plan
from everstate.views.kinds.join import join_plan
from everstate.views.kinds.join_sums import join_sums_plan
from everstate.views.kinds.last import last_plan
from everstate.views.kinds.linear import linear_plan
from everstate.views.kinds.periods import periods_plan
from everstate.views.kinds.python import python_plan
from everstate.views.kinds.row import row_plan
from everstate.views.kinds.search import search_plan
from everstate.views.kinds.timeline import timeline_plan
from everstate.views.kinds.values import values_plan
from everstate.views.late import without_late
from everstate.views.names import length_fault
from everstate.views.options import check_options
from everstate.views.ordering import as_shown, ties_of, unordered
from everstate.views.outputs import Outputs, in_declared_scale
from everstate.views.tables import HOME, meaning_of
from everstate.views.windows import Windows, in_calendar, without_windows

EntityTypes: TypeAlias = Mapping[str, EntityType]

_KEPT_ALWAYS = {kind.kind: kind for kind in (LatestPlan, HistoryPlan)}


def compile_view(definition: Definition, entity_types: EntityTypes) -> ViewPlan:
    """Plan of a definition. Raises InvalidView with the reason and the nearest form that works."""
    if isinstance(definition, PythonDefinition):
        plan: ViewPlan = python_plan(definition, entity_types[definition.entity])
    else:
        (compiled,) = (w.compiled for w in WAYS.values() if w.definition is type(definition))
        plan = compiled(definition, entity_types)
    return _with_former(plan, entity_types[plan.entity].former)


def _with_former(plan: ViewPlan, former: FormerNames) -> ViewPlan:
    """The plan with the former names of the fields that it uses: with others it is built again."""
    uses_all = plan.rules.trigger is not None or not {"current", "original"}.isdisjoint(plan.fields)
    names = sorted({*former.fields, *former.inside})
    used = [name for name in names if uses_all or name in plan.fields]
    told = [f"{former.names(name)} {former.within(name)}" for name in used]
    return replace(plan, fingerprint=meaning_of([plan.fingerprint, *told])) if told else plan


def _compiled_sql(definition: ViewDefinition, entity_types: EntityTypes) -> ViewPlan:
    try:
        if has_join(definition):
            if definition.rules:
                raise InvalidView(
                    definition.name,
                    "a join cannot have a trigger or policies, because it shows the states of "
                    "both sides.",
                    advice="Declare them for a view of one side, and join that view in the query "
                    "that reads it.",
                )
            return _in_store(_compiled_join(definition, entity_types), definition.store)
        plan = _with_rules(_compiled(definition, entity_types), definition, entity_types)
        return _in_store(plan, definition.store)
    except RecursionError as cause:
        raise InvalidView(
            definition.name,
            "the SQL is nested too deeply.",
            advice="Compute a part of it in the entity, and store it as a field.",
        ) from cause


def plan_of(
    row: ViewVersion,
    entity_types: Mapping[str, EntityType],
    declared: Mapping[str, ViewPlan] | None = None,
) -> ViewPlan:
    """Plan of a version as it is registered, whatever is declared now.

    ``declared``: the app's plans, needed for the function of a Python view, which the registry does
    not have. Raises InvalidView when this app's model, or this release of everstate, gives its SQL
    another meaning.
    """
    plan: ViewPlan | None = None
    if "python" in row.definition:
        plan = (declared or {}).get(row.name)
        if plan is None or plan.fingerprint != row.fingerprint:
            raise InvalidView(
                row.name,
                "this app does not declare the Python function from which this version was built.",
                advice="`everstate run` builds a new version if its app declares another function.",
            )
    elif (keeps := row.definition.get("keeps")) in _KEPT_ALWAYS:
        plan = _KEPT_ALWAYS[keeps].of(row.entity)
    elif ways := [way for field, way in WAYS.items() if field in row.definition]:
        plan = compile_view(ways[0].stored(row), entity_types)
    if plan is None or plan.fingerprint != row.fingerprint:
        raise InvalidView(
            row.name,
            "its SQL means something else with this app's model, or with this release of "
            "everstate.",
            advice="`everstate plan` shows what changed; `everstate run` builds a new version.",
        )
    return plan


def _with_rules(
    plan: ViewPlan, definition: ViewDefinition, entity_types: Mapping[str, EntityType]
) -> ViewPlan:
    """The plan with the rules of its declaration; raises InvalidView."""
    rules = definition.rules
    if not rules:
        return plan
    if rules.trigger is not None:
        try:
            rules.trigger.check(entity_types[plan.entity])
        except InvalidTrigger as cause:
            raise InvalidView(plan.name, cause.message, advice=cause.advice) from cause
    elif rules.ignored and "original" in plan.table(0).images:
        # If a → b were ignored and b → c applied, b would be subtracted and never added (C30).
        raise InvalidView(
            plan.name,
            "a view of sums cannot ignore changes: the next change of the entity would subtract a "
            "value that the ignored change never added.",
            advice="Use throttle(…), ignore changes in a view of rows, or sum over changes with a "
            "trigger (when=…).",
        )
    return replace(plan, rules=rules, fingerprint=rules.fingerprint(plan.fingerprint))


def _in_store(plan: ViewPlan, store: str) -> ViewPlan:
    """The plan of a view in a store; raises InvalidView when that store cannot keep it."""
    if store == HOME:
        return plan
    # Imported here: it loads the drivers of stores.
    from everstate.views.stores.registry import kept_in

    return kept_in(store, plan)


def _compiled(definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> ViewPlan:
    grammar = Grammar(definition, entity_types)
    check_options(grammar)
    in_declared_scale(grammar)
    without_late(grammar)
    wanted = _output_expressions(grammar, grammar.select.expressions)
    select, outputs = in_calendar(grammar.select, wanted)
    as_read = unordered(select, outputs)
    whole = as_shown(select, outputs, ties_of(grammar, wanted))
    windows = without_windows(grammar)
    plan = replace(_plan(grammar, windows), is_ordered=_is_ordered(grammar))
    if plan.batch_as_read or not plan.is_plain_sql:
        return plan
    return replace(plan, batch_as_read=as_read, batch_as_shown=whole)


def _compiled_join(definition: ViewDefinition, entity_types: Mapping[str, EntityType]) -> ViewPlan:
    grammar = JoinGrammar(definition, entity_types)
    check_options(grammar)
    in_declared_scale(grammar)
    wanted = _output_expressions(grammar, grammar.select.expressions)
    group = grammar.select.args.get("group")
    outputs = Outputs(grammar, wanted, group)
    plan: ViewPlan
    if group is None and not outputs.aggregates:
        plan = join_plan(grammar, entity_types, wanted, compile_view)
    else:
        plan = join_sums_plan(grammar, entity_types, wanted, outputs, compile_view)
    return replace(plan, is_ordered=_is_ordered(grammar))


def _is_ordered(grammar: Grammar) -> bool:
    return grammar.select.args.get("order") is not None


def _plan(grammar: Grammar, windows: Windows | None) -> ViewPlan:
    """The plan of a definition over one entity type; its clauses decide the kind."""
    select = grammar.select
    where, group = select.args.get("where"), select.args.get("group")
    where_sql = None
    if where is not None:
        where_sql = spark_text(grammar.resolved(where.this, aggregates=False))
    wanted = _output_expressions(grammar, select.expressions)
    outputs = Outputs(grammar, wanted, group)
    qualified = select.args.get("qualify") is not None
    if grammar.of_history and (qualified or group is not None or outputs.aggregates):
        grammar.refuse("groups and top lists of a history are not kept", "Keep its rows.")
    if group is None and not outputs.aggregates:
        if qualified:
            return last_plan(grammar, wanted, where_sql)
        rows = row_plan(grammar, wanted, where_sql)
        if grammar.of_history:
            return periods_plan(grammar, rows)
        if grammar.declared.search:
            return search_plan(grammar, rows)
        if grammar.declared.ttl is not None:
            return cache_plan(grammar, rows)
        return changes_plan(grammar, rows) if grammar.of_changes else rows
    if qualified:
        grammar.refuse(
            "QUALIFY is not allowed with aggregates or GROUP BY",
            "Order the groups: GROUP BY … ORDER BY … LIMIT n.",
        )
    plan = values_plan if outputs.values else linear_plan
    return plan(grammar, outputs, where_sql, windows)


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
                grammar.refuse("* EXCEPT and * REPLACE are not allowed", "Name the columns.")
            alias = expression.table if isinstance(expression, exp.Column) else None
            found += grammar.columns_of(alias or None)
            continue
        name = expression.output_name
        if not name:
            grammar.refuse(
                f"the column {spark_text(expression)} has no name",
                f"Write {spark_text(expression)} AS name.",
            )
        found.append((name, expression.unalias()))
    seen: set[str] = set()
    for name, _ in found:
        if name.lower() in seen:
            grammar.refuse(f"two columns have the name {name!r}", "Give each column its own name.")
        if fault := column_fault(name) or length_fault(name):
            grammar.refuse(f"the name of the column {name!r} {fault}", "Give it another name.")
        seen.add(name.lower())
    return found


class WayToDeclare(NamedTuple):
    """One way to declare views: the class of its definitions, and how they become plans."""

    definition: type[Any]
    compiled: Callable[[Any, EntityTypes], ViewPlan]
    """The plan of a definition; raises InvalidView."""
    stored: Callable[[ViewVersion], Any]
    """The definition of a version, as the registry has it."""


def _stored_timeline(row: ViewVersion) -> TimelineDefinition:
    return TimelineDefinition(row.name, row.entity, tuple(row.definition["timeline"]))


WAYS: Final[dict[str, WayToDeclare]] = {
    "sql": WayToDeclare(
        ViewDefinition, _compiled_sql, lambda row: ViewDefinition.of(row.name, row.definition)
    ),
    "timeline": WayToDeclare(
        TimelineDefinition,
        lambda each, types: timeline_plan(each, types[each.entity]),
        _stored_timeline,
    ),
}
"""By the field that only its stored definitions have; a function in Python is not stored."""
