"""`everstate views rebuild` and `views drop`: what is wanted of a view, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from everstate.cli.console import READING, AppOption, JsonOption, err, print_json, project_of
from everstate.config import Config
from everstate.errors import InvalidQuery, Unavailable
from everstate.parts import read_states
from everstate.views.control import BUILDING, LIVE, Control, ViewVersion
from everstate.views.database import connect_views, views_errors
from everstate.views.tables import latest_of

_POLL_S: Final = 0.5
Name = Annotated[str, typer.Argument(help="Name of the view.")]


def rebuild(
    context: typer.Context,
    name: Name,
    undo: Annotated[
        bool, typer.Option("--undo", help="Go back to the version that was there before.")
    ] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop building; nothing else.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Publish without waiting for old readers.")
    ] = False,
    require_equal: Annotated[
        bool, typer.Option("--require-equal", help="Publish only if the rows are the same.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")] = True,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Build a view again beside what readers see, then let them see it; `everstate run` does it."""
    from everstate.views.changing import ask_rebuild, ask_undo
    from everstate.views.changing import cancel as stop_building

    if undo and cancel:
        raise InvalidQuery("--undo and --cancel exclude each other.")
    config, _ = project_of(context, app, needs=READING)
    with _control(config) as control:
        if cancel:
            stopped = stop_building(control, name)
            _say(json, name, stopped[-1] if stopped else None, "cancelled" if stopped else "none")
            return
        if undo:
            wanted = ask_undo(control, name, force=force)
        else:
            wanted = ask_rebuild(control, name, force=force, require_equal=require_equal)
        if not wait:
            _say(json, name, wanted, "asked")
            return
        if not _pipeline_runs(config):
            err.print(
                f"version {wanted.version} of {name} is built when `everstate run` runs",
                style="yellow",
            )
            _say(json, name, wanted, "asked")
            return
        _say(json, name, _wait(control, wanted), "published")


def drop(
    context: typer.Context, name: Name, app: AppOption = None, json: JsonOption = False
) -> None:
    """Drop a view that the app does not declare any more: its rows, and the name for readers."""
    from everstate.views.changing import drop as drop_view

    config, _ = project_of(context, app, needs=READING)
    with _control(config) as control:
        gone = drop_view(control, name)
    if json:
        print_json({"view": name, "versions": [row.version for row in gone]})
    else:
        err.print(f"view {name} is gone", highlight=False)


@contextmanager
def _control(config: Config) -> Iterator[Control]:
    with views_errors(config.views_dsn), connect_views(config.views_dsn) as connection:
        yield Control(connection, config.views.schema_name)


def _pipeline_runs(config: Config) -> bool:
    states = read_states(config.project.data_dir)
    return any(state.role == "pipeline" and state.health == "running" for state in states)


def _wait(control: Control, wanted: ViewVersion) -> ViewVersion:
    """Show how far a version is until readers see it."""
    begun, before = time.monotonic(), 0
    with err.status(f"version {wanted.version} of {wanted.name} is asked for") as status:
        while True:
            rows = control.versions(wanted.name)
            row = next((row for row in rows if row.version == wanted.version), None)
            if row is None or row.status not in (BUILDING, LIVE):
                raise Unavailable(f"version {wanted.version} of {wanted.name} was given up.")
            if row.published:
                return row
            mine = sum(control.vector(row.name, row.version).values())
            core = sum(control.vector(latest_of(row.entity), 1).values())
            rate = (mine - before) / _POLL_S if before else 0.0
            status.update(progress(row, mine, core, rate, time.monotonic() - begun))
            before = mine
            time.sleep(_POLL_S)


def progress(row: ViewVersion, mine: int, core: int, rate: float, seconds: float) -> str:
    """One line: what the version does, how far it is, and how long it will take."""
    head = f"{row.name}, version {row.version}: "
    if row.reason is not None:
        return f"{head}{row.reason} ({seconds:.0f} s)"
    if row.built is None:
        return f"{head}waits for the builder ({seconds:.0f} s)"
    if mine >= core:
        return f"{head}built; is published ({seconds:.0f} s)"
    left = f", {(core - mine) / rate:.0f} s to go" if rate > 0 else ""
    return f"{head}catches up, {mine:,} of {core:,} offsets{left}"


def _say(json: bool, name: str, row: ViewVersion | None, what: str) -> None:
    version = None if row is None else row.version
    if json:
        print_json({"view": name, "version": version, "what": what})
        return
    sentences = {
        "none": f"nothing of {name} was being built",
        "cancelled": f"version {version} of {name} is not built; readers see what they saw",
        "asked": f"version {version} of {name} is asked for; `everstate views list` shows it",
        "published": f"readers of {name} see version {version}; `--undo` goes back",
    }
    err.print(sentences[what], highlight=False)
