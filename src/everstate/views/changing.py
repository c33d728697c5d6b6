"""What a start or an operator changes of a view: declare, rebuild, undo, stop building, drop it.

A call only changes the registry (dropping also drops tables); the running pipeline builds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from everstate.config import Config
from everstate.errors import InUse, InvalidQuery, NotFound
from everstate.postgres import refusals
from everstate.views.control import (
    BUILDING,
    DROPPED,
    KEPT,
    LIVE,
    RETIRED,
    WAITING,
    Control,
    ViewVersion,
)
from everstate.views.kinds import ViewPlan
from everstate.views.project import Project
from everstate.views.stores import ViewTables
from everstate.views.tables import HOME, latest_of, physical
from everstate.views.versions import (
    Step,
    declared_elsewhere,
    declared_views,
    inputs_of,
    registered,
    steps,
    to_come,
)

logger = logging.getLogger(__name__)

_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_UNDONE: Final = "an undo was asked for; `everstate views rebuild {}` builds it"
_CANCELLED: Final = "its build was cancelled; `everstate views rebuild {}` builds it"
_ASKED: Final = (
    "the meaning of its definition changed; `everstate views rebuild {}` builds the new version"
)
_NOT_DECLARED: Final = "the app that was started last does not declare it"
_SHORT_WAIT: Final = "SET LOCAL lock_timeout = 200"
"""For a statement that a reader may hold up: milliseconds until LockNotAvailable."""


def ask_rebuild(
    control: Control, name: str, *, force: bool = False, require_equal: bool = False
) -> ViewVersion:
    """Request a new version of a view; returns the version that will be built.

    A version that waits to be requested, or is being built already, is used. After an undo the
    version that was undone catches up and is published again. Otherwise a new
    version with the meaning of the published one is added, which repairs it. ``force`` publishes
    without waiting for readers with old snapshots. ``require_equal`` publishes only when the new
    version has the rows of the old one, if both mean the same. Raises NotFound, InvalidQuery for
    `latest` and for a view that has no table of its own.
    """
    with control.installing():
        rows = _rows(control, name)
        _refuse_retired(rows)
        options = {"force": force, "require_equal": require_equal}
        for row in reversed(rows):
            if row.status in (BUILDING, WAITING):
                for other in rows:
                    if other.status == BUILDING and other.version < row.version:
                        give_up(control, name, other.version)
                if row.status == WAITING and row.built is not None:  # it was kept before
                    return _catch_up(control, row, options)
                control.set_status(name, row.version, BUILDING)
                # An error of an earlier attempt says nothing about this one.
                control.record(name, row.version, error=None, options=options)
                return replace(row, status=BUILDING, status_reason=None, error=None, waits_for=None)
        seen = next((row for row in rows if row.published), rows[-1])
        undone = [row for row in rows if row.status == KEPT and row.fingerprint == seen.undone]
        if undone:
            return _catch_up(control, undone[-1], options)
        if seen.inputs:
            raise InvalidQuery(
                f"{name} has no table of its own: it is computed from {', '.join(seen.inputs)}.",
                advice=f"Rebuild these views: `everstate views rebuild {seen.inputs[0]}`.",
            )
        meaning = (seen.kind, seen.definition, seen.fields, seen.fingerprint)
        made = ViewVersion(
            name, control.numbers()[name] + 1, seen.entity, *meaning, status=BUILDING
        )
        control.add_version(made)
        control.record(name, made.version, options=options)
        return made


def ask_undo(
    control: Control,
    name: str,
    *,
    check: Callable[[ViewVersion], object] = lambda _row: None,
    force: bool = False,
) -> ViewVersion:
    """Request the version before the published one; it catches up, then readers see it.

    A second call goes further back. The app's later starts keep to it, as long as they declare
    what was undone; `ask_rebuild` goes forward again. A version of another meaning that is being
    built is undone, too: it waits. ``check`` raises when this app's model cannot keep the version.
    Raises NotFound when no older version is kept any more.
    """
    with control.installing():
        rows = _rows(control, name)
        _refuse_retired(rows)
        seen = next((row for row in rows if row.published), None)
        kept = [
            row
            for row in rows
            if row.status == KEPT
            and (seen is None or row.version < seen.version)
            and (row.inputs or control.vector(name, row.version))
        ]
        if not kept:
            raise NotFound(
                f"view {name}: there is no older version to go back to.",
                advice="`views.keep_old_hours` says how long an older version is kept. `everstate "
                "views rebuild` goes forward again after an undo, or else builds the view again.",
            )
        # The one that readers saw last: a later one may have been undone before.
        older = max(kept, key=lambda row: (row.published_at or _NEVER, row.version))
        check(older)
        coming = to_come(rows)
        _stop(control, rows, (BUILDING, WAITING))
        if coming is not None:
            _let_wait(control, coming, _UNDONE)
        undone = coming or seen
        if undone is not None:
            control.record(name, older.version, undone=undone.undone or undone.fingerprint)
        return _catch_up(control, older, {"force": force})


def _refuse_retired(rows: Sequence[ViewVersion]) -> None:
    """Raise InvalidQuery for a view that is not kept any more."""
    for row in rows:
        if row.published and row.status == RETIRED:
            raise InvalidQuery(
                f"view {row.name}: no app declares it any more, so it is not updated.",
                advice=f"Declare it again and start `everstate run`, or drop it: `everstate views "
                f"drop {row.name}`.",
            )


def _catch_up(control: Control, row: ViewVersion, options: Mapping[str, Any]) -> ViewVersion:
    """Let a version that has its rows catch up, to be published then."""
    _begin_again(control, row)
    control.record(row.name, row.version, options=options)
    return replace(row, status=BUILDING, status_reason=None, error=None, waits_for=None)


def _begin_again(control: Control, row: ViewVersion) -> None:
    """Let a version that has its rows catch up from now on."""
    # The rows of a view over views are as old as its last refresh, so it is filled again; a version
    # that was not built rode with the core from the first change, or a build has emptied it.
    is_filled = not row.inputs and not control.is_emptied(row.name, row.version)
    built = row.built or {} if is_filled else None
    if built is not None and row.store != HOME:
        # No core waits for another store: it has caught up at least to here when it is published.
        built = {**built, "core": {str(p): at for p, at in control.core_vector(row.entity).items()}}
    control.set_status(row.name, row.version, BUILDING)
    control.record(row.name, row.version, built=built)


def cancel(control: Control, name: str) -> list[ViewVersion]:
    """Stop versions that are being built; the published one stays. Returns the stopped ones.

    A version of another meaning waits then, so that the app's later starts do not build it again as
    long as they declare it; `ask_rebuild` does.
    """
    with control.installing():
        rows = _rows(control, name)
        seen, coming = next((row for row in rows if row.published), None), to_come(rows)
        stopped = _stop(control, rows, (BUILDING,))
        if seen is not None and coming is not None and coming in stopped:
            _let_wait(control, coming, _CANCELLED)
            control.record(name, seen.version, undone=coming.undone or coming.fingerprint)
        return stopped


def _stop(
    control: Control, rows: Iterable[ViewVersion], statuses: Collection[str]
) -> list[ViewVersion]:
    stopped = [row for row in rows if row.status in statuses]
    for row in stopped:
        give_up(control, row.name, row.version)
    return stopped


def _let_wait(control: Control, stopped: ViewVersion, reason: str) -> None:
    """Let a version with the meaning that the app declares wait, so that no start builds it."""
    version = control.numbers()[stopped.name] + 1
    later = replace(stopped, version=version, status=WAITING, built=None)
    why = stopped.status_reason or reason.format(stopped.name)
    control.add_version(replace(later, status_reason=why))


def drop(control: Control, name: str) -> list[ViewVersion]:
    """Drop a view that no running app declares: its versions, and the name that readers use.

    Raises NotFound, InvalidQuery when it is declared, PublishRefused when a database view depends
    on it.
    """
    with control.installing():
        rows = _rows(control, name)
        if reading := sorted({row.name for row in control.versions() if name in row.inputs}):
            raise InvalidQuery(
                f"view {name} is kept, because a version of {', '.join(reading)} is read from it.",
                advice=f"Drop that first: `everstate views drop {reading[0]}`; a version that was "
                "replaced goes by itself after `views.keep_old_hours`. Then start `everstate run` "
                f"again, and drop {name}.",
            )
        if any(row.status in (LIVE, BUILDING) for row in rows):
            raise InvalidQuery(
                f"view {name} is still declared by the app that was started last.",
                advice="Take its declaration out of the app, start `everstate run` again, then "
                "drop the view.",
            )
        forget_view(control, name)
    return rows


def forget_left(control: Control, name: str) -> list[dict[str, str | None]]:
    """Forget the dropped versions of a view in a store that is gone: their rows stay there.

    Returns store and table of each; raises NotFound when no dropped version waits for its store.
    """
    left = control.forget_left(name)
    if not left:
        raise NotFound(
            f"no dropped version of {name} waits for its store.",
            advice=f"`everstate views drop {name}` drops a view that is not declared any more.",
        )
    return [
        {"store": store, "table": None if attempt is None else physical(name, version, attempt)}
        for store, version, attempt in left
    ]


def steps_of(config: Config, control: Control, project: Project, entity: str) -> list[Step]:
    """The steps of a start from the stored versions of an entity type's views to the declared."""
    stored = control.versions()
    return steps(
        entity,
        declared_views(project, entity),
        [row for row in stored if not row.is_topic and row.status != DROPPED],
        standing={(place.view, place.version) for place in control.positions(entity)},
        elsewhere=declared_elsewhere(project, entity),
        numbers=control.numbers(),
        used=inputs_of(stored),
        on_change=config.views.on_change,
        refused=project.refused_views,
    )


