"""`everstate views`: status, rows and proofs of the views."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstate.cli.console import READING, AppSession, WaitOption, tell_error
from everstate.cli.declaration import explain
from everstate.cli.plan import tell_refused
from everstate.cli.proofs import check_reports, prove, reports_pieces
from everstate.cli.query import query
from everstate.cli.rebuild import drop, rebuild
from everstate.cli.results import Aside, Result, ResultTable, Verbs, records, show_pieces
from everstate.cli.search import search
from everstate.cli.standing import freshness, note
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

views = Verbs(no_args_is_help=True, help="List, show, search, rebuild and prove views.")


views.command("rebuild")(rebuild)
views.command("drop")(drop)
views.command("search")(search)
views.command("explain")(explain)
views.command("query")(query)


@views.command("list")
def list_(session: AppSession) -> Result:
    """List every view, and the parts of views: rows, position, lag, and when it was last proved."""
    config, project = session.connected(needs=READING)
    with Reader(config, project) as reader:
        found = reader.views()
    if any(view.lag_changes is None and view.position for view in found):
        show_pieces(note("Kafka does not answer: the lag is not known"))
    tell_refused(project)
    rows = (
        (
            *(view.name, view.version, view.told_kind, view.entity, view.rows),
            *(sum(view.position.values()), view.lag_changes, view.lag_seconds),
            *(_verified(view.verified_at, view.verified), view.standing),
        )
        for view in found
    )
    columns = ("view", "version", "kind", "entity", "rows", "position", "lag", "seconds")
    return Result(
        found,
        *(
            Aside(f"misfit: {misfit.entity}: {misfit.text}", "yellow")
            for view in found
            for misfit in view.misfits
        ),
        Aside(_LEGEND, "dim"),
        ResultTable((*columns, "verified", "status"), rows),
    )


@views.command("show")
def show(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="Name of the view.")],
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many rows.")] = 50,
    wait_for: WaitOption = None,
) -> Result:
    """Show the rows of a view as they are now."""
    config, project = session.connected(needs=READING)
    if name in project.derivations:
        if wait_for is not None:
            raise InvalidQuery(f"--wait-for is for views, and {name} is a derived topic.")
        return _topic_shown(project.read(config, name), limit)
    with Reader(config, project) as reader:
        columns, rows = reader.rows(name, limit=limit, wait_for=wait_for)
        return records(columns, rows, notes=list(freshness(reader, name)))


@views.command("token")
def token(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="Name of the view.")],
) -> Result:
    """Print the token of a view's position, for --wait-for, --position and changes(since=…)."""
    config, project = session.connected(needs=READING)
    with Reader(config, project) as reader:
        found = reader.token(name)
    return Result({"view": name, "token": found}, found)


@views.command("verify")
def verify(
    session: AppSession,
    names: Annotated[list[str] | None, typer.Argument(help="Views; none: all.")] = None,
) -> Result:
    """Prove views: the kept rows against the same SQL, run in batch over the archive."""
    config, project = session.connected()
    reports, _ = prove(config, project, names or None)
    if not names:
        tell_refused(project)
    return _reports_shown(reports, are_named=bool(names))


@views.command("recompute")
def recompute(
    session: AppSession,
    names: Annotated[list[str] | None, typer.Argument(help="Views; none: all.")] = None,
    promote: Annotated[
        bool, typer.Option("--promote", help="Rebuild views that differ from their batch.")
    ] = False,
    schedule: Annotated[
        str | None, typer.Option("--schedule", help="Repeat it every 30m, 6h, 1d.")
    ] = None,
) -> Iterator[Result]:
    """Compare views with their batch, once or on a schedule; report, or promote the batch.

    The pipeline does the same by itself every `views.recompute_every_s`. With --schedule a server
    that does not answer is reported, and the next round follows; with --json each round is one
    line.
    """
    every_s = None if schedule is None else seconds_of(schedule)
    config, project = session.connected()
    while True:
        begun = time.monotonic()
        try:
            reports, promoted = prove(config, project, names or None, promote=promote)
        except (Unavailable, RequestCancelled) as error:
            if every_s is None:
                raise
            tell_error(error)
        else:
            notes = [
                Aside(f"{name} is built again; `everstate views list` shows how far", "cyan")
                for name in promoted
            ]
            if every_s is None:
                yield _reports_shown(reports, notes, are_named=bool(names))
                return
            yield Result(_notes(reports), *reports_pieces(reports), notes=notes, is_line=True)
        time.sleep(max(0.0, begun + every_s - time.monotonic()))


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `6h` or `1d` in seconds; raises InvalidQuery."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS_S or not number.isdecimal() or not int(number):
        raise InvalidQuery(f"--schedule {text}: a number and s, m, h or d, such as 6h.")
    return float(number) * _UNITS_S[unit]


def _reports_shown(
    reports: Sequence[ViewReport], notes: Sequence[Aside] = (), *, are_named: bool
) -> Result:
    check = partial(check_reports, reports, are_named=are_named)
    return Result(_notes(reports), *reports_pieces(reports), notes=notes, then=check)


def _notes(reports: Sequence[ViewReport]) -> list[dict[str, Any]]:
    return [report.note() for report in reports]


def _topic_shown(reader: DerivedReader, limit: int) -> Result:
    """The newest records of a derived topic. Cost: a pass over all of them."""
    with reader:
        found = deque(reader.records(idle_s=_TOPIC_IDLE_S), limit)
    rows = ((each.key, each.version, each.kind, cell(each.value)) for each in found)
    columns = ("key", "version", "kind", "value")
    return Result(list(map(asdict, found)), ResultTable(columns, rows, exact=True))


def _verified(moment: datetime | None, report: dict[str, object] | None) -> str | None:
    """When a view was proved, and the result of the proof."""
    if moment is None:
        return None
    seconds = (datetime.now(UTC) - moment).total_seconds()
    held = report is None or bool(report.get("holds", True))
    ago = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{'holds' if held else 'DOES NOT HOLD'}, {ago} ago"
