"""The command line: one file for each verb, combined by the list in `verbs.py`."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

import everstate
from everstate.cli.console import Session, out
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
    context.obj = Session(project, debug)


def _on_sigterm(number: int, _frame: FrameType | None) -> Any:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; SIGTERM unwinds like Ctrl-C does, so that servers are stopped."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    cli()
