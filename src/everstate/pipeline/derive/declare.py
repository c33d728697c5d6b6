"""A declared derived topic becomes a version in the registry, as a view does."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from everstate.changes.derived import Derivation
from everstate.config import Config
from everstate.views.changing import register_step, retire
from everstate.views.control import Control
from everstate.views.kinds import ViewPlan
from everstate.views.versions import Step, steps


def declare_topic(config: Config, control: Control, derivation: Derivation) -> Step:
    """Bring the registry from its version to the declared one; one transaction. Returns the step.

    A new version has no positions yet.
    """
    with control.installing():
        name = derivation.name
        placed = {(name, row.version) for row in control.versions(name)}
        # A derivation has the attributes of a view plan that `steps` uses.
        (step,) = steps(
            derivation.entity,
            [cast("ViewPlan", derivation)],
            control.versions(name),
            standing=placed,
            numbers=control.numbers(),
            on_change=config.views.on_change,
        )
        register_step(control, step, cast("ViewPlan", derivation))
    return step


def retire_topics(control: Control, declared: Collection[str]) -> None:
    """Retire topics that no app declares any more: their records stay, and none are added.

    ``declared`` has the names of topics, also of those whose declaration is refused.
    """
    rows = control.versions()
    retire(control, [row for row in rows if row.is_topic and row.name not in declared])
