"""`everstate plan`: shows in advance how starting this app would change the kept views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from rich.text import Text

from everstate.app import App
from everstate.changes.evolution import FieldChange
from everstate.cli.console import READING, AppSession
from everstate.cli.results import Aside, Piece, Result, ResultTable, show_pieces
from everstate.config import Config
from everstate.log.lag import is_reachable
from everstate.log.topics import TopicDifference, Topics
from everstate.views.changing import steps_of
from everstate.views.control import LIVE, RETIRED, Control, ViewVersion, opened_control
from everstate.views.models import check_models, model_changes
from everstate.views.tables import latest_of
from everstate.views.versions import Step

_CHANGES_PER_S: Final = 40_000
"""Measured rate of a build on two cores; used until this project has built a version."""
_MEASURED_MIN: Final = 50_000
"""Builds of fewer changes are not used for the rate: most of their time is the start."""
_STARTING_S: Final = 4.0

_READERS: Final = {
    "new": "nothing, until it is built",
    "changed": "the previous version, until the new one is built",
    "asked": "the previous version; `everstate views rebuild` builds the new one",
    "text": "the same rows: only the text of the SQL changed",
    "returns": "its kept rows, until it has caught up",
    "goes back": "the published version, until this one has caught up",
    "refused": "the kept version, if there is one; the reason is above",
    "not declared": "its kept rows without new changes; `everstate views drop` removes it",
}


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """How one view would change."""

    view: str
    entity: str
    what: str
    why: str
    """The difference from the kept view."""
    version: int
    published: int | None
    reads_changes: int
    reads_bytes: int
    """Upper bound for the bytes read from the archive."""
    seconds: float
    """Estimated duration."""
    readers_see: str


@dataclass(frozen=True, slots=True)
class PlannedField:
    """How one field of a model would change."""

    entity: str
    field: str
    what: str
    before: str | None
    after: str | None
    views: tuple[str, ...]
    """Views that use it, as kept now or as declared."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The changes that starting an app would make; two empty lists: none."""

    models: tuple[PlannedField, ...]
    views: tuple[PlannedStep, ...]
    is_first: bool
    """No view is kept yet: the app is new."""


def plan(session: AppSession) -> Result:
    """Show how a start of this app would change views and topics, and what it would read.

    Exit code 2 when a model changed in a way that a running project cannot take.
    """
    config, project = session.connected(needs=READING)
    changes, found = planned(config, project)
    tell_refused(project)
    nothing = Aside("nothing to do: the kept views are those that the app declares")
    told, topics = plan_pieces(found), list[TopicDifference]()
    if is_reachable(config):
        with Topics(config) as log:
            topics = [*log.differences(project.entities, project.command_groups)]
    rows = [(each.topic, each.setting, each.found, each.wanted, each.then) for each in topics]
    if rows:
        columns = ("topic", "setting", "now", "configured", "what happens")
        told.append(ResultTable(columns, rows))
    value = {**asdict(found), "topics": topics}
    return Result(value, *(told or [nothing]), then=partial(check_models, changes))


def plan_pieces(found: Planned) -> list[Piece]:
    """The planned changes as tables; empty: there are none."""
    models = [
        (
            *(each.entity, each.field, each.what, each.before, each.after),
            ", ".join(each.views) or None,
            each.meaning,
        )
        for each in found.models
    ]
    views = [
        (
            *(step.view, step.what, step.why, step.version, step.reads_changes),
            round(step.reads_bytes / 2**20, 1),
            round(step.seconds, 1),
            step.readers_see,
        )
        for step in found.views
    ]
    of_models = ("model", "field", "what", "before", "now", "views", "what happens")
    of_views = ("view", "what", "why", "version", "reads changes", "MiB", "seconds, about")
    tables = ResultTable(of_models, models), ResultTable((*of_views, "readers see"), views)
    return [each for each in tables if each.rows]


def tell_refused(project: App) -> None:
    """Print the declared views that cannot be kept, each with its reason and the nearest form."""
    for refusal in project.refused_views.values():
        where = f"{refusal.declared_at}: " if refusal.declared_at else ""
        said = f"{where}{refusal.message} {refusal.advice or ''}"
        show_pieces(Aside(Text.assemble(("not kept: ", "bold yellow"), said)))


