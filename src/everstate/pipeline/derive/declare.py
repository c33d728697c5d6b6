"""A declared derived topic becomes a version in the registry, as a view does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from everstate.changes.derived import Derivation
from everstate.config import Config
from everstate.views.changing import register_step, retire
from everstate.views.control import Control
from everstate.views.kinds import ViewPlan
from everstate.views.versions import Step, steps


def declare_topic(config: Config, control: Control, derivation: Derivation) -> Step:
    """Bring the registry from its version to the declared one; one transaction. Returns the step.

    The first version of a topic begins at the log's first change when the core has judged nothing
    yet, and so does every raw one; all others are built. The core must have positions already.
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
        if register_step(control, step, cast("ViewPlan", derivation)):
            vector = control.core_vector(derivation.entity)
            if derivation.is_raw or not any(vector.values()):
                open_topic_version(control, derivation, step.version, dict.fromkeys(vector, 0))
    return step


def open_topic_version(
    control: Control, derivation: Derivation, version: int, vector: Mapping[int, int]
) -> None:
    """Give a version positions, so that nothing after them is trimmed, and mark it as built."""
    place = (derivation.name, version, derivation.entity, derivation.fingerprint)
    control.open_positions(*place, vector)
    positions = {f"1/{partition}": offset for partition, offset in vector.items()}
    control.record(derivation.name, version, built={"vector": positions})


def retire_topics(control: Control, declared: Collection[str]) -> None:
    """Retire topics that no app declares any more: their records stay, and none are added.

    ``declared`` has the names of topics, also of those whose declaration is refused.
    """
    rows = control.versions()
    retire(control, [row for row in rows if row.is_topic and row.name not in declared])
