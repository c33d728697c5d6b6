"""`everstate demo`: the flights of 2013, from an empty folder to proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from everstate.cli.console import Session
from everstate.demo import FEBRUARY, YEAR

_PIPED_WIDTH = 110


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("demo")(demo)


def demo(
    context: typer.Context,
    year: Annotated[
        bool, typer.Option("--year", help="All 336,776 flights; default: February's 24,951.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on with the data of the last demonstration.")
    ] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep everything running until Ctrl-C.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Its project; default: .everstate/demo.")
    ] = None,
) -> None:
    """Play real flights through a real log, a real lake and views, and prove the result."""
    # Imported here: Spark and pyarrow take a second that no other verb should pay.
    from everstate.demo.run import DemoOptions, run_demo

    session = context.find_object(Session)
    project = session.project if session is not None else Path(".")
    first, last = YEAR if year else FEBRUARY
    options = DemoOptions(
        folder=folder or project / ".everstate" / "demo",
        first=first,
        last=last,
        keep=keep,
        stay=stay,
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    run_demo(options, console)
