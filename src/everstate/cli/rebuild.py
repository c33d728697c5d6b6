"""`everstate views rebuild` and `views drop`: request it for a view, and show the progress."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from everstate.cli.asking import PipelineAbsence, control_of
from everstate.cli.console import READING, AppSession, working
from everstate.cli.results import Aside, Result
from everstate.errors import BuildFailed, BuildGivenUp, InvalidQuery, VersionsDiffer
from everstate.pipeline.spark.progress import Progress
from everstate.views.control import BUILDING, LIVE, Control, ViewVersion
from everstate.views.tables import latest_of

_POLL_S: Final = 0.5
Name = Annotated[str, typer.Argument(help="Name of the view.")]


def rebuild(
    session: AppSession,
    name: Name,
    undo: Annotated[
        bool, typer.Option("--undo", help="Publish the previous version again.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the build of a version.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Publish without waiting for running readers.")
    ] = False,
    require_equal: Annotated[
        bool, typer.Option("--require-equal", help="Publish only if the rows equal the old ones.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")] = True,
) -> Result:
    """Build a new version of a view beside the published one, then publish it.

    A running pipeline builds it; without one, this process does.
    """
    from everstate.views.changing import ask_rebuild, ask_undo
    from everstate.views.changing import cancel as stop_building
    from everstate.views.plan import plan_of

    if undo and cancel:
        raise InvalidQuery("--undo and --cancel exclude each other.")
    if require_equal and (undo or cancel):
        raise InvalidQuery("--require-equal is for a new version: not with --undo or --cancel.")
    if force and cancel:
        raise InvalidQuery("--force publishes a version: not with --cancel.")
    config, project = session.connected(needs=READING)

    def check(row: ViewVersion) -> None:
        if not row.is_topic:
            plan_of(row, project.entities, project.views)

    with control_of(config) as control:
        if cancel:
            stopped = stop_building(control, name)
            return _report(name, *((stopped[-1], "cancelled") if stopped else (None, "none")))
        if undo:
            wanted = ask_undo(control, name, check=check, force=force)
        else:
            wanted = ask_rebuild(control, name, force=force, require_equal=require_equal)
        if not wait:
            return _report(name, wanted, "asked")
        return _report(name, _awaited(session, control, wanted), "published")


def drop(
    session: AppSession,
    name: Name,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Forget a dropped view whose store is gone; its rows stay."),
    ] = False,
) -> Result:
    """Drop a view that the app does not declare any more: its rows, and the name for readers."""
    from everstate.views.changing import drop as drop_view
    from everstate.views.changing import forget_left

    config, _ = session.connected(needs=READING)
    with control_of(config) as control:
        if forget:
            left = forget_left(control, name)
            said = [f"{e['table'] or 'nothing'} stays in the store {e['store']}" for e in left]
            seen = {row.store for row in control.versions(name) if row.published}
            if stores := sorted({str(each["store"]) for each in left} - seen):
                said += [f"readers may still find the name {name} in {', '.join(stores)}"]
            return Result({"view": name, "left": left}, *(Aside(each) for each in said))
        gone = drop_view(control, name)
    if any(row.is_topic for row in gone):
        # Imported here: a view needs no client of Kafka to go.
        from everstate.log.derived import forget_topic

        forget_topic(config, name)
    value = {"view": name, "versions": [row.version for row in gone]}
    return Result(value, Aside(f"view {name} was dropped"))


def _awaited(session: AppSession, control: Control, wanted: ViewVersion) -> ViewVersion:
    """Wait until a version is published; if no pipeline runs, do its work here.

    Raises BuildFailed when the builder stored why the version cannot be built, and VersionsDiffer
    when it is not published because of `--require-equal`.
    """
    first = f"version {wanted.version} of {wanted.name} is requested"
    with working(first) as tell:

        def is_done() -> bool:
            row = _row(control, wanted)
            if row.published:
                return True
            if row.built is None and row.error is not None:
                raise BuildFailed(row.name, row.version, row.error)
            different = (row.built or {}).get("different")
            if different and (row.options or {}).get("require_equal"):
                raise VersionsDiffer(row.name, row.version, different)
            tell.now(how_far(control, row))
            if row.why is not None and row.why != said[-1]:
                said.append(row.why)
                tell(f"{row.name}, version {row.version}: {row.why}")
            return False

        said = [""]
        if control.is_on_duty("answers"):
            kept = f"; version {wanted.version} stays requested, and `everstate run` builds it"
            absence = PipelineAbsence(control, "views rebuild", kept=kept)
            while not is_done():
                absence.check()
                time.sleep(_POLL_S)
        else:
            # Imported here: Spark takes a second that nobody else should pay.
            from everstate.pipeline.keeping.alone import build_until
            from everstate.pipeline.spark.session import own_spark

            config, project = session.connected()
            tell("no pipeline runs: starting Spark")
            with own_spark(config, app_name="everstate views rebuild") as spark:
                tell(f"building {wanted.name}")
                build_until(spark, config, project, wanted.store, is_done)
        return _row(control, wanted)


def _row(control: Control, wanted: ViewVersion) -> ViewVersion:
    rows = control.versions(wanted.name)
    row = next((row for row in rows if row.version == wanted.version), None)
    if row is None or row.status not in (BUILDING, LIVE):
        raise BuildGivenUp(wanted.name, wanted.version)
    return row


def how_far(control: Control, row: ViewVersion) -> str:
    """One line: activity, progress and remaining time of a version."""
    head = f"{row.name}, version {row.version}: "
    if row.progress is not None:
        return head + Progress(**row.progress).text
    if row.why is not None:
        return f"{head}{row.why}"
    if row.built is None:
        return f"{head}waits for the builder"
    mine = sum(control.vector(row.name, row.version).values())
    core = sum(control.vector(latest_of(row.entity), 1).values())
    if mine >= core:
        return f"{head}built; is being published"
    return f"{head}built; is catching up, {mine:,} of {core:,} offsets"


def _report(name: str, row: ViewVersion | None, what: str) -> Result:
    version = None if row is None else row.version
    sentences = {
        "none": f"no version of {name} was being built",
        "cancelled": f"the build of version {version} of {name} was cancelled",
        "asked": f"version {version} of {name} is requested; `everstate views list` shows it",
        "published": f"readers of {name} see version {version}; `--undo` reverts it",
    }
    return Result({"view": name, "version": version, "what": what}, Aside(sentences[what]))
