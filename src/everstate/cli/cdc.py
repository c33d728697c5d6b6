"""`everstate cdc`: capture changes from other systems' databases, and manage the captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from everstate.cli.cdc_balance import (
    balance_of,
    has_vanished,
    tell_balances,
    whole_balance,
    why_not_cleaned,
)
from everstate.cli.cdc_captures import capturing_of, connected, declared_capture, status_of
from everstate.cli.cdc_preview import held, preview
from everstate.cli.console import (
    SIGNS,
    AppOption,
    JsonOption,
    config_of,
    err,
    load_app,
    out,
    print_json,
    table,
)
from everstate.errors import InvalidConfig

if TYPE_CHECKING:
    from everstate.sources.cdc.capturing import Capturing
    from everstate.sources.cdc.database import SetupStep
    from everstate.sources.cdc.notifications import Notification
    from everstate.sources.cdc.status import CaptureStatus

_NOT_WELL = 6
"""Exit code when a capture does not read; the same as for a server that does not answer."""

cdc = typer.Typer(
    no_args_is_help=True, help="Capture changes of other systems' databases with Debezium."
)

NameArgument = Annotated[str, typer.Argument(help="Name of a capture that the app declares.")]


@cdc.command("add")
def add(
    context: typer.Context,
    name: NameArgument,
    snapshot: Annotated[
        bool, typer.Option("--snapshot/--no-snapshot", help="Read the existing rows first.")
    ] = True,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to wait until it reads.")] = 60.0,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Create publication, tables, topics and connector of a capture, as far as they are missing."""
    # Checked before a worker is started, which is not needed if the capture is refused.
    declared_capture(context, name, app, config_of(context)).refuse_unfit()
    done = capturing_of(context, name, app, start=True).add(snapshot=snapshot, wait_s=wait)
    if json:
        print_json({**_plain(done), "changed": done.changed})
        return
    _tell_steps(done.steps)
    out.print(f"its raw log is the topic {done.topic}", highlight=False)
    for column in done.left_out:
        out.print(f"left out: {column}", highlight=False)
    for warning in done.warnings:
        err.print(Text.assemble(SIGNS["warn"], f" {warning.name}: {warning.found}"))
    if done.warnings:
        err.print(f"`everstate cdc doctor {name}` shows the corrections", highlight=False)


