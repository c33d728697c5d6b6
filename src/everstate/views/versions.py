"""The steps for versions of views when a project is started: pure, so that they can be shown.

`everstate plan` prints these steps beforehand, and the keeper takes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from everstate.views.control import BUILDING, KEPT, LIVE, RETIRED, WAITING, ViewVersion
from everstate.views.kinds import HistoryPlan, ViewPlan
from everstate.views.project import Project
from everstate.views.tables import latest_of

OnChange: TypeAlias = Literal["rebuild", "ask"]
ViewChange: TypeAlias = Literal[
    "same", "new", "changed", "text", "returns", "goes back", "asked", "refused", "not declared"
]

REFUSED: Final = "refused: "
"""How the status reason of a version begins whose definition Spark refuses."""


@dataclass(frozen=True, slots=True)
class Step:
    """The step for one view.

    ``what``: `same`; `new`; `changed` in meaning (a new version is built); `text` (another text
    with the same meaning: nothing is built); `returns` (declared again after it was not: it catches
    up); `goes back` (to an older version that still exists); `asked` (a new version waits for
    `everstate views rebuild`); `refused` (its declaration cannot be kept: the published version
    continues); `not declared` (readers still see it, without updates).
    """

    what: ViewChange
    name: str
    entity: str
    version: int
    """The version that is kept, built, or waits to be requested."""
    published: int | None
    """The version that readers see now."""
    superseded: tuple[int, ...] = ()
    """Versions being built or waiting that are not wanted any more."""
    declared: ViewPlan | None = None


def declared_views(project: Project, entity: str) -> list[ViewPlan]:
    """The views that a project keeps of an entity type besides `latest`."""
    found: list[ViewPlan] = [HistoryPlan.of(entity)] if project.keeps_history(entity) else []
    parts = {part.name: part for plan in project.views.values() for part in plan.parts}
    found += [plan for plan in project.views.values() if plan.entity == entity]
    return found + [part for part in parts.values() if part.entity == entity]


def declared_elsewhere(project: Project, entity: str) -> set[str]:
    """Names of the views that a project keeps of its other entity types."""
    others = (each for each in project.entities if each != entity)
    return {view.name for other in others for view in declared_views(project, other)}


def inputs_of(stored: Iterable[ViewVersion]) -> set[str]:
    """Names of views that some version reads: they are kept as long as that version exists."""
    return {name for row in stored for name in row.inputs}


def registered(plan: ViewPlan, version: int, **how: Any) -> ViewVersion:
    """The registry's row of a version; ``how``: its status and other values."""
    meaning = (plan.kind, plan.definition, plan.fields, plan.fingerprint)
    return ViewVersion(plan.name, version, plan.entity, *meaning, **how)


def steps(
    entity: str,
    declared: Iterable[ViewPlan],
    stored: Iterable[ViewVersion],
    *,
    standing: Iterable[tuple[str, int]],
    numbers: Mapping[str, int],
    on_change: OnChange,
    elsewhere: Collection[str] = (),
    refused: Collection[str] = (),
    used: Collection[str] = (),
) -> list[Step]:
    """Steps from what is stored to what is declared, by name.

    A view that moves to another entity type under its name is decided where it is declared now.

    ``standing``: names and versions that have positions; other versions cannot catch up.
    ``numbers``: the highest version that each name ever had, because none is used twice.
    ``elsewhere``: names that are declared for other entity types. ``refused``: names whose
    declarations cannot be kept. ``used``: names that a version of another view reads.
    """
    wanted = {view.name: view for view in declared}
    known: dict[str, list[ViewVersion]] = {}
    for row in stored:
        mine = row.entity == entity and row.name not in elsewhere
        if (mine or row.name in wanted) and row.name != latest_of(entity):
            known.setdefault(row.name, []).append(row)
    placed = set(standing)
    found = [
        _step(view, known.get(name, []), placed, numbers.get(name, 0) + 1, on_change)
        for name, view in wanted.items()
    ]
    for name, rows in known.items():
        if name not in wanted and name not in used:
            published = _published(rows)
            version = published.version if published is not None else 0
            if name in refused:
                found.append(Step("refused", name, entity, version, version or None))
                continue
            unseen = tuple(row.version for row in rows if row.status in (BUILDING, WAITING))
            found.append(Step("not declared", name, entity, version, version or None, unseen))
    return sorted(found, key=lambda step: step.name)


def _step(
    view: ViewPlan,
    rows: Sequence[ViewVersion],
    placed: set[tuple[str, int]],
    fresh: int,
    on_change: OnChange,
) -> Step:
    published = _published(rows)
    seen = None if published is None else published.version
    same = [row for row in rows if row.fingerprint == view.fingerprint]

    def stands(row: ViewVersion) -> bool:
        return bool(view.inputs) or (view.name, row.version) in placed

    def step(what: ViewChange, version: int) -> Step:
        # A requested version with the same meaning stays: it repairs the published version.
        wanted = {view.fingerprint, *(row.fingerprint for row in rows if row.version == version)}
        unseen = tuple(
            row.version
            for row in rows
            if row.status in (BUILDING, WAITING)
            and row.version != version
            and (row.fingerprint not in wanted or what not in ("same", "text", "returns"))
        )
        return Step(what, view.name, view.entity, version, seen, unseen, view)

    for row in rows:
        # An operator went back from what is declared: that stays until something else is declared.
        if row.undone == view.fingerprint and (row.published or row.status == BUILDING):
            returns = row.status == RETIRED and stands(row)
            return step("returns" if returns else "same", row.version)
    if published is not None and published in same:
        if published.status == RETIRED:
            if stands(published):
                return step("returns", published.version)
        else:
            stored = (published.kind, dict(published.definition), tuple(published.fields))
            is_text = stored != (view.kind, dict(view.definition), view.fields)
            return step("text" if is_text else "same", published.version)
    for row in reversed(same):
        if row.status == BUILDING:
            return step("same", row.version)
        if row.status == WAITING:
            return step("asked" if on_change == "ask" else "changed", row.version)
        if row.status == KEPT and stands(row):
            asks = on_change == "ask" and published is not None and published.status == LIVE
            return step("asked" if asks else "goes back", row.version)
    if published is None:
        return step("new", fresh)
    asks = on_change == "ask" and published.status == LIVE
    return step("asked" if asks else "changed", fresh)


def to_come(rows: Iterable[ViewVersion]) -> ViewVersion | None:
    """The version of another meaning by which the app replaces the published one, if it does.

    ``rows``: the versions of one view, by number. Readers have never seen that version.
    """
    stored = list(rows)
    published = _published(stored)
    seen = None if published is None else published.fingerprint
    unseen = [row for row in stored if row.status in (BUILDING, WAITING)]
    found = [row for row in unseen if row.published_at is None and row.fingerprint != seen]
    return found[-1] if found else None


def _published(rows: Sequence[ViewVersion]) -> ViewVersion | None:
    return next((row for row in rows if row.published), None)


def passed_by_all(
    archived: Mapping[int, int], vectors: Iterable[Mapping[int, int]]
) -> dict[int, int]:
    """Offsets before which the core's exceptions are not needed any more, by partition (V3, V4).

    ``archived``: the archive's position, because a new version trails from there. ``vectors``:
    positions of the core and of all versions that may still catch up.
    """
    below = dict(archived)
    for vector in vectors:
        for partition, offset in vector.items():
            below[partition] = min(below.get(partition, 0), offset)
    return below
