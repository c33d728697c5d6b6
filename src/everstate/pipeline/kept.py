"""Which versions of views are kept now, as the database says, with their plans and positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstate.config import Config
from everstate.errors import InvalidView
from everstate.log.topics import TopicNames
from everstate.views.control import BUILDING, LIVE, Control, ViewVersion
from everstate.views.definition import ViewDefinition
from everstate.views.plan import ViewPlan, compile_view
from everstate.views.project import Project
from everstate.views.tables import (
    Core,
    HistoryTable,
    KeptTable,
    covers,
    history_of,
    kept_table,
    latest_of,
)


@dataclass(frozen=True, slots=True)
class KeptView:
    """One version of a view that is kept, and how far it is."""

    row: ViewVersion
    table: KeptTable
    plan: ViewPlan | None
    """``None``: it is the history."""
    vector: Mapping[int, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class EntityViews:
    """The core of an entity type and the views that are kept of it."""

    entity: str
    vector: Mapping[int, int]
    """Positions of the core."""
    views: tuple[KeptView, ...]
    status: ViewVersion | None
    """The row of `latest`."""

    @property
    def behind(self) -> list[KeptView]:
        """Views that are not where the core is."""
        return [view for view in self.views if not covers(view.vector, self.vector)]


class KeptViews:
    """Reads what is kept; compiles each definition once.

    Definitions are those of the database, not of the project: an app that was started earlier goes
    on keeping what a later one declared. What its model cannot compute to the same meaning, it
    leaves alone.
    """

    def __init__(self, config: Config, project: Project) -> None:
        self._config, self._project = config, project
        self._names = TopicNames(config.log.prefix)
        self._compiled: dict[tuple[str, int, str], tuple[ViewPlan | None, str | None]] = {}

    def read(self, control: Control) -> dict[str, EntityViews]:
        """Cores and kept views by entity type, as of one moment.

        A version whose definition this app's model cannot compute to its fingerprint is told in
        the registry, and left out.
        """
        with control.snapshot():
            rows = control.versions()
            places = control.positions()
        vectors: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        for place in places:
            vectors[place.view, place.version][place.partition] = place.next_offset
        found = {}
        for entity in self._project.entities:
            mine = [row for row in rows if row.entity == entity]
            views = [
                view
                for row in mine
                if (view := self._view(control, row, vectors.get((row.name, row.version))))
            ]
            latest = next((row for row in mine if row.name == latest_of(entity)), None)
            vector = vectors[latest_of(entity), 1]
            found[entity] = EntityViews(entity, vector, tuple(views), latest)
        return found

    def core(self, views: EntityViews, riders: Iterable[KeptView] = ()) -> Core:
        """The core of an entity type with some riders, as a task needs it."""
        history = next((v.table for v in views.views if isinstance(v.table, HistoryTable)), None)
        return Core(
            entity=views.entity,
            topic=self._names.changes(views.entity),
            riders=tuple(view.table for view in riders),
            ids=history,
            held_max=self._config.pipeline.held_max,
        )

    def _view(
        self, control: Control, row: ViewVersion, vector: Mapping[int, int] | None
    ) -> KeptView | None:
        if row.name == latest_of(row.entity) or row.status not in (LIVE, BUILDING) or not vector:
            return None
        if row.status == BUILDING and row.built is None:
            return None
        if row.name == history_of(row.entity):
            return KeptView(row, HistoryTable(row.name, row.version), None, vector)
        place = (row.name, row.version, row.fingerprint)
        if place not in self._compiled:
            self._compiled[place] = self._compile(row)
        plan, reason = self._compiled[place]
        if plan is None:
            control.set_reason(row.name, row.version, reason)
            return None
        return KeptView(row, kept_table(plan, row.version), plan, vector)

    def _compile(self, row: ViewVersion) -> tuple[ViewPlan | None, str | None]:
        try:
            plan = compile_view(
                ViewDefinition(row.name, row.definition["sql"]), self._project.entities
            )
        except (InvalidView, KeyError) as cause:
            return None, f"the model does not fit it any more: {cause}"
        if plan.fingerprint != row.fingerprint:
            return None, "the model, or a form of everstate, gives its SQL another meaning"
        return plan, None