@cdc.command("status")
def status(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a capture. Default: all.")] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show the state of captures, and the outcome of their rows.

    Exit code 6 if a capture does not read, is not cleaned, has a table with a problem, or lost a
    row.
    """
    project = load_app(app, config_of(context))
    asked = project.captures if name is None else {name: project.capture_of(name)}
    own = [each.name for each in asked.values() if each.dsn is not None]
    found = {each: status_of(context, each, app) for each in own}
    config = connected(context)
    rows = {each.name: balance_of(config, each) for each in asked.values()}
    stops = {each: why for each in asked if (why := why_not_cleaned(config, each)) is not None}
    if json:
        told = [(each, _whole(found.get(each)), whole_balance(rows[each])) for each in asked]
        print_json(
            [{"capture": n, **one, **rest, "notCleaned": stops.get(n)} for n, one, rest in told]
        )
    elif not asked:
        out.print("the app declares no capture", highlight=False)
    else:
        if found:
            _tell_status(list(found.values()))
        tell_balances(rows)
        for each, why in stops.items():
            err.print(f"{each} is not cleaned: {why}", highlight=False)
    # It also prints of which capture, which must not depend on another problem.
    vanished = has_vanished(rows)
    if stops or vanished or not all(each.well for each in found.values()):
        raise typer.Exit(_NOT_WELL)


def _whole(found: CaptureStatus | None) -> dict[str, object]:
    """A status for JSON; empty for a capture that another system runs."""
    return {} if found is None else {**_plain(found), "well": found.well}


@cdc.command("pause")
def pause(
    context: typer.Context, name: NameArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """Pause a capture; the database retains its log until the capture is resumed."""
    capturing = capturing_of(context, name, app)
    capturing.pause()
    _tell_state(capturing, json=json)


@cdc.command("resume")
def resume(
    context: typer.Context, name: NameArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """Resume a paused capture at its position; a failed task is restarted."""
    capturing = capturing_of(context, name, app)
    capturing.resume()
    _tell_state(capturing, json=json)


@cdc.command("snapshot")
def snapshot(
    context: typer.Context,
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
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Read rows again while streaming continues: all tables, one, a range of it, or one row."""
    from everstate.sources.cdc.snapshots import snapshot as take

    config = connected(context)
    capturing = capturing_of(context, name, app)
    if yes and not new_epoch:
        raise InvalidConfig("--yes", yes, "nothing without --new-epoch: no other snapshot deletes")
    if new_epoch:
        if table_name or where or key:
            raise InvalidConfig("--new-epoch", True, "no table: it reads all of them")
        begun = capturing.begin_epoch(may_delete=yes)
        if json:
            print_json(_plain(begun))
            return
        _tell_steps(begun.steps)
        out.print(f"all rows are read again; `everstate cdc status {name}` shows the progress")
        return
    done = take(
        config,
        capturing,
        table=table_name,
        where=where,
        key=_key(key or []),
        wait=wait,
        progress=_tell_progress,
    )
    if json:
        print_json(done)
        return
    out.print(
        f"snapshot {done.id}: {done.state.lower()}, {done.rows:,} rows are in the raw log after "
        f"{done.seconds:.1f} s; `everstate cdc status {name}` shows their outcome",
        highlight=False,
    )


@cdc.command("remove")
def remove(
    context: typer.Context,
    name: NameArgument,
    drop: Annotated[
        bool, typer.Option("--drop", help="Also drop slot, publication, own tables and position.")
    ] = False,
    topics: Annotated[bool, typer.Option("--topics", help="Also delete the raw topics.")] = False,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a capture's connector; without --drop, a later add continues at its position."""
    steps = capturing_of(context, name, app).remove(drop=drop, topics=topics)
    if json:
        print_json(steps)
        return
    _tell_steps(steps)
    if any(step.done == "kept" for step in steps):
        err.print(
            "the database retains its log for what was kept: add the capture again, or use --drop"
        )


@cdc.command("doctor")
def doctor(
    context: typer.Context, name: NameArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """Check the database of a capture and print correcting SQL; exit code 1 at a failure."""
    findings = declared_capture(context, name, app, connected(context, needs=())).check()
    if json:
        print_json(findings)
    else:
        for finding in findings:
            line = f" {finding.name}: {finding.found}"
            out.print(Text.assemble(SIGNS[finding.outcome], line))
            for statement in finding.sql:
                out.print(f"    {statement}", style="cyan", highlight=False)
            if finding.advice and finding.outcome != "ok":
                out.print(f"    {finding.advice}", highlight=False)
    if any(finding.outcome == "fail" for finding in findings):
        err.print("some checks failed: see the lines with ✗")
        raise typer.Exit(1)


def _key(given: Sequence[str]) -> Mapping[str, str] | Sequence[str]:
    """Values in order, or by column when several are ``column=value``."""
    if len(given) > 1 and not all("=" in each for each in given):
        raise InvalidConfig("--key", " ".join(given), "COLUMN=VALUE for each column of the key")
    if len(given) > 1:
        return dict(each.split("=", 1) for each in given)
    return list(given)


def _plain(value: object) -> dict[str, object]:
    import dataclasses

    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    return dataclasses.asdict(value)


def _tell_steps(steps: Sequence[SetupStep]) -> None:
    for step in steps:
        out.print(f"{step.done:<8}{step.what}", highlight=False)
        if step.note:
            out.print(f"        {step.note}", highlight=False)


def _tell_state(capturing: Capturing, *, json: bool) -> None:
    found = capturing.status()
    if json:
        print_json({**_plain(found), "well": found.well})
    else:
        out.print(f"{found.capture}: {found.state}", highlight=False)


def _tell_status(found: Sequence[CaptureStatus]) -> None:
    table(
        ("capture", "connector", "task", "connected", "behind s", "behind", "held", "snapshot"),
        [
            (
                each.capture,
                each.state,
                each.task,
                each.connected,
                None if each.behind_s is None else f"{each.behind_s:,.1f}",
                _size(each.behind_bytes),
                _size(each.held_bytes),
                f"reads {', '.join(each.reads_again)}" if each.reads_again else each.snapshot,
            )
            for each in found
        ],
    )
    for each in found:
        if each.reason:
            out.print(f"{each.capture}: {each.reason}", highlight=False)
        for problem in each.problems:
            out.print(f"{each.capture}: {problem}", highlight=False)
        if each.problems:
            advice = f"`everstate cdc doctor {each.capture}` shows the corrections"
            out.print(f"{each.capture}: {advice}", highlight=False)


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
