"""The command line: one file for each verb, combined by the list in `verbs.py`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

import everstate
from everstate.cli.console import Session, err, out
from everstate.cli.verbs import HELP, VerbGroup

cli = typer.Typer(
    name="everstate",
    help="Every state your entities were ever in: one changelog, a lake, and views with a proof.",
    cls=VerbGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": HELP},
)


_STOPPING = (signal.SIGTERM, signal.SIGINT)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"everstate {everstate.__version__}", highlight=False)
        raise typer.Exit


@cli.callback()
def options(
    context: typer.Context,
    project: Annotated[
        Path, typer.Option("--project", "-C", help="Folder of everstate.toml.", file_okay=False)
    ] = Path("."),
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """Options of every verb."""
    context.obj = Session(project)


def _on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    spark = sys.modules.get("everstate.pipeline.spark.session")
    is_left = spark is not None and spark.leave(128 + number)
    if number == signal.SIGINT and not is_left:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; SIGTERM unwinds like Ctrl-C does, so that servers are stopped."""
    stopping = {128 + number: signal.Signals(number).name for number in _STOPPING}
    for number in _STOPPING:
        signal.signal(number, _on_signal)
    try:
        cli()
    except SystemExit as end:
        if end.code in stopping:
            err.print(f"stopped by {stopping[end.code]}; what was not done yet is left.")
        raise
