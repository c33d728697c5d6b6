"""Turns a project's declared views into versions of views; existing versions are not changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import psycopg
import pyarrow as pa
from pyspark.sql import SparkSession

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import InvalidView, PublishRefused
from everstate.pipeline.keeping.plan import column_types
from everstate.views.changing import give_up
from everstate.views.control import BUILDING, LIVE, RETIRED, WAITING, Control
from everstate.views.kinds import LatestPlan
from everstate.views.models import note_model
from everstate.views.project import Project
from everstate.views.stores import (
    ViewTables,
    install_core,
    is_of_a_view,
    point_core,
    reason_of,
)
from everstate.views.tables import latest_of
from everstate.views.versions import (
    REFUSED,
    Step,
    declared_elsewhere,
    declared_views,
    inputs_of,
    registered,
    steps,
)

logger = logging.getLogger(__name__)

_NOT_DECLARED: Final = "the app that was started last does not declare it"
LATER: Final = "{} declares the views; this process updates them as they are declared there"
ASKED: Final = (
    "the meaning of its definition changed; `everstate views rebuild {}` builds the new version"
)


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
    plan = _steps(config, control, project, name)
    analysed: dict[str, Mapping[str, pa.DataType] | InvalidView] = {}
    for step in plan:
        if step.declared is not None and step.what in ("new", "changed", "asked"):
            try:
                analysed[step.name] = column_types(spark, entity_type, step.declared)
            except InvalidView as refused:
                analysed[step.name] = refused
    with control.connection.transaction():
        control.lock_installing()
        _open_core(control, entity_type, partitions)
        vector = control.core_vector(name)
        begun = any(vector.values())
        # Another app may have been started since, so the steps are computed again under the lock.
        later = None if deployment is None else control.later_deployment(deployment, name)
        # Once per start, so that no restarted process undoes a later request of an operator.
        is_due = deployment is None or control.declares(deployment, name)
        plan = _steps(config, control, project, name) if is_due and later is None else []
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
        for row in control.versions(entity=entity):
            if row.name == latest_of(entity) or row.is_topic:
                continue
            if row.status in (BUILDING, WAITING):
                give_up(control, row.name, row.version)
            elif row.status == LIVE:
                logger.warning("view %s is updated no more: %s left the app", row.name, entity)
                control.set_status(row.name, row.version, RETIRED, _NOT_DECLARED)


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
    control.set_waits_for(latest_of(name), 1, said)
    return why is None


def _refusal(control: Control, name: str, point: Callable[[], object]) -> str | None:
    """Point a name in a transaction of its own; returns why it stays as it is, if it does."""
    try:
        with control.connection.transaction():
            point()
    except PublishRefused as refused:
        return refused.message
    except psycopg.errors.LockNotAvailable:
        readers = ViewTables(control).holders(name)
        return f"{readers[0] if readers else 'a reader'} holds a lock on it"
    except psycopg.Error as error:
        if not is_of_a_view(error):
            raise
        return reason_of(error)
    return None


def _refuse(control: Control, step: Step, refused: InvalidView) -> None:
    """Set a version that cannot be kept to waiting; readers and other views are not affected."""
    assert step.declared is not None
    reason = f"{REFUSED}{refused.message}"
    logger.error("%s", refused)
    control.add_version(
        registered(step.declared, step.version, status=WAITING, status_reason=reason)
    )
    control.set_status(step.name, step.version, WAITING, reason)


def _steps(config: Config, control: Control, project: Project, entity: str) -> list[Step]:
    placed = {(place.view, place.version) for place in control.positions(entity)}
    stored = control.versions()
    return steps(
        entity,
        declared_views(project, entity),
        [row for row in stored if not row.is_topic],
        standing=placed,
        elsewhere=declared_elsewhere(project, entity),
        numbers=control.numbers(),
        used=inputs_of(stored),
        on_change=config.views.on_change,
        refused=project.refused_views,
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
    tables, plan = ViewTables(control), step.declared
    for version in step.superseded:
        give_up(control, step.name, version)
    if plan is None:
        if step.what == "refused":
            logger.error("view %s stays as it was, because its declaration was refused", step.name)
        elif step.version and _status(control, step) == LIVE:
            logger.warning(
                "view %s is not declared any more, so it is not updated any more", step.name
            )
            control.set_status(step.name, step.version, RETIRED, _NOT_DECLARED)
        return
    control.end_undo(step.name, step.version, plan.fingerprint)
    if step.what == "text":
        control.set_definition(registered(plan, step.version))
    elif step.what == "returns":
        control.set_status(step.name, step.version, LIVE)
    elif step.what == "goes back":
        control.set_status(step.name, step.version, BUILDING)
        if plan.inputs:
            # Readers see it when its sums are computed again, and not as it was left.
            control.set_built(step.name, step.version, None)
    elif step.what == "asked":
        asked = ASKED.format(step.name)
        waiting = registered(plan, step.version, status=WAITING, status_reason=asked)
        control.add_version(waiting)
        control.set_status(step.name, step.version, WAITING, asked)  # one that is kept waits, too
    elif step.what in ("new", "changed"):
        control.add_version(registered(plan, step.version, status=BUILDING))
        # An earlier start may have registered it as waiting.
        control.set_status(step.name, step.version, BUILDING)
        if plan.inputs:
            # It is published when its inputs are, and when its own table is filled from them.
            return
        tables.install(plan, step.version, types)
        if beginning is not None and step.published is None:
            place = (step.name, step.version, step.entity, plan.fingerprint)
            control.open_positions(*place, beginning)
            why = _refusal(control, step.name, lambda: tables.point(plan, step.version))
            if why is None:
                control.swap_published(step.name, None, step.version)
            else:  # it rides, and the trailer publishes it when that is possible
                logger.warning("view %s is not published yet: %s", step.name, why)
                control.set_built(step.name, step.version, {})
                control.set_waits_for(step.name, step.version, f"not published: {why}")
        else:
            logger.info("view %s: version %d is being built", step.name, step.version)


def _status(control: Control, step: Step) -> str:
    rows = control.versions(step.name)
    return next(row.status for row in rows if row.version == step.version)
