"""The versions of views in the registry that are kept now, with their plans and positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from everstate.config import Config
from everstate.errors import InvalidView
from everstate.log.topics import TopicNames
from everstate.retrying import Retries
from everstate.runtime.worker import Worker
from everstate.views.control import BUILDING, LIVE, Control, ControlConnection, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.plan import plan_of
from everstate.views.project import Project
from everstate.views.stores import close_store
from everstate.views.tables import Core, KeptTable, covers, history_of, latest_of, placed


class ViewWorker(Worker):
    """Works on views: one that fails waits and is retried alone."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._retries = Retries()
        self._database = ControlConnection(config)

    def leave(self) -> None:
        """Close the connection to the store of this thread."""
        close_store(self._config.views_dsn)

    def close(self) -> None:
        """Close the connections of this thread; the Spark session is the caller's."""
        self.leave()
        self._database.close()


@dataclass(frozen=True, slots=True)
class KeptView:
    """One version of a view that is kept, with its position."""

    row: ViewVersion
    table: KeptTable
    plan: ViewPlan
    vector: Mapping[int, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class ForeignVersion:
    """A version behind the core that this application cannot keep; another one may do so."""

    row: ViewVersion
    vector: Mapping[int, int] = field(hash=False)
    why: str


class StalledVersions:
    """How long positions of versions have not moved, as seen by repeated looks."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[Mapping[int, int], float]] = {}

    def seconds(self, view: ForeignVersion, now: float) -> float:
        """Seconds for which every look has found the version where it is; ``now``: in seconds."""
        place = (view.row.name, view.row.version)
        vector, since = self._seen.get(place, (None, now))
        if vector != view.vector:
            self._seen[place] = (view.vector, now)
            return 0.0
        return now - since


@dataclass(frozen=True, slots=True)
class EntityViews:
    """The core of an entity type and its views that are kept."""

    entity: str
    vector: Mapping[int, int]
    """Positions of the core."""
    views: tuple[KeptView, ...]
    status: ViewVersion | None
    """The row of `latest`."""
    rows: tuple[ViewVersion, ...] = ()
    """All versions of its views, by name and number."""
    foreign: tuple[ForeignVersion, ...] = ()
    """Versions behind the core that this application's models cannot compute."""

    @property
    def behind(self) -> list[KeptView]:
        """Views that are behind the core."""
        return [view for view in self.views if not covers(view.vector, self.vector)]


# During a last step of at most so many offsets the core is locked, so that the view meets it (V7).
MEETING_CHANGES: Final = 20_000


class KeptViews:
    """Reads the kept versions; compiles each definition once.

    Definitions come from the database, not from the project: an app that was started earlier keeps
    the views that a later one declared. It does not touch a version that its model cannot compute
    with the same meaning.
    """

    def __init__(self, config: Config, project: Project) -> None:
        self._config, self._project = config, project
        self._names = TopicNames(config.log.prefix)
        self._compiled: dict[tuple[str, int, str], ViewPlan | str] = {}

    def read(self, control: Control) -> dict[str, EntityViews]:
        """Cores and kept views by entity type, in one snapshot.

        A version whose definition does not give its fingerprint with this app's model is left out.
        Nothing is stored: another app may keep it.
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
            vector = vectors[latest_of(entity), 1]
            views, foreign = [], []
            for row in mine:
                mine_at = vectors[row.name, row.version]
                view = self._view(row, mine_at)
                if isinstance(view, KeptView):
                    views.append(view)
                elif view is not None and not covers(mine_at, vector):
                    foreign.append(ForeignVersion(row, mine_at, view))
            latest = next((row for row in mine if row.name == latest_of(entity)), None)
            found[entity] = EntityViews(
                entity, vector, tuple(views), latest, tuple(mine), tuple(foreign)
            )
        return found

    def core(self, views: EntityViews, riders: Iterable[KeptView] = ()) -> Core:
        """The core of an entity type with some riders, as an argument of a task."""
        name = history_of(views.entity)
        history = next((v.table for v in views.views if v.row.name == name), None)
        return Core(
            entity=views.entity,
            topic=self._names.changes(views.entity),
            riders=tuple(view.table for view in riders),
            ids=history,
            held_max=self._config.pipeline.held_max,
        )

    def _view(self, row: ViewVersion, vector: Mapping[int, int] | None) -> KeptView | str | None:
        """A kept version, the reason why this app cannot keep it, or ``None``: it is not kept."""
        if row.name == latest_of(row.entity) or row.status not in (LIVE, BUILDING) or not vector:
            return None
        if row.is_topic or (row.status == BUILDING and row.built is None):
            return None
        place = (row.name, row.version, row.fingerprint)
        if place not in self._compiled:
            try:
                found: ViewPlan | str = plan_of(row, self._project.entities, self._project.views)
            except InvalidView as cause:
                found = f"the entity's model does not fit its definition any more: {cause.message}"
            self._compiled[place] = found
        plan = self._compiled[place]
        if isinstance(plan, str):
            return plan
        table = plan.ruled_table(row.version)
        if row.attempt:
            table = replace(table, fingerprint=placed(table.fingerprint, row.attempt))
        return KeptView(row, table, plan, vector)
