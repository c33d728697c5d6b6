"""Turns a project's declared views into versions of views; existing versions are not changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import InUse, InvalidView, PublishRefused, StatementRefused
from everstate.pipeline.keeping.plan import column_types
from everstate.views.changing import register_step, retire, steps_of
from everstate.views.control import WAITING, Control
from everstate.views.kinds import LatestPlan
from everstate.views.models import note_model
from everstate.views.project import Project
from everstate.views.stores import (
    ViewTables,
    install_core,
    point_core,
    view_refusals,
)
from everstate.views.tables import HOME, latest_of
from everstate.views.versions import (
    REFUSED,
    Step,
    registered,
)

logger = logging.getLogger(__name__)

LATER: Final = "{} declares the views; this process updates them as they are declared there"


def declare(
    spark: SparkSession,
    config: Config,
    control: Control,
    project: Project,
    entity_type: EntityType,
    partitions: Sequence[int],
    *,
    deployment: int | None = None,
) -> str | None:
    """Bring the registry from its versions to the views that the project declares; one transaction.

    A view that Spark or the store refuses waits with the reason, without stopping the other views.
    Returns the later deployment that declares the views, if there is one: then nothing is changed,
    also when a process of the earlier deployment is started again.
    """
    name = entity_type.name
    plan = steps_of(config, control, project, name)
    analysed: dict[str, Mapping[str, pa.DataType] | InvalidView] = {}
    for step in plan:
        if step.declared is not None and step.what in ("new", "changed", "asked"):
            try:
                analysed[step.name] = column_types(spark, entity_type, step.declared)
            except InvalidView as refused:
                analysed[step.name] = refused
    with control.installing():
        _open_core(control, entity_type, partitions)
        vector = control.core_vector(name)
        begun = any(vector.values())
        # Another app may have been started since, so the steps are computed again under the lock.
        later = None if deployment is None else control.later_deployment(deployment, name)
        # Once per start, so that no restarted process undoes a later request of an operator.
        is_due = deployment is None or control.declares(deployment, name)
        plan = steps_of(config, control, project, name) if is_due and later is None else []
        for step in plan:
            found = analysed.get(step.name, {})
            try:
                with control.connection.transaction():
                    if isinstance(found, InvalidView):
                        raise found
                    _take(control, step, found, None if begun else vector)
            except InvalidView as refused:
                _refuse(control, step, refused)
    return later


def _open_core(control: Control, entity_type: EntityType, partitions: Sequence[int]) -> None:
    """Create `latest` and the core's positions for an entity type."""
    name = entity_type.name
    install_core(control, entity_type)
    note_model(control, entity_type)
    control.open_core(name, partitions)
    control.add_version(registered(LatestPlan.of(name), 1, published=True))


def retire_left(control: Control, project: Project, deployment: int) -> None:
    """Retire the views of entity types that the project has no more, so that they can be dropped.

    Their rows stay, and readers see them.
    """
    for entity in control.left_entities(deployment, list(project.entities)):
        rows = control.versions(entity=entity)
        retire(control, [r for r in rows if r.name != latest_of(entity) and not r.is_topic])


def show_core(control: Control, entity_type: EntityType) -> bool:
    """Let readers see `latest` in the model's columns; false while that is refused.

    It is no part of a start, which depends on no reader. Nothing is touched where the columns are
    the same. A name stays as it is while a reader has it locked, while a view of somebody's own
    depends on a column that goes, or when it is no view of ours; `latest` then says so.
    """
    name = entity_type.name
    why = _refusal(control, name, lambda: point_core(control, entity_type))
    said = None if why is None else f"the view {name} keeps its present columns: {why}"
    if said is not None:
        logger.warning("%s", said)
    control.record(latest_of(name), 1, waits_for=said)
    return why is None


def _refusal(control: Control, name: str, point: Callable[[], object]) -> str | None:
    """Point a name in a transaction of its own; returns why it stays as it is, if it does."""
    try:
        with view_refusals(), control.connection.transaction():
            point()
    except InUse:
        readers = ViewTables(control).holders(name)
        return f"{readers[0] if readers else 'a reader'} holds a lock on it"
    except (PublishRefused, StatementRefused) as refused:
        return refused.message
    return None


def _refuse(control: Control, step: Step, refused: InvalidView) -> None:
    """Set a version that cannot be kept to waiting; readers and other views are not affected."""
    assert step.declared is not None
    reason = f"{REFUSED}{refused.message}"
    logger.error("%s", refused)
    control.add_version(
        registered(step.declared, step.version, status=WAITING, status_reason=reason)
    )


def _take(
    control: Control,
    step: Step,
    types: Mapping[str, pa.DataType],
    beginning: Mapping[int, int] | None,
) -> None:
    """Take one step; ``beginning``: the core's vector while no change is judged, else ``None``.

    With ``beginning`` a new view needs no build: it rides with the core from the start.
    """
    plan = step.declared
    if plan is None:
        if step.what == "refused":
            logger.error("view %s stays as it was, because its declaration was refused", step.name)
        else:
            gone = (step.version, *step.superseded)
            rows = control.versions(step.name)
            retire(control, [row for row in rows if row.version in gone])
    # A view over others is published when they are, and its own table is filled from them. In
    # another store the builder creates it: no start depends on that store.
    elif register_step(control, step, plan) and not plan.inputs and plan.store == HOME:
        tables = ViewTables(control)
        tables.install(plan, step.version, types)
        if beginning is not None and step.published is None:
            place = (step.name, step.version, step.entity, plan.fingerprint)
            control.open_positions(*place, beginning)
            why = _refusal(control, step.name, lambda: tables.point(plan, step.version))
            if why is None:
                control.swap_published(step.name, None, step.version)
            else:  # it rides, and the trailer publishes it when that is possible
                logger.warning("view %s is not published yet: %s", step.name, why)
                waits_for = f"not published: {why}"
                control.record(step.name, step.version, built={}, waits_for=waits_for)
        else:
            logger.info("view %s: version %d is being built", step.name, step.version)
