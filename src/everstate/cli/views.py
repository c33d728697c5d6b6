"""`everstate views`: status, rows and proofs of the views."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.console import (
    READING,
    AppOption,
    JsonOption,
    WaitOption,
    err,
    out,
    print_json,
    print_records,
    print_result,
    project_of,
    table,
    tell_error,
)
from everstate.cli.declaration import explain
from everstate.cli.plan import tell_refused
from everstate.cli.proofs import check_reports, print_reports, prove
from everstate.cli.query import query
from everstate.cli.rebuild import drop, rebuild
from everstate.cli.search import search
from everstate.cli.standing import print_freshness
from everstate.errors import InvalidQuery, RequestCancelled, Unavailable
from everstate.serving import Reader
from everstate.serving.words import cell

if TYPE_CHECKING:
    from everstate.log.derived import DerivedReader
    from everstate.pipeline.reports import ViewReport

_LEGEND = (
    "position: offsets that were read; lag: changes in the log that the view does not have; "
    "seconds: age of the oldest of them"
)

_TOPIC_IDLE_S = 1.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

views = typer.Typer(no_args_is_help=True, help="List, show, search, rebuild and prove views.")


views.command("rebuild")(rebuild)
views.command("drop")(drop)
views.command("search")(search)
views.command("explain")(explain)
views.command("query")(query)


@views.command("list")
def list_(context: typer.Context, app: AppOption = None, json: JsonOption = False) -> None:
    """List every view, and the parts of views: rows, position, lag, and when it was last proved."""
    config, project = project_of(context, app, needs=READING)
    with Reader(config, project) as reader:
        found = reader.views()
    if any(view.lag_changes is None and view.position for view in found):
        err.print("note: Kafka does not answer: the lag is not known", style="yellow")
    tell_refused(project)
    if json:
        print_json(found)
        return
    for misfit in (each for view in found for each in view.misfits):
        err.print(f"misfit: {misfit.entity}: {misfit.text}", style="yellow", highlight=False)
    err.print(_LEGEND, style="dim")
    table(
        (
            *("view", "version", "kind", "entity", "rows", "position", "lag", "seconds"),
            *("verified", "status"),
        ),
        [
            (
                view.name,
                view.version,
                view.told_kind,
                view.entity,
                view.rows,
                sum(view.position.values()),
                view.lag_changes,
                view.lag_seconds,
                _verified(view.verified_at, view.verified),
                view.standing,
            )
            for view in found
        ],
    )


@views.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the view.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many rows.")] = 50,
    wait_for: WaitOption = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show the rows of a view as they are now."""
    config, project = project_of(context, app, needs=READING)
    if name in project.derivations:
        if wait_for is not None:
            raise InvalidQuery(f"--wait-for is for views, and {name} is a derived topic.")
        _show_topic(project.read(config, name), limit, json)
        return
    with Reader(config, project) as reader:
        columns, rows = reader.rows(name, limit=limit, wait_for=wait_for)
        print_records(json, columns, rows)
        print_freshness(reader, name)


@views.command("token")
def token(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the view.")],
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Print the token of a view's position, for --wait-for, --position and changes(since=…)."""
    config, project = project_of(context, app, needs=READING)
    with Reader(config, project) as reader:
        found = reader.token(name)
    if json:
        print_json({"view": name, "token": found})
    else:
        out.print(found, highlight=False)


@views.command("verify")
def verify(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Views; none: all.")] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Prove views: the kept rows against the same SQL, run in batch over the archive."""
    config, project = project_of(context, app)
    reports, _ = prove(config, project, names or None)
    if not names:
        tell_refused(project)
    _print(reports, json)
    check_reports(reports, are_named=bool(names))


@views.command("recompute")
def recompute(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Views; none: all.")] = None,
    promote: Annotated[
        bool, typer.Option("--promote", help="Rebuild views that differ from their batch.")
    ] = False,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Repeat it every 30m, 6h, 1d.")
    ] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Compare views with their batch, once or on a schedule; report, or promote the batch.

    The pipeline does the same by itself every `views.recompute_every_s`. With --schedule a server
    that does not answer is reported, and the next round follows; with --json each round is one
    line.
    """
    every_s = None if schedule is None else seconds_of(schedule)
    config, project = project_of(context, app)
    while True:
        begun = time.monotonic()
        try:
            reports, promoted = prove(config, project, names or None, promote=promote)
        except (Unavailable, RequestCancelled) as error:
            if every_s is None:
                raise
            tell_error(error)
        else:
            _print(reports, json, is_line=every_s is not None)
            for name in promoted:
                err.print(
                    f"{name} is built again; `everstate views list` shows how far", style="cyan"
                )
            if every_s is None:
                check_reports(reports, are_named=bool(names))
                return
        time.sleep(max(0.0, begun + every_s - time.monotonic()))


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `6h` or `1d` in seconds; raises InvalidQuery."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS_S or not number.isdecimal() or not int(number):
        raise InvalidQuery(f"--schedule {text}: a number and s, m, h or d, such as 6h.")
    return float(number) * _UNITS_S[unit]


def _print(reports: Sequence[ViewReport], json: bool, *, is_line: bool = False) -> None:
    if json:
        print_json([report.note() for report in reports], is_line=is_line)
    else:
        print_reports(reports)


def _show_topic(reader: DerivedReader, limit: int, json: bool) -> None:
    """Print the newest records of a derived topic. Cost: a pass over all of them."""
    with reader:
        found = deque(reader.records(idle_s=_TOPIC_IDLE_S), limit)
    rows = [(each.key, each.version, each.kind, cell(each.value)) for each in found]
    columns = ("key", "version", "kind", "value")
    print_result(json, list(map(asdict, found)), columns, rows, exact=True)


def _verified(moment: datetime | None, report: dict[str, object] | None) -> str | None:
    """When a view was proved, and the result of the proof."""
    if moment is None:
        return None
    seconds = (datetime.now(UTC) - moment).total_seconds()
    held = report is None or bool(report.get("holds", True))
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{'holds' if held else 'DOES NOT HOLD'}, {ago} ago"
