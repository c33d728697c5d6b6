"""`everstate cdc`: capture changes from other systems' databases, and manage the captures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from everstate.cli.cdc_balance import (
    balance_of,
    balances_pieces,
    vanished_pieces,
    whole_balance,
    why_not_cleaned,
)
from everstate.cli.cdc_captures import capturing_of, connected, declared_capture, status_of
from everstate.cli.cdc_preview import held, preview
from everstate.cli.console import SIGNS, AppSession, err
from everstate.cli.doctor import failing
from everstate.cli.results import Aside, Piece, Result, ResultTable, Verbs, fails
from everstate.errors import InvalidConfig
from everstate.findings import Finding

if TYPE_CHECKING:
    from everstate.sources.cdc.capturing import Capturing
    from everstate.sources.cdc.database import SetupStep
    from everstate.sources.cdc.notifications import Notification
    from everstate.sources.cdc.status import CaptureStatus

_NOT_WELL = 6
"""Exit code when a capture does not read; the same as for a server that does not answer."""

cdc = Verbs(no_args_is_help=True, help="Capture changes of other systems' databases with Debezium.")

NameArgument = Annotated[str, typer.Argument(help="Name of a capture that the app declares.")]


@cdc.command("add")
def add(
    session: AppSession,
    name: NameArgument,
    snapshot: Annotated[
        bool, typer.Option("--snapshot/--no-snapshot", help="Read the existing rows first.")
    ] = True,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait until it reads.")] = 60.0,
) -> Result:
    """Create publication, tables, topics and connector of a capture, as far as they are missing."""
    # Checked before a worker is started, which is not needed if the capture is refused.
    declared_capture(session, name, session.config).refuse_unfit()
    done = capturing_of(session, name, start=True).add(snapshot=snapshot, wait_s=wait)
    warnings = [
        Aside(Text.assemble(SIGNS["warn"], f" {warning.name}: {warning.found}"))
        for warning in done.warnings
    ]
    if warnings:
        warnings.append(Aside(f"`everstate cdc doctor {name}` shows the corrections"))
    return Result(
        {**asdict(done), "changed": done.changed},
        *_steps_pieces(done.steps),
        f"its raw log is the topic {done.topic}",
        *(f"left out: {column}" for column in done.left_out),
        *warnings,
    )


@cdc.command("status")
def status(
    session: AppSession,
    name: Annotated[str | None, typer.Argument(help="Name of a capture. Default: all.")] = None,
) -> Result:
    """Show the state of captures, and the outcome of their rows.

    Exit code 6 if a capture does not read, is not cleaned, has a table with a problem, or lost a
    row.
    """
    project = session.app()
    asked = project.captures if name is None else {name: project.capture_of(name)}
    own = [each.name for each in asked.values() if each.dsn is not None]
    found = {each: status_of(session, each) for each in own}
    config = connected(session)
    rows = {each.name: balance_of(config, each) for each in asked.values()}
    stops = {each: why for each in asked if (why := why_not_cleaned(config, each)) is not None}
    whole = [(each, _whole(found.get(each)), whole_balance(rows[each])) for each in asked]
    vanished = list(vanished_pieces(rows))
    is_well = not (stops or vanished) and all(each.well for each in found.values())
    return Result(
        [{"capture": n, **one, **rest, "notCleaned": stops.get(n)} for n, one, rest in whole],
        *([] if asked else ["the app declares no capture"]),
        *_status_pieces(list(found.values())),
        *balances_pieces(rows),
        *(Aside(f"{each} is not cleaned: {why}") for each, why in stops.items()),
        notes=vanished,
        then=fails(0 if is_well else _NOT_WELL),
    )


def _whole(found: CaptureStatus | None) -> dict[str, object]:
    """A status for JSON; empty for a capture that another system runs."""
    return {} if found is None else {**asdict(found), "well": found.well}


@cdc.command("pause")
def pause(session: AppSession, name: NameArgument) -> Result:
    """Pause a capture; the database retains its log until the capture is resumed."""
    capturing = capturing_of(session, name)
    capturing.pause()
    return _state_shown(capturing)


@cdc.command("resume")
def resume(session: AppSession, name: NameArgument) -> Result:
    """Resume a paused capture at its position; a failed task is restarted."""
    capturing = capturing_of(session, name)
    capturing.resume()
    return _state_shown(capturing)


@cdc.command("snapshot")
def snapshot(
    session: AppSession,
    name: NameArgument,
    table_name: Annotated[
        str | None, typer.Option("--table", help="Table to read. Default: all.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="SQL condition for the rows of the table.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="Value of the primary key, or COLUMN=VALUE, for each part."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the last row.")] = True,
    new_epoch: Annotated[
        bool,
        typer.Option(
            "--new-epoch",
            help="For a restored or replaced database: discard its log position and read all rows.",
        ),
    ] = False,
    yes: Annotated[
        int,
        typer.Option(
            "--yes",
            min=0,
            help="With --new-epoch: delete this many entities of a table whose rows are gone, also "
            "if they are more than capture.deletes_max_percent of them.",
        ),
    ] = 0,
) -> Result:
    """Read rows again while streaming continues: all tables, one, a range of it, or one row."""
    from everstate.sources.cdc.snapshots import snapshot as take

    config = connected(session)
    capturing = capturing_of(session, name)
    if yes and not new_epoch:
        raise InvalidConfig("--yes", yes, "nothing without --new-epoch: no other snapshot deletes")
    if new_epoch:
        if table_name or where or key:
            raise InvalidConfig("--new-epoch", True, "no table: it reads all of them")
        begun = capturing.begin_epoch(may_delete=yes)
        again = f"all rows are read again; `everstate cdc status {name}` shows the progress"
        return Result(begun, *_steps_pieces(begun.steps), again)
    done = take(
        config,
        capturing,
        table=table_name,
        where=where,
        key=_key(key or []),
        wait=wait,
        progress=_tell_progress,
    )
    return Result(
        done,
        f"snapshot {done.id}: {done.state.lower()}, {done.rows:,} rows are in the raw log after "
        f"{done.seconds:.1f} s; `everstate cdc status {name}` shows their outcome",
    )


@cdc.command("remove")
def remove(
    session: AppSession,
    name: NameArgument,
    drop: Annotated[
        bool, typer.Option("--drop", help="Also drop slot, publication, own tables and position.")
    ] = False,
    topics: Annotated[bool, typer.Option("--topics", help="Also delete the raw topics.")] = False,
) -> Result:
    """Delete a capture's connector; without --drop, a later add continues at its position."""
    steps = capturing_of(session, name).remove(drop=drop, topics=topics)
    kept = "the database retains its log for what was kept: add the capture again, or use --drop"
    is_kept = any(step.done == "kept" for step in steps)
    return Result(steps, *_steps_pieces(steps), *([Aside(kept)] if is_kept else []))


