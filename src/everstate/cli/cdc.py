"""`everstate cdc`: capture the changes of other systems' databases, and look after the captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from everstate.cli.cdc_preview import held, preview
from everstate.cli.console import (
    AppOption,
    JsonOption,
    config_of,
    err,
    load_app,
    out,
    print_json,
    table,
)
from everstate.config import Config
from everstate.errors import CaptureFailed, InvalidConfig
from everstate.local import ConsoleProgress, Stack

if TYPE_CHECKING:
    from everstate.sources.cdc.capturing import CaptureStatus, Capturing
    from everstate.sources.cdc.database import Step
    from everstate.sources.cdc.notifications import Notification

_NOT_WELL = 6
"""Exit code when a capture does not read, as of a server that is not there."""
_SIGNS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[red]✗[/]"}

cdc = typer.Typer(no_args_is_help=True, help="Captures of other systems' databases, by Debezium.")

NameArgument = Annotated[str, typer.Argument(help="Capture, as the app declares it.")]


def register(cli: typer.Typer) -> None:
    """Add the verbs."""
    cli.add_typer(cdc, name="cdc")


@cdc.command("add")
def add(
    context: typer.Context,
    name: NameArgument,
    snapshot: Annotated[
        bool, typer.Option("--snapshot/--no-snapshot", help="Read the rows that are there, first.")
    ] = True,
    wait: Annotated[float, typer.Option("--wait", help="Seconds until it must read.")] = 60.0,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Make publication, tables, topics and connector of a capture; the same again is no change."""
    done = _capturing(context, name, app, start=True).add(snapshot=snapshot, wait_s=wait)
    if json:
        print_json({**_plain(done), "changed": done.changed})
        return
    _tell_steps(done.steps)
    table(("table", "raw topic"), list(done.topics.items()))


@cdc.command("status")
def status(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Capture; default: all.")] = None,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Show how captures stand, and whether they are really connected; exit code 6 if one is not."""
    config = _connected(context)
    captures = load_app(app, config).captures
    names = [name] if name else [c.name for c in captures.values() if c.dsn is not None]
    found = [_capturing(context, each, app).status() for each in names]
    if json:
        print_json([{**_plain(each), "well": each.well} for each in found])
    elif not found:
        out.print("the app declares no capture with a dsn", highlight=False)
    else:
        _tell_status(found)
    if not all(each.well for each in found):
        raise typer.Exit(_NOT_WELL)


@cdc.command("pause")
def pause(
    context: typer.Context, name: NameArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """Stop reading; the database holds its log until the capture is resumed."""
    capturing = _capturing(context, name, app)
    capturing.pause()
    _tell_state(capturing, json=json)


@cdc.command("resume")
def resume(
    context: typer.Context, name: NameArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """Go on reading where it was paused; a failed task is started again."""
    capturing = _capturing(context, name, app)
    capturing.resume()
    _tell_state(capturing, json=json)


@cdc.command("snapshot")
def snapshot(
    context: typer.Context,
    name: NameArgument,
    table_name: Annotated[
        str | None, typer.Option("--table", help="One table; default: all.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="SQL condition: a range of the table.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="Value of the primary key, or COLUMN=VALUE for each part."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until the last row.")] = True,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Read rows again while streaming goes on: all tables, one, a range of it, or one row."""
    from everstate.sources.cdc.snapshots import snapshot as take

    config = _connected(context)
    capturing = _capturing(context, name, app)
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
        f"snapshot {done.id}: {done.state.lower()}, {done.rows:,} rows in {done.seconds:.1f} s",
        highlight=False,
    )


@cdc.command("remove")
def remove(
    context: typer.Context,
    name: NameArgument,
    drop: Annotated[
        bool, typer.Option("--drop", help="Slot, publication, our tables and position too.")
    ] = False,
    topics: Annotated[bool, typer.Option("--topics", help="Delete the raw topics too.")] = False,
    app: AppOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a capture's connector; without --drop a later add goes on where it ended."""
    steps = _capturing(context, name, app).remove(drop=drop, topics=topics)
    if json:
        print_json(steps)
        return
    _tell_steps(steps)
    if any(step.done == "kept" for step in steps):
        err.print("what is kept holds the database's log: add it again, or remove it with --drop")


@cdc.command("doctor")
def doctor(
    context: typer.Context, name: NameArgument, app: AppOption = None, json: JsonOption = False
) -> None:
    """Check the database of a capture and print the SQL that mends it; exit code 1 at a failure."""
    findings = _capturing(context, name, app, offline=True).check()
    if json:
        print_json(findings)
    else:
        for finding in findings:
            line = f"{_SIGNS[finding.outcome]} {finding.name}: {escape(finding.found)}"
            out.print(line, highlight=False)
            for statement in finding.sql:
                out.print(f"    [cyan]{escape(statement)}[/]", highlight=False)
            if finding.advice and finding.outcome != "ok":
                out.print(f"    {escape(finding.advice)}", highlight=False)
    if any(finding.outcome == "fail" for finding in findings):
        err.print("something is missing: see the lines with ✗")
        raise typer.Exit(1)


def _capturing(
    context: typer.Context,
    name: str,
    app: str | None,
    *,
    start: bool = False,
    offline: bool = False,
) -> Capturing:
    """The capture, with Connect's address; ``start``: a local worker is started when needed."""
    from everstate.sources.cdc.capturing import Capturing

    given = config_of(context)
    capture = load_app(app, given).capture_of(name)
    own = capture.connect_url or given.capture.connect_url
    if offline:
        return Capturing(given, capture, local=own is None)
    if own is None and start:
        Stack(given, also=("connect",)).start(ConsoleProgress(err))
    config = _connected(context)
    if (own or config.capture.connect_url) is None:
        raise CaptureFailed(
            f"capture {name} was not added, or the local connect does not run.",
            advice=f"`everstate cdc add {name}` starts it; `everstate status` shows the servers.",
        )
    return Capturing(config, capture, local=own is None)


def _connected(context: typer.Context) -> Config:
    return Stack(config_of(context)).connect()


def _key(given: Sequence[str]) -> Mapping[str, str] | Sequence[str]:
    """Values in order, or by column when each is ``column=value``."""
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


def _tell_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        out.print(f"{step.done:<8}{escape(step.what)}", highlight=False)


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
                each.snapshot,
            )
            for each in found
        ],
    )
    for each in found:
        if each.reason:
            out.print(f"{each.capture}: {escape(each.reason)}", highlight=False)


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