def planned(config: Config, project: App) -> tuple[list[FieldChange], Planned]:
    """Differences between what is kept and what an app declares.

    Cost: some small statements; for views to build, also the lake's statistics.
    """
    with (
        opened_control(config) as control,
        # Tables that are missing are there for this look only.
        control.connection.transaction(force_rollback=True),
    ):
        control.install()
        changes = model_changes(control, project)
        rows = control.versions()
        found: list[Step] = []
        for entity in project.entities:
            found += steps_of(config, control, project, entity)
        found += _left(control, project, rows)
        counts = {name: sum(control.core_vector(name).values()) for name in project.entities}
    retired = {row.name for row in rows if row.status == RETIRED}
    differing = [
        step
        for step in found
        if step.what != "same" and not (step.what == "not declared" and step.name in retired)
    ]
    rate = _rate(rows)
    return changes, Planned(
        models=tuple(_field(each, project, rows) for each in changes),
        views=tuple(_step(config, step, counts, rate, rows, changes) for step in differing),
        is_first=not any(counts.values()),
    )


def _left(control: Control, project: App, rows: Sequence[ViewVersion]) -> list[Step]:
    """Views of entity types that left the app: a start updates them no more."""
    start = control.begin_deployment(project.name, "")  # taken back with all the rest
    left = control.left_entities(start, list(project.entities))
    return [
        Step("not declared", row.name, row.entity, row.version, row.version)
        for row in rows
        if row.entity in left and row.published and row.status == LIVE
        if row.name != latest_of(row.entity) and not row.is_topic
    ]


def _step(
    config: Config,
    step: Step,
    counts: Mapping[str, int],
    rate: float,
    rows: Sequence[ViewVersion],
    changes: Sequence[FieldChange],
) -> PlannedStep:
    count = counts.get(step.entity, 0)
    builds = step.what in ("new", "changed", "asked") and count > 0
    return PlannedStep(
        view=step.name,
        entity=step.entity,
        what=step.what,
        why=_why(step, rows, changes),
        version=step.version,
        published=step.published,
        reads_changes=count if builds else 0,
        reads_bytes=_archive_bytes(config, step.entity) if builds else 0,
        seconds=_STARTING_S + count / rate if builds else 0.0,
        readers_see=_READERS[step.what],
    )


def _why(step: Step, rows: Sequence[ViewVersion], changes: Sequence[FieldChange]) -> str:
    """The difference in words."""
    seen = next((r for r in rows if (r.name, r.version) == (step.name, step.published)), None)
    if step.declared is None:
        return "the app does not declare it"
    if step.what in ("new", "returns") or seen is None or seen.status == RETIRED:
        return "the app declares it" if step.what == "new" else "the app declares it again"
    if step.what == "text":
        return "the text of its SQL, not its meaning"
    if dict(seen.definition) != dict(step.declared.definition):
        return "its SQL"
    used = [
        f"{each.field} {f'was {each.before}' if each.what == 'renamed' else f'is {each.after}'}"
        for each in changes
        if each.entity == step.entity and each.field in step.declared.fields
    ]
    return ", ".join(used) or "this version of everstate keeps it in another way"


def _field(change: FieldChange, project: App, rows: Sequence[ViewVersion]) -> PlannedField:
    """A change of a model, with the views it affects, by their declared and their kept SQL."""
    names = {change.field, change.before if change.what == "renamed" else None}
    using = {
        plan.name
        for plan in project.views.values()
        if plan.entity == change.entity and change.field in plan.fields
    }
    using |= {
        row.name
        for row in rows
        if row.published and row.entity == change.entity and not names.isdisjoint(row.fields)
    }
    return PlannedField(
        entity=change.entity,
        field=change.field,
        what="refused" if change.is_refused else change.what,
        before=change.before,
        after=change.after,
        views=tuple(sorted(using)),
        meaning=change.meaning,
    )


def _rate(rows: Sequence[ViewVersion]) -> float:
    """Changes a second of this project's last large build."""
    built = [
        row.built
        for row in sorted(rows, key=lambda row: row.version)
        if row.built is not None and row.built.get("changes", 0) >= _MEASURED_MIN
    ]
    return built[-1]["changes"] / max(built[-1]["seconds"], 0.1) if built else _CHANGES_PER_S


def _archive_bytes(config: Config, entity: str) -> int:
    from everstate.archive import ArchiveLog, ArchiveReader

    if not ArchiveLog(config, entity).exists():
        return 0
    return sum(file.bytes for file in ArchiveReader(config, entity).files())