def register_step(control: Control, step: Step, plan: ViewPlan) -> bool:
    """Register what a start declares of a view or topic; returns whether its version is new.

    A new version has no table and no positions yet.
    """
    for version in step.superseded:
        give_up(control, step.name, version)
    control.declared(registered(plan, step.version))
    known = next((r for r in control.versions(step.name) if r.version == step.version), None)
    has_rows = step.what == "changed" and known is not None and known.built is not None
    if step.what == "returns":
        control.set_status(step.name, step.version, LIVE)
    elif known is not None and (step.what == "goes back" or has_rows):
        # The second one was kept, and has waited to be asked for.
        _begin_again(control, known)
    elif step.what == "asked":
        asked = _ASKED.format(step.name)  # one that is kept waits, too
        row = registered(plan, step.version, status=WAITING, status_reason=asked)
        control.add_version(row)
    elif step.what in ("new", "changed"):
        # An earlier start may have registered it as waiting.
        control.add_version(registered(plan, step.version, status=BUILDING))
        return True
    return False


def retire(control: Control, rows: Iterable[ViewVersion]) -> None:
    """Stop keeping versions that no app declares; readers go on to see the one that they see."""
    for row in rows:
        if row.status in (BUILDING, WAITING):
            give_up(control, row.name, row.version)
        elif row.status == LIVE:
            logger.warning("%s is not declared any more, so it is not updated any more", row.name)
            control.set_status(row.name, row.version, RETIRED, _NOT_DECLARED)


