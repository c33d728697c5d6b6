"""What a keeper's step is made of: view groups as the database says, each with what it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import Fenced
from everstate.log.positions import Range
from everstate.pipeline.spans import Sources
from everstate.views import control
from everstate.views.control import Connection
from everstate.views.project import Project, kept_always
from everstate.views.stores.postgres.group import (
    GroupPlan,
    PlannedView,
    group_plan,
    main_group,
    own_group,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """One read: a view group and the ranges after its position."""

    entity_type: EntityType
    topic: str
    group: GroupPlan
    sources: Sources
    alone: bool
    """Whether it is a view's own group."""

    @property
    def spans(self) -> dict[int, Range]:
        """What is read, by partition."""
        return self.sources.spans

    @property
    def archived(self) -> bool:
        """Whether a part of it is read from the archive."""
        return bool(self.sources.archive)


@dataclass(slots=True)
class Stored:
    """What the database says: views, and each group's position vector and epoch."""

    views: Mapping[str, control.ViewRow]
    vectors: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    epochs: dict[str, int] = field(default_factory=dict)

    @property
    def stopped(self) -> set[str]:
        """Main groups that were stopped."""
        return {row.view_group for row in self.views.values() if row.status == control.STOPPED}


def read_stored(connection: Connection, schema_name: str) -> Stored:
    """Views, positions and epochs of one moment, so that a plan is of one set of views."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        stored = Stored({row.name: row for row in control.views(connection, schema_name)})
        for row in control.positions(connection, schema_name):
            stored.vectors[row.view_group][row.partition] = row.next_offset
            stored.epochs[row.view_group] = row.epoch
    return stored


def kept_rows(project: Project, entity: str, views: Sequence[PlannedView]) -> list[control.ViewRow]:
    """What a project keeps of an entity type, as it is registered."""
    main = main_group(entity)
    rows = [
        control.ViewRow(f"{entity}_{kept}", entity, 1, main, {"keeps": kept}, kept)
        for kept in kept_always(project, entity)
    ]
    return rows + [
        control.ViewRow(
            view.plan.name,
            entity,
            view.version,
            main,
            {"sql": view.plan.sql},
            view.plan.fingerprint,
        )
        for view in views
    ]


def check_same_views(stored: Stored, entity: str, wanted: Sequence[control.ViewRow]) -> None:
    """Raise Fenced when another app has registered other views: its changes must see them all."""
    kept = {
        row.name: row.fingerprint
        for row in stored.views.values()
        if row.entity == entity and row.status != control.LEFT
    }
    mine = {row.name: row.fingerprint for row in wanted}
    if kept != mine:
        other = sorted(kept.keys() ^ mine.keys()) or sorted(mine)
        raise Fenced(
            f"another app keeps other views of {entity} in this schema (it differs in "
            f"{', '.join(other)}), and was started later.",
            advice="Stop one of the two, or give each its own views.schema_name.",
        )


def view_groups(
    config: Config, project: Project, entity_type: EntityType, views: Sequence[PlannedView],
    topic: str, stored: Stored,
) -> list[GroupPlan]:  # fmt: skip
    """The main group of an entity type, then each view that is kept alone."""
    name, schema_name = entity_type.name, config.views.schema_name
    history = f"{name}_history"
    together = [view for view in views if _in_main(stored, view.plan.name)]
    alone: list[tuple[str, list[PlannedView]]] = [
        (view.plan.name, [view]) for view in views if not _in_main(stored, view.plan.name)
    ]
    keeps_history = project.keeps_history(name)
    if keeps_history and not _in_main(stored, history):
        alone.insert(0, (history, []))

    def make(kept: Sequence[PlannedView], only: str | None) -> GroupPlan:
        view_group = main_group(name) if only is None else own_group(name, only)
        return group_plan(
            entity_type,
            kept,
            topic=topic,
            schema_name=schema_name,
            alone=only,
            history=keeps_history and (only is not None or _in_main(stored, history)),
            epoch=stored.epochs[view_group],
            held_max=config.pipeline.held_max,
        )

    return [make(together, None), *(make(kept, only) for only, kept in alone)]


def only_view(group: GroupPlan) -> str:
    """The view of a group that keeps one view alone."""
    return group.view_group.rpartition("/")[2]


def _in_main(stored: Stored, view: str) -> bool:
    row = stored.views[view]
    return row.view_group == main_group(row.entity)