@cdc.command("doctor")
def doctor(session: AppSession, name: NameArgument) -> Result:
    """Check the database of a capture and print correcting SQL; exit code 1 at a failure."""
    findings = declared_capture(session, name, connected(session, needs=())).check()
    told = (line for finding in findings for line in _finding_pieces(finding))
    return Result(findings, *told, **failing(findings))


def _finding_pieces(finding: Finding) -> Iterator[Piece]:
    yield Text.assemble(SIGNS[finding.outcome], f" {finding.name}: {finding.found}")
    for statement in finding.sql:
        yield Text(f"    {statement}", "cyan")
    if finding.advice and finding.outcome != "ok":
        yield f"    {finding.advice}"


def _key(given: Sequence[str]) -> Mapping[str, str] | Sequence[str]:
    """Values in order, or by column when several are ``column=value``."""
    if len(given) > 1 and not all("=" in each for each in given):
        raise InvalidConfig("--key", " ".join(given), "COLUMN=VALUE for each column of the key")
    if len(given) > 1:
        return dict(each.split("=", 1) for each in given)
    return list(given)


def _steps_pieces(steps: Sequence[SetupStep]) -> Iterator[Piece]:
    for step in steps:
        yield f"{step.done:<8}{step.what}"
        if step.note:
            yield f"        {step.note}"


def _state_shown(capturing: Capturing) -> Result:
    found = capturing.status()
    return Result(_whole(found), f"{found.capture}: {found.state}")


def _status_pieces(found: Sequence[CaptureStatus]) -> Iterator[Piece]:
    rows = [
        (
            *(each.capture, each.state, each.task, each.connected),
            None if each.behind_s is None else f"{each.behind_s:,.1f}",
            *(_size(each.behind_bytes), _size(each.held_bytes)),
            f"reads {', '.join(each.reads_again)}" if each.reads_again else each.snapshot,
        )
        for each in found
    ]
    columns = ("capture", "connector", "task", "connected", "behind s", "behind", "held")
    if rows:
        yield ResultTable((*columns, "snapshot"), rows)
    for each in found:
        if each.reason:
            yield f"{each.capture}: {each.reason}"
        for problem in each.problems:
            yield f"{each.capture}: {problem}"
        if each.problems:
            yield f"{each.capture}: `everstate cdc doctor {each.capture}` shows the corrections"


def _tell_progress(step: Notification) -> None:
    rows = "" if step.rows is None else f", {step.rows:,} rows"
    what = step.state.lower().replace("_", " ")
    err.print(f"{step.table or 'snapshot'}: {what}{rows}", highlight=False)


def _size(count: int | None) -> str | None:
    if count is None:
        return None
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count:,} B"


cdc.command("preview")(preview)
cdc.command("held")(held)
