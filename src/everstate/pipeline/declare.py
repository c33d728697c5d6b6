"""What a project declares becomes versions of views; nothing that is kept is touched."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession

from everstate.changes import EntityType
from everstate.config import Config
from everstate.pipeline.plan import column_types
from everstate.views.changing import forget_version
from everstate.views.control import BUILDING, LIVE, RETIRED, WAITING, Control, ViewVersion
from everstate.views.project import Project
from everstate.views.stores import core_tables, view_tables
from everstate.views.tables import CORE_FINGERPRINT, latest_of
from everstate.views.versions import Declared, Step, declared_views, steps

log = logging.getLogger(__name__)

_NOT_DECLARED: Final = "no app that was started since declares it"
ASKED: Final = "its meaning changed; `everstate views rebuild {}` builds the new version"


def declare(
    spark: SparkSession,
    config: Config,
    control: Control,
    project: Project,
    entity_type: EntityType,
    partitions: Sequence[int],
) -> list[Step]:
    """Take the steps from what the database has to what the project declares; one transaction.

    Raises InvalidView when Spark or the store refuses a new version; then nothing is changed.
    """
    name = entity_type.name
    plan = _steps(config, control, project, name)
    types: dict[str, Mapping[str, pa.DataType]] = {}
    for step in plan:
        view = project.views.get(step.name)
        if view is not None and step.what in ("new", "changed", "asked"):
            types[step.name] = column_types(spark, entity_type, view)
    with control.connection.transaction():
        control.lock_installing()
        core_tables(control, entity_type)
        control.open_core(name, partitions)
        latest = {"keeps": "latest"}
        row = ViewVersion(latest_of(name), 1, name, latest, CORE_FINGERPRINT, published=True)
        control.add_version(row)
        vector = control.core_vector(name)
        begun = any(vector.values())
        # Another app may have been started since: the steps are those of this moment.
        plan = _steps(config, control, project, name)
        for step in plan:
            _take(control, project, step, types.get(step.name, {}), None if begun else vector)
    return plan


def _steps(config: Config, control: Control, project: Project, entity: str) -> list[Step]:
    placed = {(place.view, place.version) for place in control.positions(entity)}
    return steps(
        entity,
        declared_views(project, entity),
        control.versions(entity=entity),
        standing=placed,
        on_change=config.views.on_change,
    )


def _take(
    control: Control,
    project: Project,
    step: Step,
    types: Mapping[str, pa.DataType],
    beginning: Mapping[int, int] | None,
) -> None:
    """Take one step; ``beginning``: nothing was kept yet, and the view rides from the start."""
    tables = view_tables(control)
    for version in step.superseded:
        forget_version(control, step.name, version)
    if step.what == "not declared":
        if step.version and _status(control, step) == LIVE:
            log.warning("view %s is not declared any more: it is not kept from here on", step.name)
            control.set_status(step.name, step.version, RETIRED, _NOT_DECLARED)
        return
    assert step.declared is not None
    if step.what == "text":
        control.set_definition(step.name, step.version, step.declared.definition)
    elif step.what == "returns":
        control.set_status(step.name, step.version, LIVE)
    elif step.what == "goes back":
        control.set_status(step.name, step.version, BUILDING)
    elif step.what in ("new", "changed", "asked"):
        _add(control, step, step.declared)
        if step.what == "asked":
            return
        tables.install(step.name, step.version, project.views.get(step.name), types)
        if beginning is not None and step.published is None:
            place = (step.name, step.version, step.entity, step.declared.fingerprint)
            control.open_positions(*place, beginning)
            tables.point(step.name, step.version, project.views.get(step.name))
            control.swap_published(step.name, None, step.version)
        else:
            log.info("view %s is built: version %d", step.name, step.version)


def _add(control: Control, step: Step, declared: Declared) -> None:
    asked = step.what == "asked"
    control.add_version(
        ViewVersion(
            name=step.name,
            version=step.version,
            entity=step.entity,
            definition=declared.definition,
            fingerprint=declared.fingerprint,
            status=WAITING if asked else BUILDING,
            reason=ASKED.format(step.name) if asked else None,
        )
    )
    if not asked:
        # It may have been asked for by an earlier start.
        control.set_status(step.name, step.version, BUILDING)


def _status(control: Control, step: Step) -> str:
    rows = control.versions(step.name)
    return next(row.status for row in rows if row.version == step.version)
