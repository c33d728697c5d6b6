"""What becomes of the versions of views when a project is started: pure, so that it can be shown.

`everstate plan` prints these steps before anything happens, and the keeper takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from everstate.views.control import BUILDING, KEPT, LIVE, RETIRED, WAITING, ViewVersion
from everstate.views.project import Project
from everstate.views.tables import HISTORY_FINGERPRINT, history_of, latest_of

OnChange: TypeAlias = Literal["rebuild", "ask"]
What: TypeAlias = Literal[
    "same", "new", "changed", "text", "returns", "goes back", "asked", "not declared"
]


@dataclass(frozen=True, slots=True)
class Declared:
    """A view as a project declares it, `history` included."""

    name: str
    entity: str
    fingerprint: str
    definition: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one view.

    ``what``: `same`; `new`; `changed` in meaning (a new version is built); `text` (another text of
    the same meaning: nothing is built); `returns` (it was not declared for a while, and catches
    up); `goes back` (to a version that is still there); `asked` (a new version waits for
    `everstate views rebuild`); `not declared` (readers keep it as it is).
    """

    what: What
    name: str
    entity: str
    version: int
    """The version that is kept, built or asked for."""
    published: int | None
    """What readers see now."""
    superseded: tuple[int, ...] = ()
    """Versions that nobody has seen and nobody wants any more."""
    declared: Declared | None = None


def declared_views(project: Project, entity: str) -> list[Declared]:
    """What a project keeps of an entity type beside `latest`."""
    found = []
    if project.keeps_history(entity):
        name = history_of(entity)
        found.append(Declared(name, entity, HISTORY_FINGERPRINT, {"keeps": "history"}))
    return found + [
        Declared(plan.name, entity, plan.fingerprint, {"sql": plan.sql})
        for plan in project.views.values()
        if plan.entity == entity
    ]


def steps(
    entity: str,
    declared: Iterable[Declared],
    stored: Iterable[ViewVersion],
    *,
    standing: Iterable[tuple[str, int]],
    on_change: OnChange,
) -> list[Step]:
    """Steps from what is stored to what is declared, by name.

    ``standing`` has the names and versions that have positions: the others cannot catch up.
    """
    wanted = {view.name: view for view in declared}
    known: dict[str, list[ViewVersion]] = {}
    for row in stored:
        if row.entity == entity and row.name != latest_of(entity):
            known.setdefault(row.name, []).append(row)
    placed = set(standing)
    found = [_step(view, known.get(name, []), placed, on_change) for name, view in wanted.items()]
    for name, rows in known.items():
        if name not in wanted:
            published = _published(rows)
            unseen = tuple(row.version for row in rows if row.status in (BUILDING, WAITING))
            version = published.version if published is not None else 0
            found.append(Step("not declared", name, entity, version, version or None, unseen))
    return sorted(found, key=lambda step: step.name)


def _step(
    view: Declared,
    rows: Sequence[ViewVersion],
    placed: set[tuple[str, int]],
    on_change: OnChange,
) -> Step:
    published = _published(rows)
    seen = None if published is None else published.version
    same = [row for row in rows if row.fingerprint == view.fingerprint]

    def step(what: What, version: int) -> Step:
        unseen = tuple(
            row.version
            for row in rows
            if row.status in (BUILDING, WAITING) and row.version != version
        )
        return Step(what, view.name, view.entity, version, seen, unseen, view)

    if published is not None and published in same:
        if published.status == RETIRED:
            if (view.name, published.version) in placed:
                return step("returns", published.version)
        else:
            is_text = dict(published.definition) != dict(view.definition)
            return step("text" if is_text else "same", published.version)
    for row in reversed(same):
        if row.status == BUILDING:
            return step("same", row.version)
        if row.status == WAITING:
            return step("asked" if on_change == "ask" else "changed", row.version)
        if row.status == KEPT and (view.name, row.version) in placed:
            return step("goes back", row.version)
    version = max((row.version for row in rows), default=0) + 1
    if published is None:
        return step("new", version)
    asks = on_change == "ask" and published.status == LIVE
    return step("asked" if asks else "changed", version)


def _published(rows: Sequence[ViewVersion]) -> ViewVersion | None:
    return next((row for row in rows if row.published), None)
