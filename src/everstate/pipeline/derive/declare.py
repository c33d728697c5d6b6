"""A declared derived topic becomes a version in the registry, as a view does."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final, cast

from everstate.changes.derived import Derivation
from everstate.config import Config
from everstate.pipeline.keeping.declare import ASKED
from everstate.views.changing import forget_version
from everstate.views.control import BUILDING, LIVE, RETIRED, WAITING, Control
from everstate.views.kinds import ViewPlan
from everstate.views.versions import Step, registered, steps

logger = logging.getLogger(__name__)

_NOT_DECLARED: Final = "the app that was started last does not declare it"


def declare_topic(config: Config, control: Control, derivation: Derivation) -> Step:
    """Bring the registry from its version to the declared one; one transaction. Returns the step.

    The first version of a topic begins at the log's first change when the core has judged nothing
    yet, and so does every raw one; all others are built. The core must have positions already.
    """
    with control.connection.transaction():
        control.lock_installing()
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
        _take(control, step, derivation)
    return step


def _take(control: Control, step: Step, derivation: Derivation) -> None:
    name, version = step.name, step.version
    for old in step.superseded:
        forget_version(control, name, old)
    plan = cast("ViewPlan", derivation)
    control.end_undo(name, version, plan.fingerprint)
    if step.what == "text":
        control.set_definition(registered(plan, version))
    elif step.what == "returns":
        control.set_status(name, version, LIVE)
    elif step.what == "goes back":
        control.set_status(name, version, BUILDING)
    elif step.what == "asked":
        control.add_version(
            registered(plan, version, status=WAITING, status_reason=ASKED.format(name))
        )
    elif step.what in ("new", "changed"):
        control.add_version(registered(plan, version, status=BUILDING))
        control.set_status(name, version, BUILDING)
        begun = any(control.core_vector(derivation.entity).values())
        if derivation.is_raw or not begun:
            open_topic_version(
                control, derivation, version, control.core_vector(derivation.entity), zero=True
            )


def open_topic_version(
    control: Control,
    derivation: Derivation,
    version: int,
    vector: Mapping[int, int],
    *,
    zero: bool = False,
) -> None:
    """Give a version positions, so that nothing after them is trimmed, and mark it as built."""
    here = dict.fromkeys(vector, 0) if zero else dict(vector)
    place = (derivation.name, version, derivation.entity, derivation.fingerprint)
    control.open_positions(*place, here)
    positions = {f"1/{partition}": offset for partition, offset in here.items()}
    control.set_built(derivation.name, version, {"vector": positions})


def retire_topics(control: Control, declared: Collection[str]) -> None:
    """Retire topics that no app declares any more: their records stay, and none are added.

    ``declared`` has the names of topics, also of those whose declaration is refused.
    """
    for row in control.versions():
        if not row.is_topic or row.name in declared:
            continue
        if row.status in (BUILDING, WAITING) and row.published_at is None:
            with control.connection.transaction():
                forget_version(control, row.name, row.version)
        elif row.published and row.status == LIVE:
            logger.warning(
                "derived topic %s is not declared any more, so nothing is published to it", row.name
            )
            control.set_status(row.name, row.version, RETIRED, _NOT_DECLARED)
