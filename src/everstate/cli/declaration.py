"""`everstate views explain`: what is stored for a view, and what it costs."""

from __future__ import annotations

import json as texts
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.console import AppSession
from everstate.cli.results import Result, ResultTable
from everstate.errors import UnknownView

if TYPE_CHECKING:
    # Other commands need no Arrow.
    from everstate.views.policies import Matched, Rules


def explain(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="Name of a declared view.")],
) -> Result:
    """Explain a declaration: what is kept of the view, and what a change and a read cost."""
    project = session.app()
    if name in project.refused_views:
        raise project.refused_views[name]
    if name not in project.views:
        raise UnknownView(name, (*project.views, *project.refused_views))
    plan = project.views[name]
    told = {
        "view": plan.name,
        "kind": plan.kind,
        "of": plan.entity,
        "takes": _taken(plan.rules),
        "columns": ", ".join(plan.defined),
        "kept": plan.explained.kept,
        "a change": plan.explained.change,
        "a read": plan.explained.read,
    }
    if plan.inputs:
        told["read from"] = ", ".join(plan.inputs)
    return Result(told, ResultTable(("", ""), told.items()))


def _taken(rules: Rules) -> str:
    """Which changes a view takes."""
    fired = (
        "all"
        if rules.trigger is None
        else f"changes by which {texts.dumps(rules.trigger.definition)} fires"
    )
    told = [f"all but {_named(policy.matched)}" for policy in rules.ignored]
    if rules.per_second is not None:
        slow = " and of ".join(_named(policy.matched) for policy in rules.throttled)
        told.append(f"{rules.per_second:,g} a second of {slow}")
    return "; ".join([fired, *told] if rules.trigger is not None or not told else told)


def _named(matched: Matched) -> str:
    return ", ".join(f"{name} {' or '.join(values)}" for name, values in matched)
