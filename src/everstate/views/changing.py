"""What an operator asks of a view: build it again, go back, stop building, drop it.

Each call only notes what is wanted; the running pipeline does it.
"""

from __future__ import annotations

from dataclasses import replace

from everstate.errors import InvalidQuery, NotFound
from everstate.views.control import BUILDING, KEPT, LIVE, WAITING, Control, ViewVersion
from everstate.views.stores import view_tables
from everstate.views.tables import latest_of


def ask_rebuild(
    control: Control, name: str, *, force: bool = False, require_equal: bool = False
) -> ViewVersion:
    """Let a new version of a view be built; the version that is wanted.

    A version that waits for this is taken; one that is on its way already is left to go on. Else
    the version that readers see is built anew, which repairs it. ``force`` publishes without
    waiting for old readers, ``require_equal`` only when the new version has the rows of the old
    one, if both mean the same. Raises NotFound, InvalidQuery for `latest`.
    """
    with control.connection.transaction():
        control.lock_installing()
        rows = _rows(control, name)
        options = {"force": force, "require_equal": require_equal}
        for row in reversed(rows):
            if row.status in (BUILDING, WAITING):
                control.set_status(name, row.version, BUILDING)
                control.set_options(name, row.version, options)
                return replace(row, status=BUILDING, reason=None)
        seen = next((row for row in rows if row.published), rows[-1])
        made = ViewVersion(
            name=name,
            version=rows[-1].version + 1,
            entity=seen.entity,
            definition=seen.definition,
            fingerprint=seen.fingerprint,
            status=BUILDING,
        )
        control.add_version(made)
        control.set_options(name, made.version, options)
        return made


def ask_undo(control: Control, name: str, *, force: bool = False) -> ViewVersion:
    """Let readers see the version again that was there before; it catches up first.

    Raises NotFound when no older version is kept any more.
    """
    with control.connection.transaction():
        control.lock_installing()
        rows = _rows(control, name)
        kept = [row for row in rows if row.status == KEPT and control.vector(name, row.version)]
        if not kept:
            raise NotFound(
                f"view {name}: no older version is kept.",
                advice="`views.keep_old_hours` says how long one is. `everstate views rebuild` "
                "builds the view again.",
            )
        cancel(control, name)
        older = max(kept, key=lambda row: row.version)
        control.set_status(name, older.version, BUILDING)
        control.set_options(name, older.version, {"force": force})
        return replace(older, status=BUILDING)


def cancel(control: Control, name: str) -> list[ViewVersion]:
    """Stop what is on its way to readers; what was there before goes on. The versions stopped."""
    stopped = []
    with control.connection.transaction():
        control.lock_installing()
        for row in _rows(control, name):
            if row.status not in (BUILDING, WAITING):
                continue
            stopped.append(row)
            if row.published_at is not None:
                control.set_status(name, row.version, KEPT)
            else:
                forget_version(control, name, row.version)
    return stopped


def drop(control: Control, name: str) -> list[ViewVersion]:
    """Drop a view that no running app declares: its versions, and the name that readers have.

    Raises NotFound, InvalidQuery when it is declared, PublishRefused when a view depends on it.
    """
    with control.connection.transaction():
        control.lock_installing()
        rows = _rows(control, name)
        if any(row.status == LIVE for row in rows):
            raise InvalidQuery(
                f"view {name} is declared by the app that was started last, which keeps it.",
                advice="Take it out of the app and start `everstate run` again, then drop it.",
            )
        view_tables(control).drop_reader(name)
        for row in rows:
            forget_version(control, name, row.version)
    return rows


def forget_version(control: Control, name: str, version: int) -> None:
    """Drop a version that no reader sees: its table, its position, its row."""
    view_tables(control).drop(name, version)
    control.close_positions(name, version)
    control.remove_version(name, version)


def _rows(control: Control, name: str) -> list[ViewVersion]:
    rows = control.versions(name)
    if not rows:
        raise NotFound(
            f"there is no view {name}.", advice="`everstate views list` shows the views."
        )
    if name == latest_of(rows[0].entity):
        raise InvalidQuery(
            f"{name} is what every other view is judged by: it is not built again or dropped.",
            advice="`everstate views verify` proves it; `everstate log begin` begins anew.",
        )
    return rows