def drop_unused(control: Control, hours: float) -> list[ViewVersion]:
    """Drop the versions that were replaced more than so many hours ago; returns them.

    A view that no app has declared for as long loses its positions, so that it no longer holds back
    trimming (V3). A version stays until a later call while a transaction has read it, or something
    depends on its table.
    """
    dropped = []
    for row in control.unused(hours):
        try:
            with refusals(), control.installing():
                # An operator may go back to a version, and a start may declare a view again.
                still = {(each.name, each.version, each.status) for each in control.unused(hours)}
                if (row.name, row.version, row.status) not in still:
                    continue
                if row.status == RETIRED:
                    control.close_positions(row.name, row.version)
                    continue
                control.connection.execute(_SHORT_WAIT)
                forget_version(control, row.name, row.version)
            dropped.append(row)
        except InUse as cause:
            logger.info("view %s: version %d is dropped later: %s", row.name, row.version, cause)
    return dropped


def forget_view(control: Control, name: str) -> None:
    """Drop the name that readers use and all versions; raises PublishRefused."""
    rows = control.versions(name)
    if any(row.published and row.store == HOME for row in rows):
        ViewTables(control).drop_reader(name)
    control.withdraw(name)
    for row in rows:
        forget_version(control, name, row.version)


def give_up(control: Control, name: str, version: int) -> None:
    """Stop building a version: one that was published before is kept, any other is removed."""
    row = next((row for row in control.versions(name) if row.version == version), None)
    if row is not None and row.published_at is not None:
        control.set_status(name, version, KEPT)
    elif row is not None:  # else another process has removed it
        forget_version(control, name, version)


class _StillRead(Exception):
    """Readers see the version, so that nothing of it is dropped."""


def forget_version(control: Control, name: str, version: int) -> None:
    """Drop a version: positions, row in the registry, table; nothing while readers see it.

    The pipeline deletes rows in another store later, so that no command waits for that store.
    """
    with suppress(_StillRead), control.connection.transaction():
        # In the order in which a step of the version locks them.
        control.close_positions(name, version)
        if control.leave_to_store(name, version):
            return
        if not control.remove_version(name, version):
            raise _StillRead
        ViewTables(control).drop(name, version)


def _rows(control: Control, name: str) -> list[ViewVersion]:
    rows = [row for row in control.versions(name) if row.status != DROPPED]
    if not rows:
        raise NotFound(
            f"there is no view {name}.", advice="`everstate views list` shows the views."
        )
    if name == latest_of(rows[0].entity):
        raise InvalidQuery(
            f"{name} is part of the core, which all other views depend on: it cannot be rebuilt or "
            "dropped.",
            advice="`everstate views verify` compares it with the archive; `everstate log begin` "
            "starts a new log.",
        )
    return rows
